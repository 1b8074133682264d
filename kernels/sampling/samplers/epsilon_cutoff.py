"""Epsilon sampling: p >= e; the highest stays (Hewitt, Manning and Liang, 2022). e is a
probability, not one in ten thousand."""

from __future__ import annotations

import math

from torch import Tensor

from penstock.kernels.sampling.samplers.distribution import (
    Row,
    dropped,
    keep_from,
    measures,
    probabilities,
)


def reference(z: Row, e: float) -> Row:
    p = probabilities(z)
    return dropped(z, (p >= e) | (p == p.max()))


def apply(z: Tensor, e: float) -> Tensor:
    found = measures(z)
    return keep_from(z, found.top + found.log_total + math.log(e))
