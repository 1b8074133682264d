"""Top-p, ties with the last one included. See ``penstock.kernels.sampling.keep_floor``."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from penstock.kernels.sampling.samplers.distribution import (
    Row,
    dropped,
    first_reaching,
    keep_from,
    measures,
    probabilities,
)


def reference(z: Row, share: float) -> Row:
    p = probabilities(z)
    ordered = np.sort(p)[::-1]
    before = np.cumsum(ordered) - ordered
    number = max(1, int((before < share).sum()))
    return dropped(z, p >= ordered[number - 1])


def apply(z: Tensor, share: float) -> Tensor:
    found = measures(z)
    last = first_reaching(z, share, lambda ordered, _: ordered - (found.top + found.log_total))
    return keep_from(z, float(last))
