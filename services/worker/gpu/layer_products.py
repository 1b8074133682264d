"""The products of a decoder's layers with weights: by the library, or by kernels of our own.

A layer has four, between norms, attention and sums that are the decoder's. Which kernels compute
them depends on the number of rows of a step; norms and gates are part of the kernels for the
fewest (``GpuDecoder``), gates also of ours for some dozens of rows on Hopper.
"""

from __future__ import annotations

import sys
from typing import Protocol

import torch
from torch import Tensor

from penstock.kernels.gpu.activation import silu_and_mul
from penstock.kernels.gpu.few_rows_linear import NARROW
from penstock.services.worker.gpu.kernel_choice import KernelChoice, choose
from penstock.services.worker.gpu.workspace import Workspace
from penstock.services.worker.models.decoder import LayerWeights

ROWS = (5, 128)
"""Numbers of rows, from and to, for which the products of ours on Hopper are faster than those
below and above: for hidden sizes under ``NARROW`` ..."""
WIDE_ROWS = (1, 64)
"""... and for others. A step of Qwen3-0.6B took 956 µs at 16 rows and 1,581 at 64 with them, 1,365
and 1,933 with the library's; of Qwen3-8B 4,190 at one row (4,297 with ``skinny_linear``), 4,317 at
8, 4,480 at 16 and 5,425 at 64 (library: 5,136 and 5,830; H200, contexts of 400, 2026-11-22)."""


class LayerProducts(Protocol):
    """The products of ``layer`` for the first ``rows`` rows of the workspace."""

    least_rows: int
    """Fewer are faster with norms and sums inside the products, where there are such kernels."""
    most_rows: int
    """For more it has no kernel."""

    def qkv(self, layer: int, rows: int) -> None:
        """From ``normed`` to ``qkv``."""

    def output(self, layer: int, rows: int) -> Tensor:
        """From ``mixed``: what the residual stream is to be added, as ``add_rms_norm`` takes it."""

    def gated(self, layer: int, rows: int) -> None:
        """From ``normed`` to ``activated``."""

    def down(self, layer: int, rows: int) -> Tensor:
        """From ``activated``, as ``output``."""


class LibraryProducts:
    """By torch."""

    least_rows, most_rows = sys.maxsize, sys.maxsize

    def __init__(self, layers: list[LayerWeights], space: Workspace) -> None:
        self._layers, self._space = layers, space

    def qkv(self, layer: int, rows: int) -> None:
        weights, space = self._layers[layer], self._space
        _linear(space.normed[:rows], weights.qkv, weights.qkv_bias, space.qkv[:rows].flatten(1))

    def output(self, layer: int, rows: int) -> Tensor:
        weights, projected = self._layers[layer], self._space.projected[:rows]
        mixed = self._space.mixed[:rows].flatten(1)
        _linear(mixed, weights.output, weights.output_bias, projected)
        return projected

    def gated(self, layer: int, rows: int) -> None:
        weights, space = self._layers[layer], self._space
        gate_up = space.gate_up[:rows]
        _linear(space.normed[:rows], weights.gate_up, weights.gate_up_bias, gate_up)
        silu_and_mul(gate_up, space.activated[:rows])

    def down(self, layer: int, rows: int) -> Tensor:
        weights, projected = self._layers[layer], self._space.projected[:rows]
        _linear(self._space.activated[:rows], weights.down, weights.down_bias, projected)
        return projected


class HopperProducts:
    """By ``rows_linear_hopper``."""

    def __init__(self, layers: list[LayerWeights], space: Workspace) -> None:
        """Raises what Triton raises where it cannot compile the kernels."""
        from penstock.kernels.gpu.rows_linear_hopper import HopperLinear

        self._space = space
        narrow = space.normed.shape[1] < NARROW
        self.least_rows, self.most_rows = bounds = ROWS if narrow else WIDE_ROWS
        self._qkv = HopperLinear(
            space.normed, [layer.qkv for layer in layers], [layer.qkv_bias for layer in layers],
            bounds,
        )  # fmt: skip
        self._output = HopperLinear(
            space.mixed.flatten(1), [layer.output for layer in layers],
            [layer.output_bias for layer in layers], bounds, divided=True,
        )  # fmt: skip
        self._gated = HopperLinear(
            space.normed, [layer.gate_up for layer in layers],
            [layer.gate_up_bias for layer in layers], bounds, gated=True,
        )  # fmt: skip
        self._down = HopperLinear(
            space.activated, [layer.down for layer in layers],
            [layer.down_bias for layer in layers], bounds, divided=True,
        )  # fmt: skip

    def qkv(self, layer: int, rows: int) -> None:
        self._qkv(layer, rows, self._space.qkv[:rows].flatten(1))

    def output(self, layer: int, rows: int) -> Tensor:
        return self._output(layer, rows, self._space.projected[:rows])

    def gated(self, layer: int, rows: int) -> None:
        self._gated(layer, rows, self._space.activated[:rows])

    def down(self, layer: int, rows: int) -> Tensor:
        return self._down(layer, rows, self._space.projected[:rows])


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """x: [N, in]; weight: [out, in]; out: [N, out]."""
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def choose_products(
    layers: list[LayerWeights], space: Workspace, library: LibraryProducts
) -> KernelChoice[LayerProducts]:
    """The fastest products for some dozens of rows; those of ``library``, where ours do not fit."""

    def fastest() -> LayerProducts | str:
        from penstock.kernels.gpu import rows_linear_hopper as hopper

        first = layers[0]
        inner = len(first.gate_up) // 2
        for weight, outs in (
            (first.qkv, len(first.qkv)), (first.output, len(first.output)),
            (first.gate_up, inner), (first.down, len(first.down)),
        ):  # fmt: skip
            why_not = hopper.why_not(weight.dtype, weight.shape[1], outs)
            if why_not:
                return why_not
        return HopperProducts(layers, space)

    return choose(fastest, library, "library")
