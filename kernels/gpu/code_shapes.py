"""Which kernel multiplies a weight in words (``word_weight``) with so many rows, and how it is cut.

Tables by layer, from ``python -m penstock.loadtest.quantized_kernels``; layers that are not in them
have what was reckoned: as much of W under way as a multiprocessor needs to be busy (about 20 KiB),
and programs for all of them.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.kernels.gpu.device_facts import multiprocessors
from penstock.kernels.gpu.few_rows_codes import Shape
from penstock.kernels.gpu.few_rows_codes import takes as few_takes
from penstock.kernels.gpu.many_rows_codes import TileShape
from penstock.kernels.gpu.many_rows_codes import takes as many_takes
from penstock.kernels.gpu.word_weight import WordWeight

FEW_ROWS = 16
"""Up to so many rows programs multiply all rows with some rows of W ..."""
TILED_ROWS = 255
"""... up to so many with tiles of codes; for more the weight is widened for the library."""


class Layer(NamedTuple):
    kind: str
    outputs: int
    inputs: int
    rows: int
    """Of x, at most: 8 or 16, or of a tile: 32, 64 or 128."""


FEW: dict[Layer, Shape] = {}
"""Measured."""
TILED: dict[Layer, TileShape] = {}
"""Likewise."""


def few_shape(weight: WordWeight, rows: int, *, gated: bool = False) -> Shape | None:
    """For up to ``FEW_ROWS`` rows; ``None``: its width cannot be shared by warps."""
    outputs, inputs = weight.shape
    most = 8 if rows <= 8 else 16
    found = FEW.get(Layer(weight.kind, outputs, inputs, most))
    if found is not None and not (gated and found.blocks % 2):
        return found
    warps = next((count for count in (8, 4, 2, 1) if few_takes(weight, count)), 0)
    if not warps:
        return None
    least = 2 if gated else 1
    programs = outputs // 16
    blocks = 2 if most > 8 and programs % 2 == 0 and programs >= 4 * multiprocessors() else least
    if outputs % (16 * blocks):
        return None
    return Shape(blocks, warps, max(1, 8 // blocks), 2 if most == 8 else 1)


def tile_shape(weight: WordWeight, rows: int) -> TileShape | None:
    """For more rows, in one sum; ``None``: its width is not whole tiles."""
    outputs, inputs = weight.shape
    most = next((each for each in (32, 64) if rows <= each), 128)
    found = TILED.get(Layer(weight.kind, outputs, inputs, most))
    if found is not None:
        return found
    columns = 64 if most < 128 and outputs // 128 < multiprocessors() else 128
    shape = TileShape(most, columns, 8 if most * columns > 8192 else 4, 3)
    return shape if many_takes(weight, shape) else None
