"""Quadratic smoothing: the logits on a parabola, or a cubic, below the highest (kalomaze).

For k = f (3 - c) / 2, s = f (c - 1) / 2 and d = z - max: max + d^2 (s d - k). A curve c of 1 gives
max - f d^2.
"""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from penstock.kernels.sampling.samplers.distribution import Row


def reference(z: Row, factor: float, curve: float) -> Row:
    k, s = factor * (3 - curve) / 2, factor * (curve - 1) / 2
    left = np.isfinite(z)
    d = np.where(left, z - z.max(), 0.0)
    return np.where(left, d * d * (s * d - k), -np.inf)


def apply(z: Tensor, factor: float, curve: float) -> Tensor:
    k, s = factor * (3.0 - curve) / 2.0, factor * (curve - 1.0) / 2.0
    d = z - z.max()
    gone = d == -math.inf
    d.masked_fill_(gone, 0.0)
    return (d * d * (s * d - k)).masked_fill_(gone, -math.inf)
