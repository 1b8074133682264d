"""The cases of ``quantized_kernels``: products of a layer's shapes by each kernel that could
compute them, each cut in several ways. On the meta device they are launched to be compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from penstock.kernels.gpu.few_rows_codes import Shape, few_rows_codes
from penstock.kernels.gpu.few_rows_codes import takes as few_takes
from penstock.kernels.gpu.fp8_linear import (
    BLOCK,
    CODES,
    fp8_block_linear,
    fp8_linear,
    quantize_rows,
)
from penstock.kernels.gpu.many_rows_codes import (
    TileShape,
    many_rows_codes,
    piece_rows,
    widen,
    widened_linear,
)
from penstock.kernels.gpu.many_rows_codes import takes as many_takes
from penstock.kernels.gpu.word_weight import WordKind, WordWeight, codes_of
from penstock.loadtest.kernel_benches.code_candidates import FEW_SHAPES, MANY_SHAPES
from penstock.services.worker.gpu.kernel_choice import not_hopper

SHAPES = {
    "gate+up": (24576, 4096), "down": (4096, 12288), "qkv": (6144, 4096), "out": (4096, 4096),
    "head": (151936, 4096),
}  # fmt: skip
"""Outputs and inputs of the layers of Qwen3-8B."""
ROWS = (1, 64, 16, 4, 256, 2048)
_MOST_HEAD_ROWS = 256
_DIVIDED = ("down", "out")
"""Layers whose parts are added up by what reads them."""
_GROUP = 128
_MOST_STEPS = 24
"""Of a kernel without a loop: more take long to compile."""
_COLD_BYTES = 160 << 20
"""Copies of a weight are so many bytes together: more than any L2 cache has."""
BLOCK_SHAPES = [
    ((64, 64), 4, 4), ((64, 128), 4, 4), ((64, 128), 8, 4), ((128, 128), 8, 3), ((128, 128), 4, 3),
    ((128, 256), 8, 3),
]  # fmt: skip

Format = Literal["bf16", "fp8 x fp8", "fp8 blocks", "fp8", "int8", "int4"]


class Case(NamedTuple):
    shape: str
    rows: int
    format: Format
    kernel: str
    config: str
    num_bytes: int
    """Of the weight."""
    copies: int
    call: Callable[[int], object]
    """Of a copy's number. Writes ``out``."""
    out: Tensor
    """[R, N], or [P, R, N], parts of the sum."""


class Layer:
    """Weights of one shape in all formats, random, and x, in memory that is taken when it is
    asked for."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.device = name, device
        self.outs, self.width = SHAPES[name]
        self.x = self._normal(max(ROWS), self.width)
        self.x_codes = torch.empty(self.x.shape, dtype=CODES, device=device)
        self.x_scales = torch.empty(len(self.x), 1, dtype=torch.float32, device=device)
        quantize_rows(self.x, self.x_codes, self.x_scales)
        blocks = self.width // BLOCK
        self.x_block_codes = torch.empty_like(self.x_codes)
        self.x_block_scales = torch.empty(len(self.x), blocks, device=device)
        quantize_rows(self.x, self.x_block_codes, self.x_block_scales)
        self._out: dict[tuple[int, ...], Tensor] = {}

    def plain(self) -> list[Tensor]:
        first = self._normal(self.outs, self.width).mul_(self.width**-0.5)
        return [first, *(first.clone() for _ in range(self._copies(first.nbytes) - 1))]

    def coded(self, kind: WordKind, *, blocks: bool = False) -> list[WordWeight]:
        """blocks: with scales of 128 x 128."""
        size = (self.outs, self.width // 8 if kind == "int4" else self.width // 4)
        scales, factor = None, self._positive(self.outs)
        if kind == "fp8":
            words = self._normal(self.outs, self.width).to(CODES).view(torch.int32)
        else:
            ends = (-(2**31), 2**31 - 1)
            words = torch.empty(size, dtype=torch.int32, device=self.device)
            words = words if words.is_meta else words.random_(*ends)
        if kind == "int4":
            scales = self._positive(self.width // _GROUP, self.outs).bfloat16()
        elif blocks:
            scales = self._positive(self.width // _GROUP, self.outs // _GROUP)
        first = WordWeight(
            kind, words, self.width if scales is None else _GROUP, scales,
            _GROUP if blocks else 1, None,
            factor if scales is None else None,
        )  # fmt: skip
        count = self._copies(first.num_bytes)
        return [first, *(self._copy(first) for _ in range(count - 1))]

    def out(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Shared by all cases of one shape."""
        if shape not in self._out:
            self._out[shape] = torch.empty(*shape, dtype=dtype, device=self.device)
        return self._out[shape]

    def parts(self, rows: int, splits: int) -> Tensor:
        """Memory for a product in so many parts."""
        if splits == 1:
            return self.out(rows, self.outs)
        return self.out(splits, rows, self.outs, dtype=torch.float32)

    def reference(self, weight: Tensor, rows: int, format: str) -> Tensor:
        """fp32 [rows, N]; weight: fp32."""
        x = self.x[:rows].float()
        if format == "fp8 x fp8":
            x = self.x_codes[:rows].float() * self.x_scales[:rows]
        elif format == "fp8 blocks":
            wide = self.x_block_scales[:rows].repeat_interleave(BLOCK, 1)
            x = self.x_block_codes[:rows].float() * wide
        return x @ weight.t()

    def _copies(self, size: int) -> int:
        return 1 if self.device.type == "meta" else max(1, -(-_COLD_BYTES // size))

    @staticmethod
    def _copy(weight: WordWeight) -> WordWeight:
        made = [each.clone() if isinstance(each, Tensor) else each for each in weight]
        return WordWeight(*made)  # type: ignore[arg-type]

    def _normal(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device=self.device).normal_()

    def _positive(self, *shape: int) -> Tensor:
        return torch.empty(*shape, device=self.device).uniform_(0.5, 1.5)


def plain_of(weight: WordWeight) -> Tensor:
    """fp32 [N, K]."""
    values = codes_of(weight)
    if weight.kind == "int4":
        values -= 8
    if weight.scales is not None:
        rows = weight.scales.float().t().repeat_interleave(weight.rows, 0)
        values *= rows.repeat_interleave(weight.group, 1)
    if weight.factor is not None:
        values *= weight.factor[:, None]
    return values


def cases_of(
    layer: Layer, weights: list[Any], format: Format, chosen: Sequence[int] = ROWS
) -> Iterator[Case]:
    """All of a layer in a format, of the first rows of x. chosen: numbers of rows."""
    for rows in ROWS:
        if rows not in chosen:
            continue
        if layer.name == "head" and rows > _MOST_HEAD_ROWS:
            continue
        if format == "bf16":
            yield from _plain(layer, weights, rows)
        elif format == "fp8 x fp8":
            yield from _fp8(layer, weights, rows)
        elif format == "fp8 blocks":
            yield from _blocks(layer, weights, rows)
        else:
            yield from _codes(layer, weights, rows, format)


def _plain(layer: Layer, weights: list[Tensor], rows: int) -> Iterator[Case]:
    x, out = layer.x[:rows], layer.out(rows, layer.outs)
    size = weights[0].nbytes

    def call(copy: int) -> object:
        return torch.mm(x, weights[copy].t(), out=out)

    if layer.device.type != "meta":
        yield Case(layer.name, rows, "bf16", "library", "", size, len(weights), call, out)
    if rows <= 64 and not not_hopper():
        yield _hopper(layer, weights, rows, None)


def _fp8(layer: Layer, weights: list[WordWeight], rows: int) -> Iterator[Case]:
    x, scales, out = layer.x_codes[:rows], layer.x_scales[:rows], layer.out(rows, layer.outs)
    size, count = weights[0].num_bytes, len(weights)
    codes = [weight.words.view(CODES) for weight in weights]
    factors = [weight.factor for weight in weights if weight.factor is not None]

    def call(copy: int, *, fast: bool) -> None:
        fp8_linear(x, scales, codes[copy], factors[copy], None, out, fast=fast)

    def quantize(copy: int) -> None:
        quantize_rows(layer.x[:rows], x, scales)

    if layer.device.type != "meta":
        for fast in (True, False) if rows >= 64 else (True,):
            yield Case(
                layer.name, rows, "fp8 x fp8", "library", "fast" if fast else "exact", size, count,
                partial(call, fast=fast), out,
            )  # fmt: skip
    yield Case(layer.name, rows, "fp8 x fp8", "quantize x", "", x.nbytes, 16, quantize, x)
    if rows <= 64 and not not_hopper():
        from penstock.kernels.gpu import rows_linear_hopper as hopper

        tile = next(each for each in hopper.TILES if rows <= each)
        divided = layer.name in _DIVIDED
        usual = hopper.shape_for(layer.width, layer.outs, tile, False, divided, 1)
        shapes = [usual, hopper.Shape(usual.splits, min(usual.stages, 6))]
        if divided:
            shapes += [hopper.Shape(4, min(8, usual.stages)), hopper.Shape(2, usual.stages)]
        for shape in dict.fromkeys(shapes):
            if layer.width // 128 % shape.splits == 0:
                yield _hopper(layer, codes, rows, shape, factors)


def _blocks(layer: Layer, weights: list[WordWeight], rows: int) -> Iterator[Case]:
    x, scales, out = (
        layer.x_block_codes[:rows],
        layer.x_block_scales[:rows],
        layer.out(rows, layer.outs),
    )
    codes = [weight.words.view(CODES) for weight in weights]
    of_blocks = [weight.scales for weight in weights if weight.scales is not None]

    def call(copy: int, *, tile: tuple[int, int], warps: int, stages: int) -> None:
        fp8_block_linear(
            x, scales, codes[copy], of_blocks[copy], _GROUP, None, out, tile=tile, warps=warps,
            stages=stages,
        )  # fmt: skip

    for tile, warps, stages in BLOCK_SHAPES if rows >= 64 else []:
        if tile[0] <= max(rows, 64):
            yield Case(
                layer.name, rows, "fp8 blocks", "blocks",
                f"{tile[0]} x {tile[1]}, {warps} warps, {stages} stages", weights[0].num_bytes,
                len(weights), partial(call, tile=tile, warps=warps, stages=stages), out,
            )  # fmt: skip


def _hopper(
    layer: Layer, weights: list[Tensor], rows: int, shape: Any, factors: list[Tensor] | None = None
) -> Case:
    from penstock.kernels.gpu import rows_linear_hopper as hopper

    tile = next(each for each in hopper.TILES if rows <= each)
    scaled = factors is not None
    x, x_scales = (layer.x_codes, layer.x_scales[:, 0]) if scaled else (layer.x, None)
    divided = layer.name in _DIVIDED
    shape = shape or hopper.shape_for(layer.width, layer.outs, tile, False, divided)
    given = out = layer.out(rows, layer.outs)
    call: Callable[[int], object]
    try:
        linear = hopper.HopperLinear(
            x, weights, [None] * len(weights), (rows, rows), divided=divided, scales=factors,
            x_scales=x_scales, shapes={tile: shape}, out_dtype=torch.bfloat16,
        )  # fmt: skip
    except Exception as failure:  # Gluon is experimental
        call = partial(_fail, failure)
    else:
        call = partial(_multiplied, linear, rows, out)
        given = linear.parts(rows) if shape.splits > 1 else out
    return Case(
        layer.name, rows, "fp8 x fp8" if scaled else "bf16", "Gluon",
        f"splits {shape.splits}, stages {shape.stages}", weights[0].nbytes, len(weights), call,
        given,
    )  # fmt: skip


def _multiplied(linear: Any, rows: int, out: Tensor, copy: int) -> object:
    return linear(copy, rows, out)


def _fail(failure: Exception, copy: int) -> None:
    raise failure


def _codes(layer: Layer, weights: list[WordWeight], rows: int, format: Format) -> Iterator[Case]:
    x, out, first = layer.x[:rows], layer.out(rows, layer.outs), weights[0]

    def case(kernel: str, config: str, call: Callable[[int], object], to: Tensor) -> Case:
        return Case(
            layer.name, rows, format, kernel, config, first.num_bytes, len(weights), call, to
        )

    def few(copy: int, *, shape: Shape, to: Tensor) -> None:
        few_rows_codes(x, weights[copy], None, to, shape)

    def many(copy: int, *, shape: TileShape, to: Tensor) -> None:
        many_rows_codes(x, weights[copy], None, to, shape)

    if rows <= 16:
        for shape in FEW_SHAPES["int4" if format == "int4" else "codes of 8 bits"]:
            warps = shape.warps * shape.splits
            fits = layer.outs % (16 * shape.blocks) == 0 and few_takes(first, warps)
            fits = fits and first.words.shape[1] // (16 * warps) <= _MOST_STEPS
            fits = fits and (shape.splits == 1 or layer.name in _DIVIDED)
            if fits and (rows <= 8 or shape.blocks < 4):
                config = "{} blocks, {} warps, {} + {} deep, {} splits".format(*shape)
                to = layer.parts(rows, shape.splits)
                yield case("few", config, partial(few, shape=shape, to=to), to)
    for tile in MANY_SHAPES.get(rows, []):
        if not many_takes(first, tile) or (tile.fold and first.scales is None):
            continue
        if tile.splits > 1 and layer.name not in _DIVIDED:
            continue
        to = layer.parts(rows, tile.splits)
        config = "{} x {}, {} warps, {} stages, {} splits".format(*tile[:5])
        config += ", folded" if tile.fold else ""
        yield case("many", config, partial(many, shape=tile, to=to), to)
    if rows < 64:
        return
    space = layer.out(piece_rows(first, 2) * layer.width)

    def widened(copy: int) -> None:
        if space.is_meta:  # the library's products compile nothing
            widen(first, 0, space.view(-1, layer.width))
        else:
            widened_linear(x, weights[copy], None, out, space)

    yield case("widened", "", widened, out)
