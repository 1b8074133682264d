"""A decoder's layers without attention: products with weights, norms, gates and sums.

Which kernels compute them depends on the number of rows of a step and on the device: the library's
products with kernels of ours between them, or products of ours with some or all of that inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.kernels.gpu.activation import gated_product
from penstock.kernels.gpu.all_reduce import all_reduce_add_norm
from penstock.kernels.gpu.few_rows_linear import MOST_ROWS, NARROW
from penstock.kernels.gpu.few_rows_linear import fits as fits_few_rows
from penstock.kernels.gpu.norm import add_normed, add_rms_norm, rms_norm
from penstock.kernels.gpu.skinny_linear import fits
from penstock.kernels.kernel_table import chosen
from penstock.services.worker.gpu.kernel_choice import KernelChoice, choose
from penstock.services.worker.gpu.row_linears import (
    RowsLinear,
    fused_linears,
    hopper_linears,
    library_linears,
    over_peers,
)
from penstock.services.worker.gpu.workspace import Workspace
from penstock.services.worker.models.dense import DenseLayer, DenseWeights
from penstock.services.worker.models.linear import Linear, SummedLinear
from penstock.services.worker.models.linear_specification import LayerLinears
from penstock.services.worker.models.quantized_linear import SummedQuantizedLinear

if TYPE_CHECKING:
    from penstock.kernels.gpu.compressed_linear_hopper import CompressedLinear
    from penstock.kernels.gpu.gated_linear_hopper import HopperGatedLinear

HOPPER_ROWS = (5, 128)
"""Numbers of rows, from and to, for which ``HopperProducts`` are faster than those below and above:
for hidden sizes under ``NARROW`` ..."""
WIDE_HOPPER_ROWS = (1, 64)
"""... and for others. A step of Qwen3-0.6B took 956 µs at 16 rows and 1,581 at 64 with them, 1,365
and 1,933 with the library's; of Qwen3-8B 4,190 at one row (4,297 with ``skinny_linear``), 4,317 at
8, 4,480 at 16 and 5,425 at 64 (library: 5,136 and 5,830; H200, contexts of 400, 2026-11-22)."""


_QUANTIZED = "does not read quantized weights"


class LayerProducts:
    """What is done for the first ``rows`` rows of the workspace: ``begin``, then for each layer
    ``qkv``, attention, ``output``, ``gate_up`` and ``down``, then ``end``.

    What comes behind the last attention may be done by others than what comes before, for fewer
    rows: behind ``down`` ``residual`` is complete, and ``output`` reads nothing but it and
    ``attention_output``.
    """

    def __init__(
        self,
        weights: DenseWeights,
        space: Workspace,
        eps: float,
        linears: LayerLinears[RowsLinear],
        activation: str = "silu",
    ) -> None:
        """linears: whatever they have inside; of norms and sums, all or none."""
        self._layers, self._space, self._eps = weights.layers, space, eps
        self._linears, self._activation = linears, activation
        # Ahead of each layer, and ahead of the head.
        self._norms = [layer.input_norm for layer in weights.layers] + [weights.norm]

    def begin(self, rows: int) -> None:
        """The embedded rows are in ``residual``."""
        if not self._linears.qkv.norm_inside:
            self._norm(self._norms[0], rows)

    def qkv(self, layer: int, rows: int) -> None:
        """Write ``qkv``."""
        self._linears.qkv.multiply(layer, rows, self._space.qkv[:rows].flatten(1))

    def output(self, layer: int, rows: int) -> None:
        """Add to ``residual``, from ``attention_output``."""
        weights = self._layers[layer]
        self._add(self._linears.output, layer, rows, weights.output_norm, weights.post_norm)

    def gate_up(self, layer: int, rows: int) -> None:
        """Write ``activated``."""
        up, activated = self._linears.up, self._space.activated[:rows]
        if up.gate_inside:
            up.multiply(layer, rows, activated)
        else:
            gate_up = up.multiply(layer, rows, self._space.gate_up[:rows])
            gated_product(gate_up, activated, self._activation, up.added(rows))

    def down(self, layer: int, rows: int) -> None:
        """Add to ``residual``."""
        norm = self._norms[layer + 1]
        self._add(self._linears.down, layer, rows, self._layers[layer].down_norm, norm)

    def end(self, rows: int) -> None:
        """Leave the final norm's rows in ``normed``."""
        if self._linears.down.sum_inside:  # else the last layer's sum was normed already
            self._norm(self._norms[-1], rows)

    def _norm(self, norm: Tensor, rows: int) -> None:
        space = self._space
        rms_norm(space.residual[:rows], norm, self._eps, space.normed[:rows])

    def _add(
        self, linear: RowsLinear, layer: int, rows: int, x_norm: Tensor | None, norm: Tensor
    ) -> None:
        """x_norm: of what is added, if it has one; norm: of the sum, for ``normed``."""
        space = self._space
        residual, normed = space.residual[:rows], space.normed[:rows]
        if linear.sum_inside:
            linear.multiply(layer, rows, residual)
            return
        product = linear.multiply(layer, rows, space.projected[:rows])
        if linear.ranks is not None:
            shared = linear.ranks.shared_rows(residual)
            if shared is not None:
                all_reduce_add_norm(product, residual, norm, self._eps, normed, shared, x_norm)
                return
            linear.ranks.sum(product)
        added = linear.added(rows)
        if x_norm is None:
            add_rms_norm(product, residual, norm, self._eps, normed, added)
        else:
            add_normed(product, x_norm, residual, norm, self._eps, normed, added)


class LibraryProducts(LayerProducts):
    """Products by torch, with our kernels between them, for any number of rows.

    gated: computes the gated products of those numbers of rows for which it pays.
    """

    def __init__(
        self,
        weights: DenseWeights,
        space: Workspace,
        eps: float,
        gated: HopperGatedLinear | None = None,
        activation: str = "silu",
    ) -> None:
        super().__init__(weights, space, eps, library_linears(weights.layers, space), activation)
        self._gated = gated

    def gate_up(self, layer: int, rows: int) -> None:
        if self._gated is not None and self._gated.pays(rows):
            self._gated(layer, rows)
        else:
            super().gate_up(layer, rows)


class FusedProducts(LayerProducts):
    """Products by Triton kernels that include norms, gates and sums, for ``most_rows`` at most."""

    def __init__(
        self, weights: DenseWeights, space: Workspace, eps: float, activation: str = "silu"
    ) -> None:
        self.most_rows = most_fused_rows(weights.layers, activation)
        linears = fused_linears(weights.layers, space, eps, narrow=self.most_rows > 1)
        super().__init__(weights, space, eps, linears, activation)


class BoundedProducts(LayerProducts):
    """Products for numbers of rows within ``bounds``, from and to."""

    bounds: tuple[int, int]
    compressed = False
    """Whether they read compressed weights."""
    head: CompressedLinear | None = None
    """Makes logits of up to ``bounds[1]`` sampled rows."""


class HopperProducts(BoundedProducts):
    """By ``rows_linear_hopper``, or ``compressed_linear_hopper`` for compressed weights."""

    def __init__(
        self,
        weights: DenseWeights,
        space: Workspace,
        eps: float,
        compressed: bool,
        activation: str = "silu",
        bounds: tuple[int, int] | None = None,
    ) -> None:
        """compressed: whether all layers' weights are; bounds: others than ``hopper_rows``. Raises
        what Triton raises where it cannot compile the kernels."""
        self.bounds = bounds or hopper_rows(weights.layers, activation, compressed=compressed)
        self.compressed = compressed
        linears = hopper_linears(
            weights.layers, space, self.bounds, activation, compressed=compressed
        )
        if is_divided(weights.layers):
            summed = library_linears(weights.layers, space)
            linears = linears._replace(
                output=over_peers(linears.output, summed.output),
                down=over_peers(linears.down, summed.down),
            )
        super().__init__(weights, space, eps, linears, activation)
        self.linears = linears
        if compressed and weights.lm_head.compressed is not None:
            from penstock.kernels.gpu.compressed_linear_hopper import CompressedLinear

            self.head = CompressedLinear(
                space.normed, [weights.lm_head.compressed], [None], (1, self.bounds[1])
            )


def most_fused_rows(layers: Sequence[DenseLayer], activation: str = "silu") -> int:
    """Up to how many rows of a step ``FusedProducts`` are for: as many as suit every layer."""
    return min(_most_fused_rows(layer, activation) for layer in layers)


def rows_key(layers: Sequence[DenseLayer], *, compressed: bool) -> tuple[str, int, int]:
    """Of ``kernel_table``: the table of these layers' numbers of rows, and their sizes."""
    down = layers[0].linears.down.specification
    return "compressed_rows" if compressed else "hopper_rows", down.outputs, down.inputs


def hopper_rows(
    layers: Sequence[DenseLayer], activation: str = "silu", *, compressed: bool = False
) -> tuple[int, int]:
    """Numbers of rows, from and to, that ``HopperProducts`` are for: as they were measured on this
    device, or as a rule. Up to 0: none."""
    here = chosen(*rows_key(layers, compressed=compressed))
    if here is not None:
        return here[0], here[1]
    hidden = layers[0].linears.down.specification.outputs
    first, last = HOPPER_ROWS if hidden < NARROW else WIDE_HOPPER_ROWS
    return (first if most_fused_rows(layers, activation) else 1), last


def is_divided(layers: Sequence[DenseLayer]) -> bool:
    """Whether ranks sum what the output and down projections give."""
    summed = SummedLinear | SummedQuantizedLinear
    return any(isinstance(layer.linears.down, summed) for layer in layers)


def _most_fused_rows(layer: DenseLayer, activation: str) -> int:
    if is_divided([layer]):
        return 0
    dtype = layer.linears.qkv.weight.dtype
    if any(linear.quantized for linear in layer.linears):
        return 0
    if dtype == torch.float16 or activation != "silu" or layer.output_norm is not None:
        return 0
    linears = [linear.specification for linear in layer.linears]
    if not all(fits(each.inputs, each.outputs) for each in linears):
        return 0
    few = layer.linears.down.specification.inputs % 16 == 0 and all(
        fits_few_rows(each.inputs, each.outputs) for each in linears
    )
    if not few or dtype != torch.bfloat16:
        return 1
    return MOST_ROWS if layer.linears.qkv.specification.inputs < NARROW else 1


def choose_products(
    weights: DenseWeights,
    space: Workspace,
    eps: float,
    compressed: bool = False,
    activation: str = "silu",
) -> KernelChoice[BoundedProducts | None]:
    """The fastest products for some dozens of rows; ``None``: the others are for all rows.
    compressed: whether to read the compressed form of the layers, which then all have one."""

    def fastest() -> BoundedProducts | str:
        from penstock.kernels.gpu import rows_linear_hopper as hopper

        for linears in zip(*(layer.linears for layer in weights.layers), strict=True):
            if why_not := _why_not(linears, hopper.why_not):
                return why_not
        if not hopper_rows(weights.layers, activation, compressed=compressed)[1]:
            return "is slower for any number of rows, says --kernel-table"
        return HopperProducts(weights, space, eps, compressed, activation)

    if compressed:
        choice = choose(fastest, None, "library")
        if choice.kernels is not None:
            return choice
        # Whatever has failed, the kernels for plain weights may do.
        compressed = False

    return choose(fastest, None, "library")


def choose_gated(
    weights: DenseWeights, space: Workspace, activation: str = "silu"
) -> KernelChoice[HopperGatedLinear | None]:
    """The fastest gated products of many rows; ``None``: the library's."""

    def fastest() -> HopperGatedLinear | str:
        from penstock.kernels.gpu import gated_linear_hopper as hopper

        ups = [layer.linears.up for layer in weights.layers]
        if any(up.specification.bias for up in ups):
            return "takes no bias"
        return _why_not(ups, hopper.why_not) or hopper.HopperGatedLinear(
            space.normed, [up.weight for up in ups], space.activated, activation
        )

    return choose(fastest, None, "library")


def _why_not(linears: Sequence[Linear], why_not: Callable[[torch.dtype, int, int], str]) -> str:
    """Why a kernel that is compiled once cannot compute this linear layer of every layer; empty if
    it can. why_not: for a type, inputs and columns."""
    if any(linear.quantized for linear in linears):
        return _QUANTIZED
    kinds = {(each.specification, each.weight.dtype) for each in linears}
    if len(kinds) > 1:
        return "takes layers of one size"
    ((each, dtype),) = kinds
    return why_not(dtype, each.inputs, each.columns)
