"""What kernels must know of the device that they are compiled for. They ask here alone, so that it
can be said of a device that is not there.

torch is imported only where the device of this process is asked.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

USUAL_MULTIPROCESSORS = 132
"""Of an H100 and an H200."""
_LARGE, _USUAL = 227 * 1024, 99 * 1024
_SHARED_BYTES = {
    (7, 0): 96 * 1024, (7, 5): 64 * 1024, (8, 0): 163 * 1024, (8, 7): 163 * 1024,
    (9, 0): _LARGE, (10, 0): _LARGE, (10, 3): _LARGE,
}  # fmt: skip
"""CUDA programming guide, "Technical Specifications per Compute Capability"."""


class DeviceFacts(NamedTuple):
    capability: tuple[int, int]
    """Compute capability."""
    shared_bytes: int
    """Shared memory that a program may have."""
    multiprocessors: int
    """They decide how many programs are launched, and into how many parts prefixes are cut."""


_without_gpu = USUAL_MULTIPROCESSORS
"""So many are taken for granted where there is no GPU: in the interpreter."""
_pretended: DeviceFacts | None = None


def pretend(facts: DeviceFacts) -> None:
    """Let all kernels of this process be compiled for such a device, and none run. Before any other
    module of ``penstock.kernels.gpu`` is imported."""
    global _pretended
    _pretended = facts


def facts_of(
    capability: tuple[int, int], multiprocessors: int = USUAL_MULTIPROCESSORS
) -> DeviceFacts:
    """Of GPUs of this compute capability."""
    return DeviceFacts(capability, _SHARED_BYTES.get(capability, _USUAL), multiprocessors)


def device_capability() -> tuple[int, int] | None:
    """Compute capability of the current device; ``None``: there is no GPU."""
    if _pretended is not None:
        return _pretended.capability
    import torch

    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def multiprocessors() -> int:
    """How many the current device has."""
    if _pretended is not None:
        return _pretended.multiprocessors
    return _device_multiprocessors() or _without_gpu


@functools.cache
def _device_multiprocessors() -> int:
    """0: there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.get_device_properties("cuda").multi_processor_count)


@functools.cache
def shared_bytes() -> int:
    """Shared memory that a program may have on the current device."""
    if _pretended is not None:
        return _pretended.shared_bytes
    import torch
    import triton

    if not torch.cuda.is_available():
        return _LARGE
    properties = triton.runtime.driver.active.utils.get_device_properties
    return int(properties(torch.cuda.current_device())["max_shared_mem"])
