"""How decode attention cuts its work: tiles, warps, loads in flight and splits of a context."""

from __future__ import annotations

from typing import NamedTuple

from penstock.kernels.gpu.device_facts import multiprocessors, shared_bytes

MOST_SPLITS = 32
CODES_SPLITS, MOST_CODES_SPLITS = 64, 128
"""Of quantized caches, whose parts are combined faster: as a rule, and at most."""
LEAST_GROUP = 8


class Shape(NamedTuple):
    tile: int
    """Positions of the context that are read at once."""
    warps: int
    stages: int
    """Loads in flight."""
    splits: int = MOST_SPLITS
    """Of a row, at most: a power of two."""
    group: int = 0
    """Splits whose parts are combined before those of all such groups, a power of two from
    ``LEAST_GROUP`` on, of quantized caches alone; 0: all parts are combined at once."""


SHAPE = Shape(32, 1, 4)
"""The fastest of nine on an H200 for heads of 128 from batch 8 on, and within 3 % at batch 1 ..."""
WIDE_SHAPE = Shape(32, 2, 2)
"""... and of twelve for wider heads on an H100 from batch 64 on, and within 5 % at batch 1: 64 rows
of 430 positions take 52 µs a layer of Gemma 2 2B, 56 with the other."""
CODES_SHAPE = Shape(32, 1, 3, CODES_SPLITS)
"""Of quantized caches with heads of up to 128, in 16 bits: of eleven on an H100 the fastest from 64
pairs of a row and a KV head on, whether of 2,048 positions or of 32,768."""
FEW_CODES_SHAPE = Shape(32, 1, 5, MOST_CODES_SPLITS, LEAST_GROUP)
"""Of fewer pairs, the fastest of 26 on an H200: one row of 32,768 positions, 8 KV heads and 32
heads takes 28.7 µs, and 33.0 with 64 splits whose parts are combined at once."""
FEW_HEADS_SHAPE = Shape(32, 1, 7, MOST_CODES_SPLITS, LEAST_GROUP)
"""Likewise with one or two heads for a KV head, for up to ``_FEW_HEADS_PAIRS``: with 16 heads
29.6 µs, and 33.0 with ``FEW_CODES_SHAPE``."""
_FEW_HEADS_PAIRS = 64
MANY_CODES_SHAPE = Shape(128, 4, 5, CODES_SPLITS)
"""Of so many pairs that rows are not split, and the longest row ends last: 256 rows of 100 to 2,000
positions take 229 µs, and 265 with ``CODES_SHAPE``."""
SMALL_CODES_SHAPE = Shape(128, 4, 2, CODES_SPLITS)
"""Likewise, in less shared memory: within 12 % of it."""
_SMALL_BYTES = 96 * 1024
"""Shared memory of a program that ``MANY_CODES_SHAPE`` needs."""
PROGRAMS_EACH = 8
"""Programs that keep a multiprocessor busy: a row is split until there are so many."""


def splits_for(rows: int, kv_heads: int, most: int = MOST_SPLITS) -> int:
    """The number of splits that a row's context may be cut into: a power of two."""
    wanted = max(1, PROGRAMS_EACH * multiprocessors() // (rows * kv_heads))
    return int(min(most, 1 << (wanted.bit_length() - 1)))


def shape_for(dim: int, pairs: int, *, codes: bool, shared: int) -> Shape:
    """pairs: of a row and a KV head; codes: whether the cache is quantized, and products are of 16
    bits; shared: query heads for a KV head."""
    if dim > 128:
        return WIDE_SHAPE
    if not codes:
        return SHAPE
    programs = PROGRAMS_EACH * multiprocessors()
    if 2 * pairs > programs:
        return MANY_CODES_SHAPE if shared_bytes() > _SMALL_BYTES else SMALL_CODES_SHAPE
    if shared <= 2 and pairs <= _FEW_HEADS_PAIRS:
        return FEW_HEADS_SHAPE
    return FEW_CODES_SHAPE if MOST_SPLITS * pairs < programs else CODES_SHAPE
