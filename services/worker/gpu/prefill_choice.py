"""Which kernel attends for prefill chunks: chosen once, when the KV caches are taken."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.kernels.gpu.prefill_attention import prefill_attention

HOPPER = (9, 0)


class PrefillAttention(Protocol):
    """Attends over one layer's caches; the arguments are those of ``prefill_attention``."""

    def __call__(
        self, layer: int, queries: Tensor, tiles: Tensor, num_tiles: int, table: Tensor, out: Tensor
    ) -> None: ...


class TritonPrefillAttention:
    """``prefill_attention`` over the caches [L, num_blocks, Hkv, block_size, D]."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._caches = list(zip(keys, values, strict=True))

    def __call__(
        self, layer: int, queries: Tensor, tiles: Tensor, num_tiles: int, table: Tensor, out: Tensor
    ) -> None:
        prefill_attention(queries, tiles, num_tiles, table, *self._caches[layer], out)


class PrefillChoice(NamedTuple):
    attention: PrefillAttention
    name: str
    reason: str
    """Why it is not the fastest one; empty if it is."""

    @property
    def summary(self) -> str:
        return f"{self.name}: {self.reason}" if self.reason else self.name


def choose_prefill_attention(keys: Tensor, values: Tensor, heads: int) -> PrefillChoice:
    """The fastest kernel that this device, the caches and the Triton at hand allow.

    keys, values: [L, num_blocks, Hkv, block_size, D], contiguous, at these addresses from now on;
    heads: Hq.
    """
    reason = _not_hopper()
    if not reason:
        try:
            # Gluon is experimental: another Triton may lack it, or fail on any of its names.
            from penstock.kernels.gpu import prefill_attention_hopper as hopper

            why_not = hopper.why_not(keys.dtype, keys.shape[-1], keys.shape[-2])
            if not why_not:
                attention = hopper.HopperPrefillAttention(keys, values, heads)
                return PrefillChoice(attention, "Gluon kernel for Hopper", "")
            reason = f"the kernel for Hopper {why_not}"
        except Exception as failure:
            words = " ".join(str(failure).split())[:200]
            reason = f"the kernel for Hopper failed: {type(failure).__name__}: {words}"
    return PrefillChoice(TritonPrefillAttention(keys, values), "Triton kernel", reason)


def _not_hopper() -> str:
    if not torch.cuda.is_available():
        return "there is no GPU"
    capability = torch.cuda.get_device_capability()
    if capability == HOPPER:
        return ""
    return "the kernel for Hopper needs compute capability 9.0, not {}.{}".format(*capability)
