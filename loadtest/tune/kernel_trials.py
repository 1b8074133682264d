"""What there is to choose between in the layers of a decoder on a GPU, as calls to be timed.

A trial computes one thing in several ways, each of which is a line of ``kernel_table`` that is
tried while its call is made. All layers of the model take their turn in a call, so that no cache
holds their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.gpu import few_rows_linear
from penstock.kernels.gpu.code_shapes import FEW_ROWS, few_shape, tile_shape
from penstock.kernels.gpu.few_rows_codes import Shape
from penstock.kernels.gpu.few_rows_linear import shape_for, takes
from penstock.kernels.gpu.many_rows_codes import TileShape
from penstock.kernels.kernel_table import MOST_HOPPER_ROWS, Choice
from penstock.loadtest.kernel_benches.code_candidates import FEW_SHAPES, MANY_SHAPES
from penstock.services.worker.gpu.coded_products import CodedProducts
from penstock.services.worker.gpu.decoder import GpuDecoder
from penstock.services.worker.gpu.layer_products import (
    FusedProducts,
    HopperProducts,
    LayerProducts,
    LibraryProducts,
    rows_key,
)
from penstock.services.worker.models.linear_specification import LayerLinears
from penstock.services.worker.models.quantized_linear import QuantizedLinear

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Of a decode step: of each class up to the next one, the most."""
SHAPES = [
    few_rows_linear.Shape(*shape)
    for shape in (
        (1, 4, 8, 8), (1, 4, 8, 4), (1, 4, 16, 4), (1, 8, 8, 8), (1, 8, 12, 8), (1, 8, 4, 4),
        (2, 4, 8, 4), (2, 8, 4, 4), (2, 4, 4, 4), (4, 4, 4, 4),
    )
]  # fmt: skip
"""Of ``few_rows_linear``."""
TILED = 64
"""Rows at which tiles of codes are timed."""
_METHODS = LayerLinears("qkv", "output", "gate_up", "down")


class Trial(NamedTuple):
    """Ways to compute one thing."""

    name: str
    standing: Choice
    others: list[Choice]
    once: Callable[[], object]
    """The first layer."""
    call: Callable[[], object]
    """All layers."""
    out: Callable[[], Tensor]
    """What a call has written, of the first layer."""


class Products(NamedTuple):
    """All layers without their attention, for so many rows."""

    rows: int
    usual: str
    """The key of ``calls`` that is used without a choice."""
    calls: Mapping[str, Callable[[], object]]


def cut_trials(decoder: GpuDecoder) -> Iterator[Trial]:
    """Shapes of products with few rows."""
    hopper = decoder.products.kernels
    if isinstance(hopper, CodedProducts):
        for rows in (FEW_ROWS // 2, FEW_ROWS, TILED):
            for at, method in enumerate(_METHODS):
                trial = _coded(decoder, at, method, rows)
                if trial is not None:
                    yield trial
        return
    for most in (8, 16):
        rows = most if hopper is None else min(most, hopper.bounds[0] - 1)
        products = decoder.products_for(rows, mixed=False) if rows > most - 8 else None
        if isinstance(products, FusedProducts) and products.most_rows > 1:
            for at, method in enumerate(_METHODS):
                yield _fused(decoder, products, at, method, rows)


def _fused(decoder: GpuDecoder, products: LayerProducts, at: int, method: str, rows: int) -> Trial:
    linear = decoder.weights.layers[0].linears[at].specification
    gated, columns, most = linear.gated, linear.columns, -(-rows // 8) * 8
    table = "gated_few_rows" if gated else "few_rows"
    others = (_within(shape, linear.inputs) for shape in SHAPES)
    shapes = [
        shape_for(columns, linear.inputs, rows, gated),
        *(shape for shape in others if takes(shape, columns, linear.inputs, gated)),
    ]
    sizes = columns, linear.inputs, most
    return _trial(
        decoder, products, method, rows, [Choice(table, sizes, tuple(each)) for each in shapes]
    )


def _within(shape: few_rows_linear.Shape, width: int) -> few_rows_linear.Shape:
    """With as many steps in flight as the width has."""
    steps = max(1, width // (32 * shape.warps))
    return shape._replace(depth=min(shape.depth, steps), x_depth=min(shape.x_depth, steps))


def _coded(decoder: GpuDecoder, at: int, method: str, rows: int) -> Trial | None:
    linear = decoder.weights.layers[0].linears[at]
    words = linear.words if isinstance(linear, QuantizedLinear) else None
    if words is None:
        return None
    few, divided = rows <= FEW_ROWS, linear.specification.shard == "inputs"
    usual = (few_shape if few else tile_shape)(words, rows, divided=divided)
    if usual is None:
        return None
    kinds = FEW_SHAPES["int4" if words.kind == "int4" else "codes of 8 bits"]
    others: Sequence[Shape | TileShape] = kinds if few else MANY_SHAPES[TILED]
    table = f"{'few' if few else 'tiled'}_{words.kind}"
    choices = [
        Choice(table, (*words.shape, rows), tuple(map(int, shape[:5])))
        for shape in (usual, *others)
        if not any(shape[5:]) and (divided or shape.splits == 1)
    ]
    return _trial(decoder, decoder.products_for(rows, mixed=False), method, rows, choices)


def _trial(
    decoder: GpuDecoder, products: LayerProducts, method: str, rows: int, choices: list[Choice]
) -> Trial:
    step, layers, space = getattr(products, method), len(decoder.weights.layers), decoder.space

    def call() -> None:
        for layer in range(layers):
            step(layer, rows)

    def out() -> Tensor:
        generator = torch.Generator(space.residual.device).manual_seed(0)
        for each in (space.residual, space.normed, space.attention_output, space.activated):
            each[:rows].normal_(generator=generator)
        step(0, rows)
        written = {"qkv": space.qkv, "gate_up": space.activated}.get(method, space.residual)
        return written[:rows].float().clone()

    standing, *others = dict.fromkeys(choices)
    name = f"{method} of {layers} layers, {rows} rows"
    return Trial(name, standing, others, partial(step, 0, rows), call, out)


def products_trials(decoder: GpuDecoder) -> tuple[tuple[str, int, int], list[Products]] | None:
    """The key of a choice of rows, and who may compute them; ``None``: there is no choice."""
    hopper = decoder.products.kernels
    if not isinstance(hopper, HopperProducts):
        return None
    weights, space, activation = decoder.weights, decoder.space, decoder.config.activation
    eps = decoder.config.rms_norm_eps
    fused = FusedProducts(weights, space, eps, activation)
    library = LibraryProducts(weights, space, eps, decoder.gated.kernels, activation)
    bounds = 1, MOST_HOPPER_ROWS
    wide = HopperProducts(weights, space, eps, hopper.compressed, activation, bounds)
    found = []
    for rows in ROWS:
        named: dict[str, LayerProducts] = {"hopper": wide, "library": library}
        if rows <= fused.most_rows:
            named["library"] = fused
        usual = "hopper" if hopper.bounds[0] <= rows <= hopper.bounds[1] else "library"
        calls = {name: partial(_step, decoder, each, rows) for name, each in named.items()}
        found.append(Products(rows, usual, calls))
    return rows_key(weights.layers, compressed=hopper.compressed), found


def _step(decoder: GpuDecoder, products: LayerProducts, rows: int) -> None:
    products.begin(rows)
    for layer in range(len(decoder.weights.layers)):
        products.qkv(layer, rows)
        products.output(layer, rows)
        products.gate_up(layer, rows)
        products.down(layer, rows)
    products.end(rows)


def best_rows(faster: Sequence[tuple[int, bool]]) -> tuple[int, int]:
    """Of classes of rows, (the most, whether Hopper's kernels are to compute them): the longest
    run of those that are, from and to."""
    best, first, ahead = (0, 0, 0), 0, 0
    for most, is_faster in faster:
        if is_faster:
            first = first or ahead + 1
            best = max(best, (most - first + 1, first, most))
        else:
            first = 0
        ahead = most
    return best[1], best[2]
