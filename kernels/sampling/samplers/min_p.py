"""Min-p: p >= m * (highest p). See ``penstock.kernels.sampling.keep_floor``."""

from __future__ import annotations

import math

from torch import Tensor

from penstock.kernels.sampling.samplers.distribution import (
    Row,
    dropped,
    keep_from,
    probabilities,
)


def reference(z: Row, m: float) -> Row:
    p = probabilities(z)
    return dropped(z, p >= m * p.max())


def apply(z: Tensor, m: float) -> Tensor:
    return keep_from(z, float(z.max()) + math.log(m))
