"""Exclude top choices (p-e-w, 2024): sometimes the likely tokens may not come.

With a probability q, of the tokens with p >= t all but the least likely are dropped, so one at
least stays of them; where fewer than two reach t nothing happens. Of those that tie for the least
likely all stay. No token is protected.

Aphrodite tosses its coin with a generator that all rows share. Here it is keyed by (seed, choice,
position) as the draw is, of which it is independent: it hashes a token id that no vocabulary has.
"""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from penstock.kernels.draw_keys import UInt64Array
from penstock.kernels.sampling.samplers.distribution import Row, dropped, measures, probabilities

COIN_ID = 0xFFFFFFFF
"""What the coin hashes in place of a token id."""
_MASK = 0xFFFFFFFF


def coin(key: int) -> float:
    """A number from 0 to 1, from the key of a row's draw: v of ``kernels.sampling.gumbel``."""
    h = (COIN_ID * (key >> 32 | 1) + (key & _MASK)) & _MASK
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        h = (h ^ h >> shift) * factor & _MASK
    return ((h ^ h >> 16) + 0.5) * 2.0**-32


def coins(keys: UInt64Array) -> list[float]:
    return [coin(key) for key in keys.tolist()]


def reference(z: Row, threshold: float, probability: float, coin: float) -> Row:
    p = probabilities(z)
    likely = np.flatnonzero((p >= threshold) & (p > 0))
    if coin >= probability or len(likely) < 2:
        return z
    return dropped(z, p <= p[likely].min())


def apply(z: Tensor, threshold: float, probability: float, coin: float) -> Tensor:
    if coin >= probability:
        return z
    found = measures(z)
    floor = found.top + found.log_total + (math.log(threshold) if threshold > 0.0 else -math.inf)
    likely = (z >= floor) & (z > -math.inf)
    if int(likely.sum()) < 2:
        return z
    least = z.masked_fill(~likely, math.inf).min()
    return z.masked_fill(z > least, -math.inf)
