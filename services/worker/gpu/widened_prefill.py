"""Attention of chunks over KV memory of a byte a number, by the kernel of plain KV memory.

A chunk's rows read each position many times, so it pays to make its keys and values wide once a
layer (``penstock.kernels.gpu.widen_cache``) and to attend with the faster kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from penstock.kernels.cache_kinds import widened_units
from penstock.kernels.gpu.attention_arguments import LayerCache, Scores
from penstock.kernels.gpu.widen_cache import Contexts, unit_for, wide_cache, widen_cache
from penstock.kernels.quantized_cache import is_quantized
from penstock.services.worker.gpu.attention_choice import PrefillAttention, why_slow
from penstock.services.worker.gpu.kernel_choice import KernelChoice, choose


class WidenedPrefill:
    """``PrefillAttention`` for steps whose contexts have room."""

    def __init__(
        self, caches: Sequence[LayerCache], queries: Tensor, table: Tensor, scales: Sequence[float]
    ) -> None:
        """caches: of each layer, quantized; queries: as for ``choose_prefill_attention``; table:
        the block tables of a group of layers, [slots, W]; scales: of each layer's scores.

        Raises what Triton raises where it cannot compile or load the kernel.
        """
        from penstock.kernels.gpu.prefill_attention_hopper import HopperPrefillAttention

        _, kv_heads, block_size, _ = caches[0].keys.shape
        dim, item = queries.shape[-1], queries.element_size()
        self.unit = unit_for(block_size)
        """Positions that a context is filled up to."""
        slots, width = table.shape
        self.units = widened_units(slots, width, kv_heads, dim, item, self.unit, block_size)
        """Of which there is memory for so many."""
        self._caches = caches
        self._wide = wide_cache(self.units, kv_heads, block_size, dim, table, queries.dtype)
        keys, values = ([cache] * len(caches) for cache in self._wide[:2])
        self._attend: PrefillAttention = HopperPrefillAttention(keys, values, queries, scales)

    def __call__(
        self,
        layer: int,
        queries: Tensor,
        tiles: Tensor,
        num_tiles: int,
        table: Tensor,
        out: Tensor,
        contexts: Contexts,
    ) -> None:
        """contexts: of the chunks that the tiles are of."""
        widen_cache(contexts, table, self._caches[layer], self._wide)
        self._attend(layer, queries, tiles, num_tiles, self._wide.table, out)


def choose_widened_prefill(
    caches: Sequence[LayerCache], queries: Tensor, table: Tensor, scores: Sequence[Scores]
) -> KernelChoice[WidenedPrefill | None]:
    """``None`` where KV memory is plain, or no faster kernel reads such heads. Arguments as those
    of ``WidenedPrefill``; scores: of each layer."""
    if not is_quantized(caches[0].keys.dtype):
        return KernelChoice(None, "", "KV memory is plain")

    def fastest() -> WidenedPrefill | str | None:
        from penstock.kernels.gpu import prefill_attention_hopper as hopper

        block_size, dim = caches[0].keys.shape[2], queries.shape[-1]
        reason = why_slow(scores) or hopper.why_not(queries.dtype, dim, block_size)
        scales = [each.scale for each in scores]
        return reason or WidenedPrefill(caches, queries, table, scales)

    return choose(fastest, None, "codes as they are")
