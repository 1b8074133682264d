"""The decoder of ``--deterministic``: a row's bits do not depend on what else a step has.

The layers, the order of their kernels and the graphs are those of ``GpuDecoder``. What differs are
the kernels that add up: products (``penstock.kernels.gpu.fixed_linear``, and the library where it
gives the same bits: ``fixed_products``) and attention
(``penstock.kernels.gpu.fixed_attention``), each with one order for a row, whether it decodes or
belongs to a chunk, and whatever the number of rows. Norms, rotation and draws have a program for
each row anyway. So a token that was decoded and one that is computed again, from a cached prefix,
after a preemption or the death of a process, leave the same keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.kernels.gpu.fixed_attention import fixed_attention, part_sums, place_rows
from penstock.kernels.gpu.fixed_linear import Shape, shapes_agree, shapes_for
from penstock.kernels.gpu.prefill_attention import QUERY_TILE
from penstock.kernels.gpu.rope_cache import rope_and_cache
from penstock.services.worker.gpu.decoder import GpuDecoder
from penstock.services.worker.gpu.drafted_rows import DraftedRows, StepRows
from penstock.services.worker.gpu.fixed_products import (
    agreeing_sizes,
    divide_no_sums,
    fixed_product,
)
from penstock.services.worker.gpu.kernel_choice import KernelChoice
from penstock.services.worker.gpu.layer_attention import LayerAttention
from penstock.services.worker.gpu.layer_products import BoundedProducts, LayerProducts
from penstock.services.worker.gpu.row_linears import RowsLinear, linears_by
from penstock.services.worker.models.dense import DenseConfig, caches_of
from penstock.services.worker.models.linear import Linear

if TYPE_CHECKING:
    from penstock.kernels.gpu.gated_linear_hopper import HopperGatedLinear

_REASON = "--deterministic asks for one order of sums"


def why_not_fixed(config: DenseConfig) -> str:
    """Why a model in the kernels' form cannot be computed so; empty: it can."""
    if all(cache.plain for cache in caches_of(config)):
        return ""
    return "the model's attention has windows, chunks, soft caps or sinks"


class FixedAttention(LayerAttention):
    """Attends for decode rows and chunk rows by the same kernel."""

    def _choose(self, unfit: str) -> None:
        rows = self._rows
        device, most = rows.qkv.device, len(rows.qkv)
        self._slots, self._positions = (
            torch.zeros(most, dtype=torch.int32, device=device) for _ in range(2)
        )
        slots = len(self._state.rows)
        self._decode_tiles = torch.zeros(4, slots, dtype=torch.int32, device=device)
        _, heads, dim = rows.query.shape
        _, kv_heads, block_size, _ = self._caches[0].keys.shape
        positions = block_size * max(table.shape[1] for table in self._tables)
        self._sums = part_sums(slots, heads, kv_heads, dim, positions, device)

    @property
    def summary(self) -> str:
        return f"attention in one order for all rows: {_REASON}"

    @property
    def widened_room(self) -> tuple[int, int]:
        return 0, 0

    @property
    def shares_prefixes(self) -> bool:
        return False

    def plan(self, num_decode: int, shared: bool) -> None:
        """The first layer does."""

    def attend(
        self,
        layer: int,
        rows: int,
        num_decode: int,
        chunks: StepRows | None,
        shared: bool,
        sinks: Tensor | None = None,
    ) -> None:
        if isinstance(chunks, DraftedRows):
            raise TypeError("steps with drafts have another order of sums")
        slots, positions = self._slots[:rows], self._positions[:rows]
        if layer == 0:
            of_chunks = None if chunks is None else (chunks.slots, chunks.positions)
            batch = self._batch(layer, num_decode)
            place_rows(batch, of_chunks, slots, positions, self._decode_tiles)
        rope_and_cache(
            self._rows.qkv[:rows], slots, positions, self._tables[layer], self._heads[layer],
            self._rows.query[:rows], self._caches[layer], self._eps,
        )  # fmt: skip
        if num_decode:
            self._attend(layer, rows, self._decode_tiles, num_decode, decoding=True)
        if chunks is not None:
            last = layer == len(self._heads) - 1
            tiles = chunks.last_tiles if last else chunks.tiles
            self._attend(layer, rows, tiles, chunks.num_tiles)

    def _attend(
        self, layer: int, rows: int, tiles: Tensor, num_tiles: int, *, decoding: bool = False
    ) -> None:
        """decoding: tiles of one query, of which few are divided among programs."""
        scale, _ = self._scores[layer].in_binary
        most, sums = (1, self._sums) if decoding else (QUERY_TILE, None)
        fixed_attention(
            self._rows.query[:rows], tiles, num_tiles, self._tables[layer], self._caches[layer],
            self._rows.output[:rows], scale, most, sums,
        )  # fmt: skip


def _kind(linear: Linear) -> tuple[torch.Size, torch.dtype]:
    """What products with a weight depend on."""
    return linear.weight.shape, linear.weight.dtype


class FixedDecoder(GpuDecoder):
    """A ``GpuDecoder`` whose kernels add up in one order."""

    attention_class = FixedAttention

    def _choose(self, eps: float, compressed: bool) -> KernelChoice[BoundedProducts | None]:
        """No kernels for some dozens of rows: all rows have the same. One weight of each shape and
        type is tried."""
        layers = self.weights.layers
        linears = [*(each for layer in layers for each in layer.linears), self.weights.lm_head]
        distinct = {_kind(each): each.weight for each in linears}
        with torch.inference_mode():
            self._same_shapes = all(map(shapes_agree, distinct.values()))

        def made(x: Tensor, linears: Sequence[Linear]) -> RowsLinear:
            return RowsLinear(
                lambda layer, rows, out: self._multiply(linears[layer], x[:rows], out)
            )

        self._products_of_all = LayerProducts(
            self.weights, self.space, eps, linears_by(made, layers, self.space),
            self.config.activation,
        )  # fmt: skip
        with torch.inference_mode():
            self._try_library()
        return KernelChoice(None, "Triton kernel for all rows", _REASON)

    def _try_library(self) -> None:
        """With one weight of each kind, in the memory of a step."""
        self._sizes: dict[tuple[torch.Size, torch.dtype], tuple[int, ...]] = {}
        space, linears = self.space, self.weights.layers[0].linears
        if not space.normed.is_cuda:
            return
        divide_no_sums()
        places = [
            (linears.qkv, space.normed, space.qkv.flatten(1)),
            (linears.output, space.attention_output.flatten(1), space.projected),
            (linears.up, space.normed, space.gate_up),
            (linears.down, space.activated, space.projected),
            (self.weights.lm_head, space.normed, space.logits),
        ]
        for linear, x, out in places:
            sizes = agreeing_sizes(x, linear.weight, out, self._shape(linear))
            self._sizes[_kind(linear)] = sizes

    def _choose_gated(self) -> KernelChoice[HopperGatedLinear | None]:
        return KernelChoice(None, "same kernel", "")

    def _shape(self, linear: Linear) -> Shape | None:
        """Of our kernel, where it must be one for all numbers of rows."""
        return None if self._same_shapes else shapes_for(len(linear.weight), linear.weight.dtype)[0]

    def _multiply(self, linear: Linear, x: Tensor, out: Tensor) -> Tensor:
        sizes = self._sizes.get(_kind(linear), ())
        return fixed_product(x, linear.weight, linear.bias, out, sizes, self._shape(linear))

    @property
    def summary(self) -> str:
        how = "" if self._same_shapes else ", as for few rows: others differ in their bits here"
        tried = [len(sizes) for sizes in self._sizes.values()]
        also = f", and the library's at {tried} numbers of rows: same bits" if tried else ""
        return f"{self.attention.summary}; products by one kernel{how}{also}"

    def products_for(self, rows: int, mixed: bool) -> LayerProducts:
        return self._products_of_all

    def _make_logits(self, normed: Tensor, logits: Tensor) -> None:
        self._multiply(self.weights.lm_head, normed, logits)
