"""Eta sampling: a lowest probability that falls with the entropy (Hewitt, Manning and Liang,
"Truncation Sampling as Language Model Desmoothing", 2022).

p >= min(e, sqrt(e) * exp(-H)); the highest stays. e is a probability, not one in ten thousand.
"""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from penstock.kernels.sampling.samplers.distribution import (
    Row,
    dropped,
    entropy_of,
    keep_from,
    measures,
    probabilities,
)


def reference(z: Row, e: float) -> Row:
    p = probabilities(z)
    least = min(e, np.sqrt(e) * np.exp(-entropy_of(p)))
    return dropped(z, (p >= least) | (p == p.max()))


def apply(z: Tensor, e: float) -> Tensor:
    found = measures(z)
    least = min(math.log(e), 0.5 * math.log(e) - found.entropy)
    return keep_from(z, found.top + found.log_total + least)
