"""Products of a decoder's layers whose weights are quantized, with what may be inside them.

Of few rows the gate is inside. Where weights and activations are FP8 and the device multiplies FP8,
rows are quantized by what comes ahead of a product: a norm or a gate, and behind attention alone by
a kernel of its own. All other steps are those of ``LibraryProducts``, whose products are
``QuantizedLinear``'s.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from penstock.kernels.gpu.code_shapes import FEW_ROWS, few_shape, in_rows, takes_fp8
from penstock.kernels.gpu.few_rows_codes import few_rows_codes
from penstock.kernels.gpu.fp8_linear import BLOCK, CODES, fp8_linear
from penstock.kernels.gpu.fp8_rows import (
    Fp8Rows,
    add_rms_norm_fp8,
    fp8_rows_in,
    gated_fp8,
    rms_norm_fp8,
    rows_to_fp8,
)
from penstock.kernels.gpu.norm import add_rms_norm
from penstock.kernels.gpu.side_by_side import side_by_side
from penstock.kernels.gpu.word_weight import WordWeight
from penstock.services.worker.gpu.kernel_choice import KernelChoice, choose
from penstock.services.worker.gpu.layer_products import BoundedProducts, is_divided
from penstock.services.worker.gpu.row_linears import RowsLinear, library_linears
from penstock.services.worker.gpu.workspace import Workspace
from penstock.services.worker.models.dense import DenseLayer, DenseWeights
from penstock.services.worker.models.linear import Linear
from penstock.services.worker.models.linear_specification import LayerLinears, LinearSpecification
from penstock.services.worker.models.quantized_linear import QuantizedLinear

if TYPE_CHECKING:
    from penstock.kernels.gpu.rows_linear_hopper import Shape

GLUON_ROWS = 64
"""Up to so many rows Gluon's kernel multiplies FP8, the library more: a layer of Qwen3-8B with 64
rows takes 84 µs and 107, with 256 rows the library 113 (plain weights 152 and 182; H100)."""

_WIDE_OUTPUTS = 8192
"""With more outputs there are programs enough."""


class CodedProducts(BoundedProducts):
    """For few rows, by kernels for weights in words: the gate is inside."""

    bounds = (1, FEW_ROWS)

    def __init__(self, weights: DenseWeights, space: Workspace, eps: float) -> None:
        linears = library_linears(weights.layers, space)
        ups = [layer.linears.up for layer in weights.layers]

        def gated(layer: int, rows: int, out: Tensor) -> Tensor:
            up, words = ups[layer], words_of(ups[layer])
            shape = few_shape(words, rows)
            if shape is None:
                raise ValueError("a gated product has no shape")
            few_rows_codes(space.normed[:rows], words, up.bias, out, shape, gated=True)
            return out

        linears = linears._replace(up=RowsLinear(gated, gate_inside=True))
        super().__init__(weights, space, eps, linears)


class Fp8Products(BoundedProducts):
    """For any number of rows: all products of rows in FP8 with weights in FP8.

    Rows in FP8 lie in memory of the workspace that is free meanwhile: normed rows in that of normed
    rows, attention's in that of activated ones, and activated ones, where the gate was inside, in
    that of what is to be activated.
    """

    def __init__(
        self, weights: DenseWeights, space: Workspace, eps: float, activation: str = "silu"
    ) -> None:
        """Raises what Triton raises where it cannot compile the kernels."""
        self._normed = fp8_rows_in(space.normed, space.normed.shape[1])
        attended = space.attention_output.flatten(1)
        self._attended = fp8_rows_in(space.activated, attended.shape[1])
        self._gated = fp8_rows_in(space.activated, space.activated.shape[1])
        self._few_gated = fp8_rows_in(space.gate_up, space.activated.shape[1])
        self.bounds = (1, len(space.normed))
        inputs = (self._normed, self._attended, self._normed, self._few_gated)
        of_all = zip(*(layer.linears for layer in weights.layers), strict=True)
        places = [_few_place(*one) for one in zip(inputs, of_all, strict=True)]
        linears = LayerLinears(*side_by_side(partial(_few, activation), places))
        super().__init__(weights, space, eps, linears, activation)

    def begin(self, rows: int) -> None:
        residual = self._space.residual[:rows]
        rms_norm_fp8(residual, self._norms[0], self._eps, self._normed.first(rows))

    def qkv(self, layer: int, rows: int) -> None:
        out = self._space.qkv[:rows].flatten(1)
        few, linear = self._linears.qkv, self._layers[layer].linears.qkv
        self._multiply(few, linear, layer, self._normed.first(rows), out)

    def output(self, layer: int, rows: int) -> None:
        attended, space = self._attended.first(rows), self._space
        rows_to_fp8(space.attention_output[:rows].flatten(1), attended)
        few, linear = self._linears.output, self._layers[layer].linears.output
        product = self._multiply(few, linear, layer, attended, space.projected[:rows])
        norm = self._layers[layer].post_norm
        add_rms_norm_fp8(
            product, space.residual[:rows], norm, self._eps, self._normed.first(rows)
        )  # fmt: skip

    def gate_up(self, layer: int, rows: int) -> None:
        space, few, linear = self._space, self._linears.up, self._layers[layer].linears.up
        normed = self._normed.first(rows)
        if rows <= GLUON_ROWS:
            activated = self._multiply(few, linear, layer, normed, space.activated[:rows])
            rows_to_fp8(activated, self._few_gated.first(rows))
        else:
            gate_up = self._multiply(few, linear, layer, normed, space.gate_up[:rows])
            gated_fp8(gate_up, self._gated.first(rows), self._activation)

    def down(self, layer: int, rows: int) -> None:
        space, few, linear = self._space, self._linears.down, self._layers[layer].linears.down
        x = (self._few_gated if rows <= GLUON_ROWS else self._gated).first(rows)
        product = self._multiply(few, linear, layer, x, space.projected[:rows])
        residual, norm = space.residual[:rows], self._norms[layer + 1]
        if layer + 1 < len(self._layers):
            add_rms_norm_fp8(product, residual, norm, self._eps, self._normed.first(rows))
        else:  # for the LM head, in the model's type
            add_rms_norm(product, residual, norm, self._eps, space.normed[:rows])

    def end(self, rows: int) -> None:
        """``down`` has left them."""

    @staticmethod
    def _multiply(few: RowsLinear, linear: Linear, layer: int, x: Fp8Rows, out: Tensor) -> Tensor:
        """few: of up to ``GLUON_ROWS`` rows."""
        rows = len(out)
        if rows <= GLUON_ROWS:
            return few.multiply(layer, rows, out)
        words = words_of(linear)
        fp8_linear(*x, words.words.view(CODES), factor_of(words), linear.bias, out)
        return out


class _FewPlace(NamedTuple):
    """What a linear layer of each of a decoder's layers reads."""

    x: Tensor
    x_scales: Tensor
    weights: list[Tensor]
    factors: list[Tensor]
    biases: list[Tensor | None]
    specification: LinearSpecification


def _few_place(x: Fp8Rows, linears: tuple[Linear, ...]) -> _FewPlace:
    words = [words_of(each) for each in linears]
    return _FewPlace(
        x.codes,
        x.scales[:, 0],
        [each.words.view(CODES) for each in words],
        [factor_of(each) for each in words],
        [each.bias for each in linears],
        linears[0].specification,
    )


def _few(activation: str, place: _FewPlace) -> RowsLinear:
    """By Gluon's kernel, for up to ``GLUON_ROWS`` rows."""
    from penstock.kernels.gpu.rows_linear_hopper import HopperLinear

    gated, divided = place.specification.gated, place.specification.shard == "inputs"
    multiply = HopperLinear(
        place.x, place.weights, place.biases, (1, GLUON_ROWS), gated=gated, activation=activation,
        divided=divided, scales=place.factors, x_scales=place.x_scales, out_dtype=torch.bfloat16,
        shapes=_shapes(*place.weights[0].shape) if divided else None,
    )  # fmt: skip
    return RowsLinear(multiply, gate_inside=gated)


def _shapes(outputs: int, inputs: int) -> dict[int, Shape]:
    """How products are cut whose parts are added up, by tiles. Of Qwen3-8B with one row the output
    projection takes 8.7 µs in one part and 7.0 in four, down 20.7 and 18.7; with 64 rows the latter
    25.3, and 21.5 in two (H100)."""
    from penstock.kernels.gpu.rows_linear_hopper import Shape, shape_for, tiles_for

    slabs, found = inputs // BLOCK, {}
    for tile in tiles_for((1, GLUON_ROWS)):
        usual = shape_for(inputs, outputs, tile, gated=False, divided=True, item_bytes=1)
        wanted = 4 if tile == 8 else 2
        most = 8 if wanted == 4 else usual.stages
        if outputs <= _WIDE_OUTPUTS and wanted > usual.splits and slabs % wanted == 0:
            usual = Shape(wanted, min(usual.stages, most, slabs // wanted))
        found[tile] = usual
    return found


def words_of(linear: Linear) -> WordWeight:
    words = linear.words if isinstance(linear, QuantizedLinear) else None
    if words is None:
        raise ValueError("a linear layer has no words")
    return words


def factor_of(words: WordWeight) -> Tensor:
    if words.factor is None:
        raise ValueError("a weight has no factor for each row")
    return words.factor


def choose_coded(
    weights: DenseWeights, space: Workspace, eps: float, activation: str = "silu"
) -> KernelChoice[BoundedProducts | None]:
    """The fastest products of quantized weights that have something inside; ``None``: none has."""
    fp8 = _why_not_fp8(weights.layers, space)
    if not fp8:
        made = choose(lambda: Fp8Products(weights, space, eps, activation), None, "library")
        if made.kernels is not None:
            return KernelChoice(made.kernels, "kernels for FP8 on Hopper", "")
        fp8 = made.reason
    coded = _why_not_coded(weights.layers, activation)
    if coded:
        return KernelChoice(None, "products alone", coded)
    kernels = CodedProducts(weights, space, eps)
    return KernelChoice(kernels, "kernels for words", "" if fp8 is _NOT_FP8 else fp8)


_NOT_FP8 = "not all weights and activations are FP8 with a scale a row"


def _why_not_fp8(layers: list[DenseLayer], space: Workspace) -> str:
    linears = [linear for layer in layers for linear in layer.linears]
    if any(not _is_fp8(linear) for linear in linears):
        return _NOT_FP8
    if is_divided(layers):
        return "FP8 rows are quantized ahead of each product, since ranks sum what some give"
    if any(layer.output_norm is not None or layer.down_norm is not None for layer in layers):
        return "FP8 rows are quantized ahead of each product, since sums have norms of their own"
    heads = space.attention_output[0].numel()
    if heads + 4 > 2 * space.activated.shape[1] or heads % 4:
        return f"FP8 rows of {heads} numbers have no room in those of the MLP"
    from penstock.kernels.gpu.rows_linear_hopper import FP8, why_not

    shapes = [(each.specification.inputs, each.specification.columns) for each in linears]
    return next((reason for shape in shapes if (reason := why_not(FP8, *shape))), "")


def _is_fp8(linear: Linear) -> bool:
    words = linear.words if isinstance(linear, QuantizedLinear) and linear.quantizes else None
    return words is not None and in_rows(words) and takes_fp8(words, linear.weight.dtype)


def _why_not_coded(layers: list[DenseLayer], activation: str) -> str:
    if activation != "silu":
        return f"the gate is {activation}"
    for layer in layers:
        up = layer.linears.up
        words = up.words if isinstance(up, QuantizedLinear) else None
        if words is None:
            return "gate and up are no words of one kind"
        if any(few_shape(words, rows) is None for rows in (1, FEW_ROWS)):
            return "gate and up have no shape for few rows"
    return ""
