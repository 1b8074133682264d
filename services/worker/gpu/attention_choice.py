"""Which kernels attend: chosen once, when the KV caches are taken."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from penstock.kernels.gpu.decode_attention import DecodeWorkspace, decode_attention
from penstock.kernels.gpu.prefill_attention import prefill_attention
from penstock.kernels.gpu.shared_prefix import SharedPrefix, prefix_attention, why_not
from penstock.services.worker.gpu.kernel_choice import KernelChoice, choose


class PrefillAttention(Protocol):
    """Attends over one layer's caches; the arguments are those of ``prefill_attention``."""

    def __call__(
        self, layer: int, queries: Tensor, tiles: Tensor, num_tiles: int, table: Tensor, out: Tensor
    ) -> None: ...


class DecodeAttention(Protocol):
    """Attends over one layer's caches; the arguments are those of ``decode_attention``."""

    least_rows: int
    """Steps of fewer rows are faster with ``TritonDecodeAttention``."""

    def plan(self, rows: Tensor, last_position: Tensor, prefixed: bool = False) -> None:
        """The first kernel of a step, if there is one; the layers' calls are for the same rows.

        prefixed: whether they go on behind the prefix that it was made with, of which
        ``prefix_attention`` does its part ahead of each call.
        """

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
        prefixed: bool = False,
    ) -> None: ...


class PrefixAttention(Protocol):
    """Does the part of a shared prefix over one layer's caches; the arguments are those of
    ``prefix_attention``."""

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
        self,
        keys: Tensor,
        values: Tensor,
        workspace: DecodeWorkspace,
        eps: float,
        prefix: SharedPrefix | None = None,
    ) -> None:
        self._caches = list(zip(keys, values, strict=True))
        self._workspace, self._eps, self._prefix = workspace, eps, prefix

    def plan(self, rows: Tensor, last_position: Tensor, prefixed: bool = False) -> None:
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
        prefixed: bool = False,
    ) -> None:
        decode_attention(
            qkv, rows, last_position, table, cos, sin, query_weight, key_weight,
            *self._caches[layer], out, self._workspace, self._eps,
            self._prefix if prefixed else None,
        )  # fmt: skip


class TritonPrefixAttention:
    """``prefix_attention`` over the caches [L, num_blocks, Hkv, block_size, D]."""

    def __init__(self, keys: Tensor, values: Tensor, eps: float, prefix: SharedPrefix) -> None:
        self._caches = list(zip(keys, values, strict=True))
        self._eps, self._prefix = eps, prefix

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
    ) -> None:
        prefix_attention(
            qkv, rows, last_position, self._prefix, table, cos, sin, query_weight,
            *self._caches[layer], self._eps,
        )  # fmt: skip


def choose_prefill_attention(
    keys: Tensor, values: Tensor, queries: Tensor
) -> KernelChoice[PrefillAttention]:
    """The fastest kernel that this device, the caches and the Triton at hand allow.

    keys, values: [L, num_blocks, Hkv, block_size, D], queries: [T, Hq, D], the buffer that calls
    get the first rows of; contiguous, at these addresses from now on.
    """

    def fastest() -> PrefillAttention | str:
        from penstock.kernels.gpu import prefill_attention_hopper as hopper

        why_not = hopper.why_not(keys.dtype, keys.shape[-1], keys.shape[-2])
        return why_not or hopper.HopperPrefillAttention(keys, values, queries)

    return choose(fastest, TritonPrefillAttention(keys, values), "Triton kernel")


def choose_decode_attention(
    keys: Tensor,
    values: Tensor,
    heads: int,
    max_rows: int,
    norm: bool,
    eps: float,
    otherwise: TritonDecodeAttention,
    prefix: SharedPrefix | None = None,
) -> KernelChoice[DecodeAttention]:
    """As ``choose_prefill_attention``; ``otherwise`` for the same caches and prefix.

    max_rows: decode rows of a step; norm: whether queries and keys are normed, with eps; prefix:
    what the rows of a step may share.
    """

    def fastest() -> DecodeAttention | str:
        from penstock.kernels.gpu import decode_attention_hopper as hopper

        _, _, kv_heads, block_size, dim = keys.shape
        why_not = hopper.why_not(keys.dtype, dim, block_size, heads // kv_heads, max_rows)
        return why_not or hopper.HopperDecodeAttention(
            keys, values, heads, max_rows, norm, eps, prefix
        )

    return choose(fastest, otherwise, "Triton kernel")


def choose_prefix_attention(
    keys: Tensor, values: Tensor, heads: int, norm: bool, eps: float, prefix: SharedPrefix
) -> KernelChoice[PrefixAttention | None]:
    """As ``choose_decode_attention``, for what rows have in common; ``None`` where no kernel can,
    and each row reads all of its own context."""

    _, _, kv_heads, block_size, dim = keys.shape
    if reason := why_not(heads // kv_heads):
        return KernelChoice(None, "decode attention of each row", f"the kernel {reason}")

    def fastest() -> PrefixAttention | str | None:
        from penstock.kernels.gpu import shared_prefix_hopper as hopper

        reason = hopper.why_not(keys.dtype, dim, block_size, heads // kv_heads)
        return reason or hopper.HopperPrefixAttention(keys, values, heads, norm, eps, prefix)

    otherwise = TritonPrefixAttention(keys, values, eps, prefix)
    return choose(fastest, otherwise, "Triton kernel")
