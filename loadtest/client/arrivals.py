"""When requests arrive: all at once, at random with a given rate, with a rising one, in bursts."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterator
from typing import Literal

Ramp = Literal["linear", "exponential"]


def arrival_times(count: int, rate: float, burstiness: float, seed: int | str) -> list[float]:
    """``count`` arrival times in seconds from the start; the same for the same arguments.

    Gaps are gamma distributed with shape ``burstiness`` and mean ``1 / rate``: 1 is a Poisson
    process, less comes in bursts, more is more regular. The times are scaled so that the last is
    at ``count / rate``: a short run has the asked rate exactly (given their number, the arrivals
    of a Poisson process are as random after that as before). ``rate`` infinite: all at 0.
    """
    if math.isinf(rate):
        return [0.0] * count
    return [place / rate for place in _places(count, burstiness, seed)]


def _places(count: int, burstiness: float, seed: int | str) -> list[float]:
    """Arrivals of rate 1, scaled so that the last is at ``count``."""
    draw = random.Random(f"arrivals {seed}")
    times, now = [], 0.0
    for _ in range(count):
        now += draw.gammavariate(burstiness, 1.0)
        times.append(now)
    scale = count / now if now else 0.0
    return [time * scale for time in times]


def ramp_times(
    count: int, first: float, last: float, kind: Ramp, burstiness: float, seed: int | str
) -> list[float]:
    """Arrivals whose rate goes from ``first`` to ``last`` a second, with the time.

    ``linear``: by so much more each second; ``exponential``: by the same factor. An arrival of a
    process of rate 1 at k comes when the rate has added up to k, so that each moment has its rate
    whatever the burstiness, and the run ends when the rate is ``last``.
    """
    places = _places(count, burstiness, seed)
    if math.isclose(first, last):
        return [place / first for place in places]
    if kind == "exponential":
        length = count * math.log(last / first) / (last - first)
        growth = math.log(last / first) / length
        return [math.log1p(place * growth / first) / growth for place in places]
    rise = (last**2 - first**2) / (2 * count)  # of the rate, a second
    return [(math.sqrt(max(0.0, first**2 + 2 * rise * k)) - first) / rise for k in places]


def burst_times(
    count: int, size: int, interval: float, rate: float, burstiness: float, seed: int | str
) -> list[float]:
    """``size`` arrivals at once each ``interval`` seconds, the first of them at 0.

    ``rate``: arrivals a second between them; infinite: none, there are only bursts.
    """
    bursts = _bursts(size, interval)
    if math.isinf(rate):
        return list(itertools.islice(bursts, count))
    between = arrival_times(count, rate, burstiness, seed)
    return list(itertools.islice(heapq.merge(bursts, between), count))


def _bursts(size: int, interval: float) -> Iterator[float]:
    for number in itertools.count():
        yield from itertools.repeat(number * interval, size)
