"""Dynamic temperature: sharp rows and flat ones each get their own.

T = low + (high - low) * (H / ln n)^exponent, at least 1e-5, for H the row's entropy and n the
tokens that are left (kalomaze's entropy sampling, as KoboldCpp and Aphrodite have it). Of one token
H and ln n are 0, where the formula has no value: T is low there.
"""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from penstock.kernels.sampling.samplers.distribution import (
    Row,
    entropy_of,
    measures,
    probabilities,
)

LEAST = 1e-5


def reference(z: Row, low: float, high: float, exponent: float) -> Row:
    count = int(np.isfinite(z).sum())
    share = entropy_of(probabilities(z)) / np.log(count) if count > 1 else 0.0
    temperature = max(LEAST, low + (high - low) * min(share, 1.0) ** exponent)
    scaled: Row = (z - z.max()) / temperature
    return scaled


def apply(z: Tensor, low: float, high: float, exponent: float) -> Tensor:
    found = measures(z)
    count = int((z > -math.inf).sum())
    share = min(1.0, found.entropy / math.log(count)) if count > 1 else 0.0
    temperature = max(LEAST, low + (high - low) * float(share**exponent))
    return (z - found.top) / temperature
