"""Which kernels a device gets: those for Hopper where they can be compiled, else others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from penstock.kernels.gpu.device_facts import device_capability

HOPPER = (9, 0)

Kernels = TypeVar("Kernels")


class KernelChoice(NamedTuple, Generic[Kernels]):
    kernels: Kernels
    name: str
    reason: str
    """Why it is not the fastest one; empty if it is."""

    @property
    def summary(self) -> str:
        return f"{self.name}: {self.reason}" if self.reason else self.name


def choose(
    fastest: Callable[[], Kernels | str], otherwise: Kernels, name: str
) -> KernelChoice[Kernels]:
    """fastest: makes the kernels for Hopper, or says why it cannot; name: of the others."""
    reason = not_hopper()
    if not reason:
        try:
            # Gluon is experimental: another Triton may lack it, or fail on any of its names.
            made = fastest()
            if not isinstance(made, str):
                return KernelChoice(made, "Gluon kernel for Hopper", "")
            reason = f"the kernel for Hopper {made}"
        except Exception as failure:
            reason = f"the kernel for Hopper failed: {short(failure)}"
    return KernelChoice(otherwise, name, reason)


def short(failure: Exception) -> str:
    """A failure in one line."""
    return f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"


def not_hopper() -> str:
    """Why the device has no kernels for Hopper; empty if it has."""
    capability = device_capability()
    if capability is None:
        return "there is no GPU"
    if capability == HOPPER:
        return ""
    return "the kernel for Hopper needs compute capability 9.0, not {}.{}".format(*capability)
