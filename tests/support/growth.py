"""How cost grows with size, on a machine that does other things as well."""

from __future__ import annotations

from collections.abc import Callable

LINEAR = 64.0
"""Sixteenfold sizes cost 16 times as much where cost is linear, 256 times where it is quadratic.
A machine's speed may change fourfold between two measurements without either being taken for the
other."""
_PAIRS = 5


def sixteenfold(cost: Callable[[int], float], size: int) -> float:
    """What ``4 * size`` costs, in units of what a quarter of ``size`` costs, both measured at one
    moment: the least of some pairs, or the first that is linear."""
    least = float("inf")
    for _ in range(_PAIRS):
        large = cost(4 * size)
        least = min(least, large / cost(size // 4))
        if least < LINEAR:
            break
    return least
