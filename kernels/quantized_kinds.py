"""The kinds of codes that quantized weights have, for whom torch is too much: see
``quantized_weight``."""

from __future__ import annotations

from typing import Literal

Kind = Literal["int4", "int8", "fp8", "fp4"]
"""Of codes: unsigned 0 to 15; signed; e4m3; e2m1."""
