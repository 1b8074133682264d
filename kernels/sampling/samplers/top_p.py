"""Top-p, ties with the last one included. See ``penstock.kernels.sampling.keep_floor``."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.sampling.samplers.distribution import (
    Row,
    dropped,
    keep_from,
    probabilities,
)


def reference(z: Row, share: float) -> Row:
    p = probabilities(z)
    ordered = np.sort(p)[::-1]
    before = np.cumsum(ordered) - ordered
    number = max(1, int((before < share).sum()))
    return dropped(z, p >= ordered[number - 1])


def apply(z: Tensor, share: float) -> Tensor:
    ordered = z.sort(descending=True).values
    weights = (ordered - ordered[0]).exp()
    reached = weights.cumsum(0)
    number = int(torch.searchsorted(reached, reached[-1:] * share)) + 1
    return keep_from(z, float(ordered[min(number, len(z)) - 1]))
