"""Which kernels attend: chosen once, when the KV caches are taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from penstock.kernels.gpu.attention_arguments import (
    NOTHING_LISTED,
    DecodeBatch,
    HeadInputs,
    LayerTensors,
    ListedBlocks,
    Scores,
    layer_cache,
)
from penstock.kernels.gpu.decode_attention import decode_attention
from penstock.kernels.gpu.decode_workspace import DecodeWorkspace
from penstock.kernels.gpu.prefill_attention import prefill_attention
from penstock.kernels.gpu.shared_prefix import SharedPrefix, prefix_attention, why_not
from penstock.kernels.quantized_cache import is_quantized
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

    def plan(self, batch: DecodeBatch, prefixed: bool = False) -> None:
        """The first kernel of a step, if there is one; the layers' calls are for the same rows.

        prefixed: whether they go on behind the prefix that it was made with, of which
        ``prefix_attention`` does its part ahead of each call.
        """

    def __call__(
        self,
        layer: int,
        qkv: Tensor,
        batch: DecodeBatch,
        heads: HeadInputs,
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
        batch: DecodeBatch,
        heads: HeadInputs,
    ) -> None: ...


class TritonPrefillAttention:
    """``prefill_attention`` over the caches of each layer."""

    def __init__(
        self, keys: LayerTensors, values: LayerTensors, scores: Sequence[Scores] | None = None
    ) -> None:
        """scores: of each layer; ``None``: scaled by 1 / sqrt(D)."""
        self._caches = [layer_cache(*layer) for layer in zip(keys, values, strict=True)]
        self._scores = scores or [Scores(keys[0].shape[-1] ** -0.5)] * len(keys)

    def __call__(
        self,
        layer: int,
        queries: Tensor,
        tiles: Tensor,
        num_tiles: int,
        table: Tensor,
        out: Tensor,
        sinks: Tensor | None = None,
        listed: ListedBlocks = NOTHING_LISTED,
    ) -> None:
        scores = self._scores[layer]
        cache = self._caches[layer]
        prefill_attention(queries, tiles, num_tiles, table, cache, out, scores, sinks, listed)


class TritonDecodeAttention:
    """``decode_attention`` over the caches of each layer."""

    least_rows = 1

    def __init__(
        self,
        keys: LayerTensors,
        values: LayerTensors,
        workspace: DecodeWorkspace,
        eps: float,
        prefix: SharedPrefix | None = None,
        scores: Sequence[Scores] | None = None,
    ) -> None:
        """scores: of each layer; ``None``: scaled by 1 / sqrt(D)."""
        self._caches = [layer_cache(*layer) for layer in zip(keys, values, strict=True)]
        self._workspace, self._eps, self._prefix = workspace, eps, prefix
        self._scores = scores or [Scores(keys[0].shape[-1] ** -0.5)] * len(keys)

    def plan(self, batch: DecodeBatch, prefixed: bool = False) -> None:
        """Its programs see for themselves."""

    def __call__(
        self,
        layer: int,
        qkv: Tensor,
        batch: DecodeBatch,
        heads: HeadInputs,
        out: Tensor,
        prefixed: bool = False,
        sinks: Tensor | None = None,
        listed: ListedBlocks = NOTHING_LISTED,
    ) -> None:
        decode_attention(
            qkv, batch, heads, self._caches[layer], out, self._workspace, self._eps,
            self._prefix if prefixed else None, self._scores[layer], sinks, listed,
        )  # fmt: skip


class TritonPrefixAttention:
    """``prefix_attention`` over the caches of each layer."""

    def __init__(
        self,
        keys: LayerTensors,
        values: LayerTensors,
        eps: float,
        prefix: SharedPrefix,
        scales: Sequence[float] = (),
    ) -> None:
        """scales: what scores of each layer are multiplied by, by default 1 / sqrt(D)."""
        self._caches = [layer_cache(*layer) for layer in zip(keys, values, strict=True)]
        self._eps, self._prefix = eps, prefix
        self._scales = list(scales) or [keys[0].shape[-1] ** -0.5] * len(keys)

    def __call__(
        self,
        layer: int,
        qkv: Tensor,
        batch: DecodeBatch,
        heads: HeadInputs,
    ) -> None:
        prefix_attention(
            qkv, batch, self._prefix, heads, self._caches[layer], self._eps, self._scales[layer]
        )


def _scales(scores: Sequence[Scores]) -> list[float]:
    """Of each layer."""
    return [each.scale for each in scores]


def why_slow(scores: Sequence[Scores]) -> str:
    """Why no kernel for Hopper attends in any layer; empty if one may."""
    if not scores or any(each.plain for each in scores):
        return ""
    words = {
        "soft cap": any(each.softcap for each in scores),
        "window": any(each.window for each in scores),
        "chunks": any(each.chunk for each in scores),
        "sinks": any(each.sinks for each in scores),
    }
    return f"knows no {' and no '.join(name for name, there in words.items() if there)}"


def choose_prefill_attention(
    keys: LayerTensors, values: LayerTensors, queries: Tensor, scores: Sequence[Scores] = ()
) -> KernelChoice[PrefillAttention]:
    """The fastest kernel that this device, the caches and the Triton at hand allow, for layers
    with plain scores. scores: of each layer; by default scaled by 1 / sqrt(D).

    queries: [T, Hq, D], the buffer that calls get the first rows of, contiguous; it and the caches
    stay at these addresses from now on.
    """

    def fastest() -> PrefillAttention | str:
        from penstock.kernels.gpu import prefill_attention_hopper as hopper

        *_, block_size, dim = keys[0].shape
        why_not = why_slow(scores) or hopper.why_not(keys[0].dtype, dim, block_size)
        return why_not or hopper.HopperPrefillAttention(keys, values, queries, _scales(scores))

    return choose(fastest, TritonPrefillAttention(keys, values, scores), "Triton kernel")


def choose_decode_attention(
    keys: LayerTensors,
    values: LayerTensors,
    heads: int,
    max_rows: int,
    norm: bool,
    eps: float,
    otherwise: TritonDecodeAttention,
    prefix: SharedPrefix | None = None,
    scores: Sequence[Scores] = (),
    unfit: str = "",
) -> KernelChoice[DecodeAttention]:
    """As ``choose_prefill_attention``; ``otherwise`` for the same caches and prefix. unfit: why no
    kernel for Hopper can, besides.

    max_rows: decode rows of a step; norm: whether queries and keys are normed, with eps; prefix:
    what the rows of a step may share.
    """

    def fastest() -> DecodeAttention | str:
        from penstock.kernels.gpu import decode_attention_hopper as hopper

        _, kv_heads, block_size, dim = keys[0].shape
        why_not = hopper.why_not(keys[0].dtype, dim, block_size, heads // kv_heads, max_rows)
        return (
            unfit
            or why_slow(scores)
            or why_not
            or hopper.HopperDecodeAttention(
                keys, values, heads, max_rows, norm, eps, prefix, _scales(scores)
            )
        )

    return choose(fastest, otherwise, "Triton kernel")


def choose_prefix_attention(
    keys: LayerTensors,
    values: LayerTensors,
    heads: int,
    norm: bool,
    eps: float,
    prefix: SharedPrefix,
    scores: Sequence[Scores] = (),
    unfit: str = "",
) -> KernelChoice[PrefixAttention | None]:
    """As ``choose_decode_attention``, for what rows have in common; ``None`` where no kernel can,
    and each row reads all of its own context."""

    _, kv_heads, block_size, dim = keys[0].shape
    special = any(each.local or each.softcap for each in scores)
    known = "knows no window, chunks or soft cap" if special else ""
    if is_quantized(keys[0].dtype):
        known = "has not been checked over quantized KV memory in bfloat16"
    if reason := why_not(heads // kv_heads) or known:
        return KernelChoice(None, "decode attention of each row", f"the kernel {reason}")

    def fastest() -> PrefixAttention | str | None:
        from penstock.kernels.gpu import shared_prefix_hopper as hopper

        reason = hopper.why_not(keys[0].dtype, dim, block_size, heads // kv_heads)
        return (
            unfit
            or reason
            or hopper.HopperPrefixAttention(keys, values, heads, norm, eps, prefix, _scales(scores))
        )

    otherwise = TritonPrefixAttention(keys, values, eps, prefix, _scales(scores))
    return choose(fastest, otherwise, "Triton kernel")
