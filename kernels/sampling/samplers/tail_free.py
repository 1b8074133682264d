"""Tail-free sampling: the head of the sorted probabilities, up to where their curve is straight
(Phénix and Egan, "Tail Free Sampling", 2019).

Of p, sorted from the highest, d is the size of the second differences, V - 2 numbers, as shares of
their sum. Place j from 1 on is dropped if d[0] + … + d[j - 1] > z; place 0 stays, the last one
goes. Tokens that tie with the last one kept are kept too, so that no order of a sort matters. Where
all probabilities are equal there is no curve, and no token is dropped (the original divides 0 by
0).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.sampling.row_sums import row_sum
from penstock.kernels.sampling.samplers.distribution import (
    Row,
    dropped,
    keep_from,
    measures,
    probabilities,
)


def reference(z: Row, share: float) -> Row:
    p = probabilities(z)
    ordered = np.sort(p)[::-1]
    curve = np.abs(np.diff(ordered, 2))
    if curve.sum() <= 0:
        return z
    reached = np.cumsum(curve / curve.sum())
    kept = [0, *(j for j in range(1, len(p) - 1) if reached[j - 1] <= share)]
    return dropped(z, p >= ordered[kept[-1]])


def apply(z: Tensor, share: float) -> Tensor:
    ordered = z.sort(descending=True).values
    found = measures(z)
    p = (ordered - (found.top + found.log_total)).exp()
    curve = p.diff(n=2).abs()
    total = float(row_sum(curve)) if len(curve) else 0.0
    if total <= 0.0:
        return z
    kept = int(torch.searchsorted(curve.cumsum(0), z.new_tensor([share * total]), right=True))
    floor = float(ordered[min(kept, len(z) - 2)])
    return z if floor == -math.inf else keep_from(z, floor)
