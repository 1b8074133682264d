"""Facts about quantized weights for modules that import no torch: see ``quantized_weight``."""

from __future__ import annotations

from typing import Literal

Kind = Literal["int4", "int8", "fp8", "fp4"]
"""Of codes: unsigned 0 to 15; signed; e4m3; e2m1."""
SPACE_BYTES = 32 << 20
"""Of the memory that products of one model share (``word_linear``): for a piece of a weight that is
widened, of a size that stays in the L2 cache; for parts of sums; for rows in FP8."""
