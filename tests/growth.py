"""How cost grows with size, on a machine that does other things as well."""

from __future__ import annotations

from collections.abc import Callable

LINEAR = 9.0
"""Fourfold sizes cost four times as much where cost is linear, 16 times where it is quadratic."""
_ROUNDS = 5


def fourfold(cost: Callable[[int], float], size: int) -> float:
    """What ``4 * size`` costs, in units of what ``size`` costs; the least of interleaved rounds."""
    rounds = [(cost(size), cost(4 * size)) for _ in range(_ROUNDS)]
    return min(large for _, large in rounds) / min(small for small, _ in rounds)
