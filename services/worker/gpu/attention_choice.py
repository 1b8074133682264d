"""Which kernels attend: chosen once, when the KV caches are taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from penstock.kernels.gpu.decode_attention import DecodeWorkspace, decode_attention
from penstock.kernels.gpu.prefill_attention import prefill_attention
from penstock.kernels.gpu.shared_prefix import SharedPrefix

HOPPER = (9, 0)


class PrefillAttention(Protocol):
    """Attends over one layer's caches; the arguments are those of ``prefill_attention``."""

    def __call__(
        self, layer: int, queries: Tensor, tiles: Tensor, num_tiles: int, table: Tensor, out: Tensor
    ) -> None: ...


class DecodeAttention(Protocol):
    """Attends over one layer's caches; the arguments are those of ``decode_attention``."""

    least_rows: int
    """Steps of fewer rows are faster with ``TritonDecodeAttention``."""

    def plan(self, rows: Tensor, last_position: Tensor) -> None:
        """The first kernel of a step, if there is one; the layers' calls are for the same rows."""

    def __call__(
        self,
        layer: int,
        qkv: Tensor,
        rows: Tensor,
        last_position: Tensor,
        table: Tensor,
        cos: Tensor,
        sin: Tensor,
        query_weight: Tensor | None,
        key_weight: Tensor | None,
        out: Tensor,
    ) -> None: ...


class TritonPrefillAttention:
    """``prefill_attention`` over the caches [L, num_blocks, Hkv, block_size, D]."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._caches = list(zip(keys, values, strict=True))

    def __call__(
        self, layer: int, queries: Tensor, tiles: Tensor, num_tiles: int, table: Tensor, out: Tensor
    ) -> None:
        prefill_attention(queries, tiles, num_tiles, table, *self._caches[layer], out)


class TritonDecodeAttention:
    """``decode_attention`` over the caches [L, num_blocks, Hkv, block_size, D]."""

    least_rows = 1

    def __init__(
        self, keys: Tensor, values: Tensor, workspace: DecodeWorkspace, eps: float
    ) -> None:
        self._caches = list(zip(keys, values, strict=True))
        self._workspace, self._eps = workspace, eps

    def plan(self, rows: Tensor, last_position: Tensor) -> None:
        """Its programs see for themselves."""

    def __call__(
        self,
        layer: int,
        qkv: Tensor,
        rows: Tensor,
        last_position: Tensor,
        table: Tensor,
        cos: Tensor,
        sin: Tensor,
        query_weight: Tensor | None,
        key_weight: Tensor | None,
        out: Tensor,
        prefix: SharedPrefix | None = None,
    ) -> None:
        decode_attention(
            qkv, rows, last_position, table, cos, sin, query_weight, key_weight,
            *self._caches[layer], out, self._workspace, self._eps, prefix,
        )  # fmt: skip


Attention = TypeVar("Attention")


class AttentionChoice(NamedTuple, Generic[Attention]):
    attention: Attention
    name: str
    reason: str
    """Why it is not the fastest one; empty if it is."""

    @property
    def summary(self) -> str:
        return f"{self.name}: {self.reason}" if self.reason else self.name


def choose_prefill_attention(
    keys: Tensor, values: Tensor, heads: int
) -> AttentionChoice[PrefillAttention]:
    """The fastest kernel that this device, the caches and the Triton at hand allow.

    keys, values: [L, num_blocks, Hkv, block_size, D], contiguous, at these addresses from now on;
    heads: Hq.
    """

    def fastest() -> PrefillAttention | str:
        from penstock.kernels.gpu import prefill_attention_hopper as hopper

        why_not = hopper.why_not(keys.dtype, keys.shape[-1], keys.shape[-2])
        return why_not or hopper.HopperPrefillAttention(keys, values, heads)

    return _choose(fastest, TritonPrefillAttention(keys, values))


def choose_decode_attention(
    keys: Tensor,
    values: Tensor,
    heads: int,
    max_rows: int,
    norm: bool,
    eps: float,
    otherwise: TritonDecodeAttention,
) -> AttentionChoice[DecodeAttention]:
    """As ``choose_prefill_attention``; ``otherwise`` for the same caches.

    max_rows: decode rows of a step; norm: whether queries and keys are normed, with eps.
    """

    def fastest() -> DecodeAttention | str:
        from penstock.kernels.gpu import decode_attention_hopper as hopper

        _, _, kv_heads, block_size, dim = keys.shape
        why_not = hopper.why_not(keys.dtype, dim, block_size, heads // kv_heads, max_rows)
        return why_not or hopper.HopperDecodeAttention(keys, values, heads, max_rows, norm, eps)

    return _choose(fastest, otherwise)


def _choose(
    fastest: Callable[[], Attention | str], otherwise: Attention
) -> AttentionChoice[Attention]:
    """fastest: makes the kernel for Hopper, or says why it cannot."""
    reason = _not_hopper()
    if not reason:
        try:
            # Gluon is experimental: another Triton may lack it, or fail on any of its names.
            made = fastest()
            if not isinstance(made, str):
                return AttentionChoice(made, "Gluon kernel for Hopper", "")
            reason = f"the kernel for Hopper {made}"
        except Exception as failure:
            words = " ".join(str(failure).split())[:200]
            reason = f"the kernel for Hopper failed: {type(failure).__name__}: {words}"
    return AttentionChoice(otherwise, "Triton kernel", reason)


def _not_hopper() -> str:
    if not torch.cuda.is_available():
        return "there is no GPU"
    capability = torch.cuda.get_device_capability()
    if capability == HOPPER:
        return ""
    return "the kernel for Hopper needs compute capability 9.0, not {}.{}".format(*capability)
