"""Which kernel multiplies a weight in words (``word_weight``) with so many rows, and how it is cut.

Tables by layer, from ``python -m penstock.loadtest.studies.quantized_kernels`` on an H100; layers
that are not in them have what suits such layers there: of codes of four bits four warps a program,
since what they unpack keeps them busy, and programs for all multiprocessors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from penstock.kernels.gpu.device_facts import device_capability, multiprocessors, shared_bytes
from penstock.kernels.gpu.few_rows_codes import Shape
from penstock.kernels.gpu.few_rows_codes import takes as few_takes
from penstock.kernels.gpu.fp8_linear import BLOCK
from penstock.kernels.gpu.many_rows_codes import TileShape, tile_step
from penstock.kernels.gpu.many_rows_codes import takes as many_takes
from penstock.kernels.gpu.word_weight import WordWeight
from penstock.kernels.kernel_table import chosen

FEW_ROWS = 16
"""Up to so many rows programs multiply all rows with some rows of W ..."""
TILED_ROWS = 256
"""... up to so many with tiles of codes; for more the weight is widened for the library. Of a layer
of Qwen3-8B with 256 rows tiles take 131 µs and what is widened 226, with 2,048 rows 963 and 638
(gate and up, int8)."""
ROW_CLASSES = (8, 16, 32, 64, 128, 256, 512)
"""The most rows that one compiled kernel is for, and, last, more than have one."""
_MOST_STEPS = 32
"""Of a kernel without a loop: more take long to compile."""
_LEAST_STEPS = 8
"""Of a warp that shares the width with those of other programs."""
_SPARE_BYTES = 2048
"""Of shared memory, beside tiles."""
_LEAST_CAPABILITY = (8, 0)
"""Pairs of bf16 are subtracted in one instruction from there on."""
_FP8_CAPABILITIES = ((9, 0),)
"""Where ``torch._scaled_mm`` takes a scale for each row of both operands, and was measured."""


class Layer(NamedTuple):
    kind: str
    outputs: int
    inputs: int
    rows: int
    """Of x, at most: 8 or 16, or of a tile: 32, 64 or 128."""


_GATE_UP, _DOWN, _QKV, _OUT, _HEAD = (
    (24576, 4096), (4096, 12288), (6144, 4096), (4096, 4096), (151936, 4096),
)  # fmt: skip
FEW: dict[Layer, Shape] = {
    Layer(kind, *layer, rows): shape
    for kind in ("int8", "fp8")
    for layer, rows, shape in (
        (_GATE_UP, 8, Shape(1, 8, 4, 2)), (_GATE_UP, 16, Shape(2, 4, 8, 2)),
        (_DOWN, 8, Shape(1, 8, 8, 2, 3)), (_DOWN, 16, Shape(1, 8, 8, 2)),
        (_QKV, 8, Shape(1, 8, 4, 2)), (_QKV, 16, Shape(2, 4, 8, 2)),
        (_OUT, 8, Shape(1, 8, 8, 2)), (_OUT, 16, Shape(1, 8, 8, 2)),
        (_HEAD, 8, Shape(1, 8, 8, 2)), (_HEAD, 16, Shape(2, 4, 8, 2)),
    )
} | {
    Layer("int4", *layer, rows): shape
    for rows, down in ((8, Shape(1, 4, 8, 2, 3)), (16, Shape(1, 8, 4, 1)))
    for layer, shape in (
        (_GATE_UP, Shape(1, 4, 8, 2)), (_DOWN, down), (_QKV, Shape(1, 4, 8, 2)),
        (_OUT, Shape(1, 4, 8, 2)), (_HEAD, Shape(1, 4, 8, 2)),
    )
}  # fmt: skip
"""Measured with 1, 4 and 16 rows: 2.1 to 3.0 TB/s of W in codes of 8 bits, 1.5 to 3.1 in int4. Of
few rows that of ``_DOWN`` is reckoned: in one part it read 2.3 TB/s, in int4 1.7, with a third of
the weight under way."""
TILED: dict[Layer, TileShape] = {
    Layer(kind, *layer, 64): shape
    for kind in ("int8", "fp8", "int4")
    for layer, shape in (
        (_GATE_UP, TileShape(64, 128, 4, 3) if kind == "int4" else TileShape(64, 64, 4, 4)),
        (_DOWN, TileShape(64, 64, 4, 4, 4)), (_QKV, TileShape(64, 64, 4, 4)),
        (_OUT, TileShape(64, 64, 4, 4, 4)), (_HEAD, TileShape(64, 128, 4, 3)),
    )
}  # fmt: skip
"""Measured with 64 rows."""


def why_not_words(dtype: torch.dtype) -> str:
    """Why no kernel for words computes with activations of this type here; empty if they do. The
    interpreter takes fp32."""
    capability = device_capability()
    if capability is not None and capability < _LEAST_CAPABILITY:
        return "they need compute capability 8.0, not {}.{}".format(*capability)
    if dtype != torch.float32 or capability is None:
        return ""
    return "activations are float32; --dtype bfloat16 has faster ones"


def few_shape(weight: WordWeight, rows: int, *, divided: bool = False) -> Shape | None:
    """For up to ``FEW_ROWS`` rows; divided: programs may share the width, for parts of the sum.
    ``None``: its width cannot be shared by warps, or has too many steps for them."""
    outputs, inputs = weight.shape
    most = 8 if rows <= 8 else 16
    found = _few_here(weight, most)
    found = found or FEW.get(Layer(weight.kind, outputs, inputs, most)) or _reckoned(weight, most)
    if found is None:
        return None
    if found.splits > 1 and not divided:
        found = found._replace(splits=1)
    return None if outputs % (16 * found.blocks) else found


def _few_here(weight: WordWeight, most: int) -> Shape | None:
    """What was measured on this device (``kernel_table``)."""
    here = chosen(f"few_{weight.kind}", *weight.shape, most)
    shape = None if here is None else Shape(*here)
    return shape if shape is None or few_takes(weight, shape.warps * shape.splits) else None


def _reckoned(weight: WordWeight, most: int) -> Shape | None:
    outputs, count = weight.words.shape
    usual = 4 if weight.kind == "int4" else 8
    for warps in (usual, 2 * usual, usual // 2, 1):
        if few_takes(weight, warps) and count // (16 * warps) <= _MOST_STEPS:
            programs = outputs // 16
            many = programs % 2 == 0 and programs >= 4 * multiprocessors()
            if most > 8 and many and weight.kind != "int4":
                return Shape(2, warps, 4, 2)
            return Shape(1, warps, 8, 2, _few_splits(weight, warps) if most == 8 else 1)
    return None


def _few_splits(weight: WordWeight, warps: int) -> int:
    """How many programs share a width that has many steps for each warp, if there are few."""
    outputs, count = weight.words.shape
    if outputs // 16 >= 4 * multiprocessors():
        return 1
    steps = count // (16 * warps)
    return next(
        (n for n in (4, 3, 2) if few_takes(weight, warps * n) and steps // n >= _LEAST_STEPS), 1
    )


def tile_shape(weight: WordWeight, rows: int, *, divided: bool = False) -> TileShape | None:
    """For more rows; divided: as in ``few_shape``. ``None``: its width is not whole tiles."""
    outputs, inputs = weight.shape
    most = next((each for each in (16, 32, 64) if rows <= each), 128)
    found = _tile_here(weight, most) or TILED.get(Layer(weight.kind, outputs, inputs, most))
    if found is None:
        few_programs = outputs // 128 * -(-rows // most) < multiprocessors()
        columns = 64 if few_programs else 128
        found = TileShape(most, columns, 8 if most * columns > 8192 else 4, 3)
        if divided and few_programs:
            counts = (4, 3, 2) if most <= 64 else (2,)
            found = found._replace(splits=_tile_splits(weight, found, counts))
    if found.splits > 1 and not divided:
        found = found._replace(splits=1)
    return _that_fits(weight, found) if many_takes(weight, found) else None


def _tile_here(weight: WordWeight, most: int) -> TileShape | None:
    """As ``_few_here``."""
    here = chosen(f"tiled_{weight.kind}", *weight.shape, most)
    if here is None:
        return None
    rows, columns, warps, stages, splits = here
    shape = TileShape(rows, columns, warps, stages, splits)
    return shape if many_takes(weight, shape) else None


def _that_fits(weight: WordWeight, shape: TileShape) -> TileShape:
    """With as many tiles under way as the device has shared memory for."""
    step = tile_step(weight)
    bits = 4 if weight.kind == "int4" else 8
    tile = shape.columns * step * bits // 8 + shape.rows * step * 2
    return shape._replace(stages=max(1, min(shape.stages, (shared_bytes() - _SPARE_BYTES) // tile)))


def _tile_splits(weight: WordWeight, shape: TileShape, counts: tuple[int, ...]) -> int:
    """The first number of programs that can share the width."""
    return next((n for n in counts if many_takes(weight, shape._replace(splits=n))), 1)


def product_shape(
    weight: WordWeight, rows: int, *, divided: bool = False
) -> Shape | TileShape | None:
    """What multiplies so many rows; ``None``: the library, with the widened weight."""
    if rows > TILED_ROWS:
        return None
    few = few_shape(weight, rows, divided=divided) if rows <= FEW_ROWS else None
    return few or tile_shape(weight, rows, divided=divided)


def takes_coded_rows(weight: WordWeight, dtype: torch.dtype) -> bool:
    """Whether a weight may be multiplied with activations in codes of its own kind here: in e4m3,
    if it has a scale for each row, or one for each block of 128 columns; in int8, if it has a scale
    for each row."""
    if weight.kind == "int8":
        return in_rows(weight) and device_capability() is not None
    return takes_fp8(weight, dtype)


def takes_fp8(weight: WordWeight, dtype: torch.dtype) -> bool:
    """See ``takes_coded_rows``."""
    if weight.kind != "fp8" or weight.zeros is not None or dtype != torch.bfloat16:
        return False
    if device_capability() not in _FP8_CAPABILITIES:
        return False
    return in_rows(weight) or in_blocks(weight)


def in_rows(weight: WordWeight) -> bool:
    return weight.scales is None and weight.factor is not None


def in_blocks(weight: WordWeight) -> bool:
    return weight.scales is not None and weight.group == BLOCK and weight.factor is None
