"""Top-a: p >= a * (highest p)^2 (BlinkDL, RWKV-LM, 2022)."""

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


def reference(z: Row, a: float) -> Row:
    p = probabilities(z)
    return dropped(z, (p >= a * p.max() ** 2) | (p == p.max()))


def apply(z: Tensor, a: float) -> Tensor:
    found = measures(z)
    # a * (1 / total)^2 of a total that the highest token has 1 of.
    return keep_from(z, found.top + math.log(a) - found.log_total)
