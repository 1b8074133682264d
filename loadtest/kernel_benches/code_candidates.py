"""Ways to cut products with weights in codes that are worth a measurement."""

from __future__ import annotations

from penstock.kernels.gpu.few_rows_codes import Shape
from penstock.kernels.gpu.many_rows_codes import TileShape

FEW_SHAPES: dict[str, list[Shape]] = {
    "int4": [
        Shape(1, 4, 8, 2), Shape(1, 8, 4, 2), Shape(1, 8, 4, 1), Shape(2, 4, 4, 1),
        Shape(2, 8, 4, 1), Shape(4, 8, 2, 1), Shape(1, 16, 2, 1), Shape(1, 2, 16, 2),
        Shape(1, 4, 8, 2, 2), Shape(1, 4, 8, 2, 3), Shape(1, 8, 4, 2, 3),
    ],
    "codes of 8 bits": [
        Shape(1, 8, 8, 2), Shape(1, 8, 4, 2), Shape(2, 8, 4, 2), Shape(2, 4, 8, 2),
        Shape(2, 8, 8, 1), Shape(4, 8, 4, 1), Shape(1, 16, 4, 2), Shape(1, 8, 8, 2, 2),
        Shape(1, 8, 8, 2, 3), Shape(1, 4, 8, 2, 3),
    ],
}  # fmt: skip
"""Of ``few_rows_codes``."""
MANY_SHAPES = {
    16: [
        TileShape(16, 64, 4, 4), TileShape(16, 128, 4, 4), TileShape(16, 64, 4, 5, 4),
        TileShape(16, 128, 8, 4, 2),
    ],
    64: [
        TileShape(64, 64, 4, 4), TileShape(64, 128, 4, 3), TileShape(64, 128, 8, 4),
        TileShape(64, 64, 4, 4, 2), TileShape(64, 64, 4, 4, 4), TileShape(64, 128, 8, 3, 4),
        TileShape(64, 128, 4, 3, 1, True),
    ],
    256: [
        TileShape(128, 128, 8, 3), TileShape(64, 128, 4, 3), TileShape(128, 64, 4, 3),
        TileShape(256, 64, 4, 3), TileShape(256, 128, 8, 3), TileShape(128, 64, 4, 3, 2),
        TileShape(256, 128, 8, 3, 4), TileShape(128, 128, 8, 3, 1, True),
        TileShape(256, 128, 8, 3, 1, True), TileShape(256, 64, 4, 3, 1, True),
        TileShape(256, 128, 8, 3, 4, True),
    ],
    2048: [
        TileShape(128, 128, 8, 3), TileShape(128, 64, 4, 3), TileShape(256, 128, 8, 3),
        TileShape(256, 128, 8, 3, 1, True),
    ],
}  # fmt: skip
"""Of ``many_rows_codes``, by rows."""
