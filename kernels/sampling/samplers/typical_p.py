"""Locally typical sampling (Meister et al., "Locally Typical Sampling", 2022).

Tokens in the order of |-ln p - H|, the closest to the entropy first: the smallest set of them whose
probability reaches t. Aphrodite drops the token that reaches it, and then keeps less than was asked
for; the paper and Hugging Face keep it, and so does this. Ties with the last one are kept too.
"""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from penstock.kernels.sampling.samplers.distribution import (
    Row,
    dropped,
    entropy_of,
    first_reaching,
    measures,
    probabilities,
    surprise,
)


def reference(z: Row, share: float) -> Row:
    p = probabilities(z)
    distance = np.abs(surprise(p) - entropy_of(p))
    order = np.argsort(distance, kind="stable")
    reached = np.cumsum(p[order])
    last = order[min(int((reached < share).sum()), len(p) - 1)]
    return dropped(z, distance <= distance[last])


def apply(z: Tensor, share: float) -> Tensor:
    found = measures(z)
    log_p = z - (found.top + found.log_total)
    closeness = (log_p + found.entropy).abs_().neg_()
    last = first_reaching(closeness, share, lambda ordered, at: log_p[at])
    return z.masked_fill(closeness < last, -math.inf)
