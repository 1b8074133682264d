"""A decoder's layers without attention: products with weights, norms, gates and sums.

Which kernels compute them depends on the number of rows of a step and on the device: the library's
products with kernels of ours between them, or products of ours with all that inside.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from penstock.kernels.gpu.activation import gated_product
from penstock.kernels.gpu.few_rows_linear import MOST_ROWS, NARROW, few_rows_linear
from penstock.kernels.gpu.few_rows_linear import fits as fits_few_rows
from penstock.kernels.gpu.norm import add_normed, add_rms_norm, rms_norm
from penstock.kernels.gpu.side_by_side import side_by_side
from penstock.kernels.gpu.skinny_linear import fits, skinny_linear
from penstock.services.worker.gpu.kernel_choice import KernelChoice, choose
from penstock.services.worker.gpu.workspace import Workspace
from penstock.services.worker.models.dense import DenseLayer, DenseWeights

if TYPE_CHECKING:
    from penstock.kernels.gpu.compressed_linear_hopper import CompressedLinear
    from penstock.kernels.gpu.gated_linear_hopper import HopperGatedLinear
    from penstock.services.worker.gpu.compressed_layers import CompressedLayers

HOPPER_ROWS = (5, 128)
"""Numbers of rows, from and to, for which ``HopperProducts`` are faster than those below and above:
for hidden sizes under ``NARROW`` ..."""
WIDE_HOPPER_ROWS = (1, 64)
"""... and for others. A step of Qwen3-0.6B took 956 µs at 16 rows and 1,581 at 64 with them, 1,365
and 1,933 with the library's; of Qwen3-8B 4,190 at one row (4,297 with ``skinny_linear``), 4,317 at
8, 4,480 at 16 and 5,425 at 64 (library: 5,136 and 5,830; H200, contexts of 400, 2026-11-22)."""


DIVIDED = ("output", "down")
"""Layers of few columns: programs of a Gluon kernel may share their width."""


class LayerProducts(Protocol):
    """What is done for the first ``rows`` rows of the workspace: ``begin``, then for each layer
    ``qkv``, attention, ``output``, ``gate_up`` and ``down``, then ``end``.

    What comes behind the last attention may be done by others than what comes before, for fewer
    rows: behind ``down`` ``residual`` is complete, and ``output`` reads nothing but it and
    ``attention_output``.
    """

    def begin(self, rows: int) -> None:
        """The embedded rows are in ``residual``."""

    def qkv(self, layer: int, rows: int) -> None:
        """Write ``qkv``."""

    def output(self, layer: int, rows: int) -> None:
        """Add to ``residual``, from ``attention_output``."""

    def gate_up(self, layer: int, rows: int) -> None:
        """Write ``activated``."""

    def down(self, layer: int, rows: int) -> None:
        """Add to ``residual``."""

    def end(self, rows: int) -> None:
        """Leave the final norm's rows in ``normed``."""


class LibraryProducts:
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
        self._layers, self._space, self._eps = weights.layers, space, eps
        self._gated, self._activation = gated, activation
        self._norms = _input_norms(weights)

    def begin(self, rows: int) -> None:
        space = self._space
        rms_norm(space.residual[:rows], self._norms[0], self._eps, space.normed[:rows])

    def qkv(self, layer: int, rows: int) -> None:
        weights, space = self._layers[layer], self._space
        _linear(space.normed[:rows], weights.qkv, weights.qkv_bias, space.qkv[:rows].flatten(1))

    def output(self, layer: int, rows: int) -> None:
        weights = self._layers[layer]
        attention_output = self._space.attention_output[:rows].flatten(1)
        norms = weights.output_norm, weights.post_norm
        self._add(attention_output, weights.output, weights.output_bias, *norms)

    def gate_up(self, layer: int, rows: int) -> None:
        if self._gated is not None and self._gated.pays(rows):
            self._gated(layer, rows)
            return
        weights, space = self._layers[layer], self._space
        gate_up = space.gate_up[:rows]
        _linear(space.normed[:rows], weights.gate_up, weights.gate_up_bias, gate_up)
        gated_product(gate_up, space.activated[:rows], self._activation)

    def down(self, layer: int, rows: int) -> None:
        weights, activated = self._layers[layer], self._space.activated[:rows]
        norms = weights.down_norm, self._norms[layer + 1]
        self._add(activated, weights.down, weights.down_bias, *norms)

    def end(self, rows: int) -> None:
        """The last layer's sum was normed already."""

    def _add(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, x_norm: Tensor | None, norm: Tensor
    ) -> None:
        space, rows = self._space, len(x)
        projected = space.projected[:rows]
        _linear(x, weight, bias, projected)
        _add_to_residual(projected, x_norm, space, rows, norm, self._eps)


class FusedProducts:
    """Products by Triton kernels that include norms, gates and sums, for ``most_rows`` at most."""

    def __init__(
        self, weights: DenseWeights, space: Workspace, eps: float, activation: str = "silu"
    ) -> None:
        self._layers, self._norm, self._space = weights.layers, weights.norm, space
        self._eps = eps
        self.most_rows = most_fused_rows(weights.layers[0], activation)
        self._narrow = self.most_rows > 1

    def begin(self, rows: int) -> None:
        """Each product norms its rows for itself."""

    def qkv(self, layer: int, rows: int) -> None:
        weights, space = self._layers[layer], self._space
        self._linear(rows)(
            space.residual[:rows], weights.qkv, weights.qkv_bias, space.qkv[:rows].flatten(1),
            norm_weight=weights.input_norm, eps=self._eps,
        )  # fmt: skip

    def output(self, layer: int, rows: int) -> None:
        weights, space = self._layers[layer], self._space
        attention_output, residual = space.attention_output[:rows].flatten(1), space.residual[:rows]
        self._linear(rows)(
            attention_output, weights.output, weights.output_bias, residual, add=True
        )

    def gate_up(self, layer: int, rows: int) -> None:
        weights, space = self._layers[layer], self._space
        self._linear(rows)(
            space.residual[:rows], weights.gate_up, weights.gate_up_bias, space.activated[:rows],
            norm_weight=weights.post_norm, eps=self._eps, gated=True,
        )  # fmt: skip

    def down(self, layer: int, rows: int) -> None:
        weights, space = self._layers[layer], self._space
        activated, residual = space.activated[:rows], space.residual[:rows]
        self._linear(rows)(activated, weights.down, weights.down_bias, residual, add=True)

    def end(self, rows: int) -> None:
        space = self._space
        rms_norm(space.residual[:rows], self._norm, self._eps, space.normed[:rows])

    def _linear(self, rows: int) -> Callable[..., None]:
        """``few_rows_linear`` or ``skinny_linear``, which take the same."""
        return few_rows_linear if rows > 1 or self._narrow else skinny_linear


class HopperProducts:
    """Products by ``rows_linear_hopper``, or ``compressed_linear_hopper`` for compressed weights,
    for numbers of rows within ``bounds``."""

    head: CompressedLinear | None = None
    """Makes logits of up to ``bounds[1]`` sampled rows."""

    def __init__(
        self,
        weights: DenseWeights,
        space: Workspace,
        eps: float,
        compressed: CompressedLayers | None,
        activation: str = "silu",
    ) -> None:
        """Raises what Triton raises where it cannot compile the kernels."""
        self._layers, self._space, self._eps = weights.layers, space, eps
        first, last = HOPPER_ROWS if space.normed.shape[1] < NARROW else WIDE_HOPPER_ROWS
        self.bounds = (first if most_fused_rows(weights.layers[0], activation) else 1, last)
        self._norms = _input_norms(weights)
        linears = _plain_linears if compressed is None else partial(_compressed_linears, compressed)
        self._qkv, self._output, self._gate_up, self._down = linears(
            self._layers, space, self.bounds, activation
        )
        self.compressed = compressed is not None
        if compressed is not None and not isinstance(compressed.head, str):
            from penstock.kernels.gpu.compressed_linear_hopper import CompressedLinear

            self.head = CompressedLinear(
                space.normed, [compressed.head], [None], (1, self.bounds[1])
            )

    def begin(self, rows: int) -> None:
        space = self._space
        rms_norm(space.residual[:rows], self._norms[0], self._eps, space.normed[:rows])

    def qkv(self, layer: int, rows: int) -> None:
        self._qkv(layer, rows, self._space.qkv[:rows].flatten(1))

    def output(self, layer: int, rows: int) -> None:
        weights = self._layers[layer]
        self._add(self._output, layer, rows, weights.output_norm, weights.post_norm)

    def gate_up(self, layer: int, rows: int) -> None:
        self._gate_up(layer, rows, self._space.activated[:rows])

    def down(self, layer: int, rows: int) -> None:
        norm = self._norms[layer + 1]
        self._add(self._down, layer, rows, self._layers[layer].down_norm, norm)

    def end(self, rows: int) -> None:
        """The last layer's sum was normed already."""

    def _add(
        self, linear: RowsLinear, layer: int, rows: int, x_norm: Tensor | None, norm: Tensor
    ) -> None:
        space = self._space
        product = linear(layer, rows, space.projected[:rows])
        _add_to_residual(product, x_norm, space, rows, norm, self._eps)


RowsLinear = Callable[[int, int, Tensor], Tensor]
"""``HopperLinear`` or ``CompressedLinear``: layer, rows, out."""


def _plain_linears(
    layers: list[DenseLayer], space: Workspace, bounds: tuple[int, int], activation: str
) -> list[RowsLinear]:
    """QKV, output, gate and up, down."""
    from penstock.kernels.gpu.rows_linear_hopper import HopperLinear

    inputs = _inputs(space)

    def linear(name: str) -> HopperLinear:
        return HopperLinear(
            inputs[name], [getattr(layer, name) for layer in layers], _biases(layers, name), bounds,
            gated=name == "gate_up", activation=activation, divided=name in DIVIDED,
        )  # fmt: skip

    return [*side_by_side(linear, inputs)]


def _compressed_linears(
    compressed: CompressedLayers,
    layers: list[DenseLayer],
    space: Workspace,
    bounds: tuple[int, int],
    activation: str,
) -> list[RowsLinear]:
    """As ``_plain_linears``."""
    from penstock.kernels.gpu.compressed_linear_hopper import CompressedLinear

    inputs = _inputs(space)

    def linear(name: str) -> CompressedLinear:
        return CompressedLinear(
            inputs[name], getattr(compressed, name), _biases(layers, name), bounds,
            gated=name == "gate_up", activation=activation,
        )  # fmt: skip

    return [*side_by_side(linear, inputs)]


def _inputs(space: Workspace) -> dict[str, Tensor]:
    """What each of a layer's products reads."""
    attention_output, normed = space.attention_output.flatten(1), space.normed
    return {"qkv": normed, "output": attention_output, "gate_up": normed, "down": space.activated}


def _biases(layers: list[DenseLayer], name: str) -> list[Tensor | None]:
    return [getattr(layer, f"{name}_bias") for layer in layers]


def _input_norms(weights: DenseWeights) -> list[Tensor]:
    """Weights of the norms ahead of each layer, and ahead of the head."""
    return [layer.input_norm for layer in weights.layers] + [weights.norm]


def _add_to_residual(
    x: Tensor, x_norm: Tensor | None, space: Workspace, rows: int, norm: Tensor, eps: float
) -> None:
    """x: [rows, hidden], or parts whose sum is it; x_norm: its norm, if it has one; norm: of the
    sum, for ``normed``."""
    residual, normed = space.residual[:rows], space.normed[:rows]
    if x_norm is None:
        add_rms_norm(x, residual, norm, eps, normed)
    else:
        add_normed(x, x_norm, residual, norm, eps, normed)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """x: [N, in]; weight: [out, in]; out: [N, out]."""
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def most_fused_rows(layer: DenseLayer, activation: str = "silu") -> int:
    """Up to how many rows of a step ``FusedProducts`` are for."""
    dtype = layer.qkv.dtype
    if dtype == torch.float16 or activation != "silu" or layer.output_norm is not None:
        return 0
    shapes = [weight.shape for weight in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    if not all(fits(width, columns) for columns, width in shapes):
        return 0
    few = layer.down.shape[1] % 16 == 0 and all(
        fits_few_rows(width, columns) for columns, width in shapes
    )
    if not few or dtype != torch.bfloat16:
        return 1
    return MOST_ROWS if layer.qkv.shape[1] < NARROW else 1


def choose_products(
    weights: DenseWeights,
    space: Workspace,
    eps: float,
    compressed: CompressedLayers | None = None,
    activation: str = "silu",
) -> KernelChoice[HopperProducts | None]:
    """The fastest products for some dozens of rows; ``None``: the others are for all rows."""

    def fastest() -> HopperProducts | str:
        from penstock.kernels.gpu import rows_linear_hopper as hopper

        layer = weights.layers[0]
        inner = len(layer.gate_up) // 2
        for weight, outs in (
            (layer.qkv, len(layer.qkv)), (layer.output, len(layer.output)),
            (layer.gate_up, inner), (layer.down, len(layer.down)),
        ):  # fmt: skip
            why_not = hopper.why_not(weight.dtype, weight.shape[1], outs)
            if why_not:
                return why_not
        return HopperProducts(weights, space, eps, compressed, activation)

    if compressed is not None:
        choice = choose(fastest, None, "library")
        if choice.kernels is not None:
            return choice
        # Whatever has failed, the kernels for plain weights may do.
        compressed = None

    return choose(fastest, None, "library")


def choose_gated(
    weights: DenseWeights, space: Workspace, activation: str = "silu"
) -> KernelChoice[HopperGatedLinear | None]:
    """The fastest gated products of many rows; ``None``: the library's."""

    def fastest() -> HopperGatedLinear | str:
        from penstock.kernels.gpu import gated_linear_hopper as hopper

        layers = weights.layers
        if layers[0].gate_up_bias is not None:
            return "takes no bias"
        rows, width = layers[0].gate_up.shape
        why_not = hopper.why_not(layers[0].gate_up.dtype, width, rows // 2)
        return why_not or hopper.HopperGatedLinear(
            space.normed, [layer.gate_up for layer in layers], space.activated, activation
        )

    return choose(fastest, None, "library")
