"""The steps of a ``GpuDecoder`` in which some row has an adapter.

They are other launches than those without, with graphs of their own, so that the others cost what
they cost where there are no adapters. Beside the product of each linear layer ``shrink`` is
computed, and behind both ``expand`` (``penstock.kernels.gpu.low_rank``); norms, gates and sums that
other steps have inside of their products follow behind these. A prefix that rows share is not read
once for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.kernels.gpu.added_rows import AddedRows
from penstock.kernels.gpu.low_rank import SPLIT_ROWS, RowTiles, expand, shrink, small_numbers
from penstock.kernels.low_rank import StackedLowRank
from penstock.services.worker.gpu.adapter_tiles import AdapterTiles
from penstock.services.worker.gpu.chunk_rows import ChunkRows
from penstock.services.worker.gpu.drafted_rows import StepRows
from penstock.services.worker.gpu.graph_sizes import GraphSizes, adapted_graph_sizes
from penstock.services.worker.gpu.kv_pool import KVPool
from penstock.services.worker.gpu.layer_products import HopperProducts, LayerProducts
from penstock.services.worker.gpu.row_linears import RowsLinear, library_linears
from penstock.services.worker.gpu.side_stream import SideStream
from penstock.services.worker.gpu.static_memory import layer_operations
from penstock.services.worker.gpu.step_decoder import StepDecoder
from penstock.services.worker.models.linear_specification import LayerLinears

if TYPE_CHECKING:
    from penstock.services.worker.adapters.device_adapters import DeviceAdapters
    from penstock.services.worker.gpu.decoder import GpuDecoder


class AdaptedDecoder(StepDecoder):
    """Shares weights, memory and attention with a ``GpuDecoder``."""

    may_wait = False

    def __init__(
        self, decoder: GpuDecoder, adapters: DeviceAdapters, tiles: AdapterTiles, max_rows: int
    ) -> None:
        """max_rows: of the largest step."""
        self._decoder, self._tiles = decoder, tiles
        self.state, self.space = decoder.state, decoder.space
        self.vocab_size, self.num_kv_heads = decoder.vocab_size, decoder.num_kv_heads
        self._low_rank = _LowRankLayers(decoder, adapters, max_rows)
        weights, space = decoder.weights, decoder.space
        library = library_linears(weights.layers, space)
        self._any_rows = self._products(library)
        self._few_rows: LayerProducts | None = None
        self._bounds = (0, 0)
        kernels = decoder.products.kernels
        if isinstance(kernels, HopperProducts):
            # Their gate is inside of the product: the update belongs ahead of it.
            self._few_rows = self._products(kernels.linears._replace(up=library.up))
            self._bounds = kernels.bounds

    def _products(self, linears: LayerLinears[RowsLinear]) -> LayerProducts:
        decoder = self._decoder
        config = decoder.config
        return LayerProducts(
            decoder.weights, decoder.space, config.rms_norm_eps,
            self._low_rank.with_updates(linears), config.activation,
        )  # fmt: skip

    def _for(self, rows: int) -> LayerProducts:
        first, last = self._bounds
        if self._few_rows is not None and first <= rows <= last:
            return self._few_rows
        return self._any_rows

    @property
    def summary(self) -> str:
        return "rows with adapters by two more kernels a product"

    @property
    def kv_pool(self) -> KVPool:
        return self._decoder.kv_pool

    @property
    def row_classes(self) -> Sequence[int]:
        ours = {SPLIT_ROWS, self._bounds[1]} - {0}
        return sorted(ours.union(self._decoder.row_classes))

    @property
    def shares_prefixes(self) -> bool:
        return False

    def graph_sizes(self, most: int, max_rows: int) -> GraphSizes:
        """Fewer than for steps without: both kinds are captured at the start, since a capture
        while the server runs would hold up every row."""
        return adapted_graph_sizes(most, max_rows, layer_operations(self._decoder.config))

    def body(
        self,
        rows: int,
        num_decode: int,
        chunks: StepRows | None,
        shared: bool = False,
    ) -> None:
        self._low_rank.tiles = self._tiles.all(rows, mixed=isinstance(chunks, ChunkRows))
        self._decoder.body_by(self._for(rows), rows, num_decode, chunks, shared=False)

    def head(self, count: int) -> None:
        self._low_rank.tiles = self._tiles.sampled(count)
        self._decoder.head_by(self._for(count), count)

    def head_of_all(self, rows: int, count: int) -> None:
        self._low_rank.tiles = self._tiles.all(rows, mixed=True)
        self._decoder.head_of_all_by(self._for(rows), rows, count)

    def row_logits(self, first: int, count: int) -> Tensor:
        return self._decoder.row_logits(first, count)


class _LowRankLayers:
    """The adapters' part of all linear layers."""

    tiles: RowTiles
    """Of the products that come next."""

    def __init__(self, decoder: GpuDecoder, adapters: DeviceAdapters, max_rows: int) -> None:
        space = decoder.space
        self._adapters, self._side = adapters, SideStream(space.normed.device)
        self._inputs = LayerLinears(
            space.normed, space.attention_output.flatten(1), space.normed, space.activated
        )
        widest = max(stack.down.shape[1] for layer in adapters.stacks for stack in layer)
        device = space.normed.device
        self._small = torch.empty(
            small_numbers(max_rows, widest), dtype=torch.float32, device=device
        )
        outputs = max(space.normed.shape[1], space.gate_up.shape[1])
        self._more = space.normed.new_empty(min(max_rows, SPLIT_ROWS) * outputs)

    def with_updates(self, linears: LayerLinears[RowsLinear]) -> LayerLinears[RowsLinear]:
        """The products, and what adapters add to them."""
        stacks = LayerLinears(*zip(*self._adapters.stacks, strict=True))
        return LayerLinears(
            self._behind(linears.qkv, self._inputs.qkv, stacks.qkv),
            self._beside(linears.output, self._inputs.output, stacks.output),
            self._beside(linears.up, self._inputs.up, stacks.up),
            self._beside(linears.down, self._inputs.down, stacks.down),
        )

    def _behind(
        self, linear: RowsLinear, x: Tensor, stacks: Sequence[StackedLowRank]
    ) -> RowsLinear:
        """A product to which the updates are added in place."""
        if linear.norm_inside or linear.gate_inside or linear.sum_inside or linear.ranks:
            raise ValueError("adapters come behind a plain product alone")

        def multiply(layer: int, rows: int, out: Tensor) -> Tensor:
            product = self._run(
                rows,
                lambda: linear.multiply(layer, rows, out),
                lambda: self._shrink(stacks[layer], x[:rows]),
            )
            # Of a product in parts, whose sum it is, the first part gets the update.
            self._expand(stacks[layer], product if product.ndim == 2 else product[0], add=True)
            return product

        return RowsLinear(multiply)

    def _beside(
        self, linear: RowsLinear, x: Tensor, stacks: Sequence[StackedLowRank]
    ) -> RowsLinear:
        """A product to which whoever reads it adds the updates; in place if there are many rows."""
        behind, outputs = self._behind(linear, x, stacks), sum(stacks[0].parts)

        def added(rows: int) -> AddedRows | None:
            if rows > SPLIT_ROWS:
                return None
            return AddedRows(self._more[: rows * outputs].view(rows, outputs), self.tiles.adapters)

        def multiply(layer: int, rows: int, out: Tensor) -> Tensor:
            update = added(rows)
            if update is None:
                return behind.multiply(layer, rows, out)

            def low_rank() -> None:
                self._shrink(stacks[layer], x[:rows])
                self._expand(stacks[layer], update.more, add=False)

            return self._run(rows, lambda: linear.multiply(layer, rows, out), low_rank)

        return RowsLinear(multiply, added=added)

    def _run(
        self, rows: int, product: Callable[[], Tensor], low_rank: Callable[[], None]
    ) -> Tensor:
        """Both, beside each other where there are few rows. Products of many leave no room, and
        larger steps may be launched kernel by kernel, where a second stream costs the host time."""
        if rows <= SPLIT_ROWS:
            # The product's programs last, and those of the updates wait for memory.
            return self._side.run(product, low_rank, other_first=True)
        result = product()
        low_rank()
        return result

    def _shrink(self, stack: StackedLowRank, x: Tensor) -> None:
        shrink(x, stack, self._adapters.ranks, self.tiles, self._small)

    def _expand(self, stack: StackedLowRank, out: Tensor, *, add: bool) -> None:
        expand(out, stack, self._adapters.ranks, self.tiles, self._small, add=add)
