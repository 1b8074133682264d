"""A decoder's linear layers on a CUDA device: each multiplies the first rows of a buffer.

The kernels differ in what they do beside the product. ``layer_products`` puts around each linear
layer what is not inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from penstock.kernels.gpu.added_rows import AddedRows
from penstock.kernels.gpu.few_rows_linear import few_rows_linear
from penstock.kernels.gpu.side_by_side import side_by_side
from penstock.kernels.gpu.skinny_linear import skinny_linear
from penstock.services.worker.gpu.workspace import Workspace
from penstock.services.worker.models.dense import DenseLayer
from penstock.services.worker.models.linear import Linear, SummedLinear
from penstock.services.worker.models.linear_specification import LayerLinears
from penstock.services.worker.models.quantized_linear import SummedQuantizedLinear

if TYPE_CHECKING:
    from penstock.services.worker.rank_group import RankGroup

Place = tuple[Tensor, tuple[Linear, ...]]
"""What a linear layer reads, [T, inputs], and the linear layer itself of each layer."""


class RowsLinear(NamedTuple):
    """One linear layer of each of a decoder's layers."""

    multiply: Callable[[int, int, Tensor], Tensor]
    """Of (layer, rows, out): write the product to ``out``, and return it, or parts [P, rows, N] in
    fp32 whose sum it would be."""
    norm_inside: bool = False
    """It reads the residual stream and norms it, where others read normed rows."""
    gate_inside: bool = False
    """It writes activated rows."""
    sum_inside: bool = False
    """It adds to ``out``, the residual stream."""
    ranks: RankGroup | None = None
    """It writes this rank's part of a sum over these."""
    added: Callable[[int], AddedRows | None] = lambda rows: None
    """Of so many rows: what whoever reads the product is to add to it."""


def library_linears(layers: list[DenseLayer], space: Workspace) -> LayerLinears[RowsLinear]:
    """By torch, or ``QuantizedLinear``'s products, with nothing inside, for any number of rows."""

    def made(place: Place) -> RowsLinear:
        x, linears = place
        summed = [
            each for each in linears if isinstance(each, SummedLinear | SummedQuantizedLinear)
        ]
        if summed:
            return RowsLinear(
                lambda layer, rows, out: summed[layer].apply_part(x[:rows], out),
                ranks=summed[0].ranks,
            )
        if linears[0].specification.shard == "inputs":  # what adds to the residual takes parts
            return RowsLinear(lambda layer, rows, out: linears[layer].apply_in_parts(x[:rows], out))
        return RowsLinear(lambda layer, rows, out: linears[layer].apply(x[:rows], out))

    return LayerLinears(*map(made, _places(layers, space, space.normed)))


def linears_by(
    made: Callable[[Tensor, Sequence[Linear]], RowsLinear],
    layers: list[DenseLayer],
    space: Workspace,
) -> LayerLinears[RowsLinear]:
    """made: of what a linear layer reads, [T, inputs], and that of each layer; with nothing
    inside."""
    return LayerLinears(*(made(*place) for place in _places(layers, space, space.normed)))


def over_peers(parts: RowsLinear, summed: RowsLinear) -> RowsLinear:
    """``parts`` where one kernel can sum over the ranks what they give, else ``summed``."""
    ranks = summed.ranks

    def multiply(layer: int, rows: int, out: Tensor) -> Tensor:
        can = ranks is not None and ranks.shared_rows(out) is not None
        return (parts if can else summed).multiply(layer, rows, out)

    return RowsLinear(multiply, ranks=ranks)


def fused_linears(
    layers: list[DenseLayer], space: Workspace, eps: float, *, narrow: bool
) -> LayerLinears[RowsLinear]:
    """By Triton kernels with norms, gate and sums inside. narrow: whether one row has the kernel of
    a few, too."""

    def made(place: Place, norms: list[Tensor] | None) -> RowsLinear:
        x, linears = place
        gated = linears[0].specification.gated

        def multiply(layer: int, rows: int, out: Tensor) -> Tensor:
            linear = linears[layer]
            kernel = few_rows_linear if rows > 1 or narrow else skinny_linear
            kernel(
                x[:rows], linear.weight, linear.bias, out,
                norm_weight=None if norms is None else norms[layer],
                eps=0.0 if norms is None else eps, gated=gated, add=norms is None,
            )  # fmt: skip
            return out

        return RowsLinear(multiply, norms is not None, gated, norms is None)

    input_norms = [layer.input_norm for layer in layers]
    norms = (input_norms, None, [layer.post_norm for layer in layers], None)
    return LayerLinears(*map(made, _places(layers, space, space.residual), norms))


def hopper_linears(
    layers: list[DenseLayer],
    space: Workspace,
    bounds: tuple[int, int],
    activation: str,
    *,
    compressed: bool,
) -> LayerLinears[RowsLinear]:
    """By Gluon kernels with the gate inside, for numbers of rows from and to ``bounds``.
    compressed: whether they read compressed weights.

    Raises what Triton raises where it cannot compile them.
    """

    def made(place: Place) -> RowsLinear:
        x, linears = place
        specification = linears[0].specification
        gated, biases = specification.gated, [linear.bias for linear in linears]
        multiply: Callable[[int, int, Tensor], Tensor]
        if compressed:
            from penstock.kernels.gpu.compressed_linear_hopper import CompressedLinear

            forms = [linear.compressed for linear in linears if linear.compressed is not None]
            multiply = CompressedLinear(
                x, forms, biases, bounds, gated=gated, activation=activation
            )
        else:
            from penstock.kernels.gpu.rows_linear_hopper import HopperLinear

            multiply = HopperLinear(
                x, [linear.weight for linear in linears], biases, bounds, gated=gated,
                activation=activation, divided=specification.shard == "inputs",
            )  # fmt: skip
        return RowsLinear(multiply, gate_inside=gated)

    return LayerLinears(*side_by_side(made, _places(layers, space, space.normed)))


def _places(layers: list[DenseLayer], space: Workspace, x: Tensor) -> list[Place]:
    """x: what QKV and up read."""
    inputs = (x, space.attention_output.flatten(1), x, space.activated)
    of_all = zip(*(layer.linears for layer in layers), strict=True)
    return [*zip(inputs, of_all, strict=True)]
