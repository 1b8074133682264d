"""Top-k, ties with the last one included. See ``penstock.kernels.sampling.keep_floor``."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from penstock.kernels.sampling.samplers.distribution import Row, dropped, keep_from


def reference(z: Row, k: float) -> Row:
    ordered = np.sort(z)[::-1]
    return dropped(z, z >= ordered[min(int(k), len(z)) - 1])


def apply(z: Tensor, k: float) -> Tensor:
    if k >= len(z):
        return z
    return keep_from(z, float(z.topk(int(k)).values[-1]))
