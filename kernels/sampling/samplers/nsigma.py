"""Top-n-sigma: logits within n standard deviations of the highest (Tang et al., "Top-nσ: Not All
Logits Are You Need", 2024).

z >= max - n * std, the sample's deviation over the tokens that are left. Aphrodite takes dropped
ones into it, whose -inf makes it no number, so that nothing is dropped; only finite ones count
here.
"""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from penstock.kernels.sampling.row_sums import row_sum
from penstock.kernels.sampling.samplers.distribution import Row, dropped, keep_from


def reference(z: Row, sigmas: float) -> Row:
    left = z[np.isfinite(z)]
    deviation = float(np.std(left, ddof=1)) if len(left) > 1 else 0.0
    return dropped(z, z >= z.max() - sigmas * deviation)


def apply(z: Tensor, sigmas: float) -> Tensor:
    top = z.max()
    inside = z > -math.inf
    count = int(inside.sum())
    if count < 2:
        return z
    d = (z - top).masked_fill(~inside, 0.0)
    mean = row_sum(d) / count
    square = row_sum((d - mean).masked_fill(~inside, 0.0).square())
    return keep_from(z, float(top - sigmas * (square / (count - 1)).sqrt()))
