"""Skew: probability moves to later token ids, or below 0 to earlier ones (Aphrodite's).

F is the sum of the probabilities up to a token, in the order of token ids: F' = F^exp(w), and the
new probabilities are its differences. A token that is dropped stays so.
"""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from penstock.kernels.sampling.samplers.distribution import Row, measures, probabilities


def reference(z: Row, w: float) -> Row:
    p = probabilities(z)
    reached = np.minimum(np.cumsum(p), 1.0) ** np.exp(w)
    with np.errstate(divide="ignore"):
        moved: Row = np.where(p > 0, np.log(np.diff(reached, prepend=0.0)), -np.inf)
    return moved


def apply(z: Tensor, w: float) -> Tensor:
    found = measures(z)
    p = (z - (found.top + found.log_total)).exp()
    reached = p.cumsum(0).clamp_(max=1.0).pow_(math.exp(w))
    moved = reached.diff(prepend=reached.new_zeros(1)).clamp_(min=0.0)
    return moved.log_().masked_fill_(z == -math.inf, -math.inf)
