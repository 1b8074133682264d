"""When requests arrive: all at once, or at random with a given rate."""

from __future__ import annotations

import math
import random


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """``count`` arrival times in seconds from the start; the same for the same arguments.

    Gaps are gamma distributed with shape ``burstiness`` and mean ``1 / rate``: 1 is a Poisson
    process, less comes in bursts, more is more regular. The times are scaled so that the last is
    at ``count / rate``: a short run has the asked rate exactly (given their number, the arrivals
    of a Poisson process are as random after that as before). ``rate`` infinite: all at 0.
    """
    if math.isinf(rate):
        return [0.0] * count
    draw = random.Random(f"arrivals {seed}")
    times, now = [], 0.0
    for _ in range(count):
        now += draw.gammavariate(burstiness, 1.0)
        times.append(now)
    scale = count / rate / now if now else 0.0
    return [time * scale for time in times]
