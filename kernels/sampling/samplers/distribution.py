"""What several samplers measure of a row: torch float64 for the samplers, numpy for references.

A row's logits z may hold -inf, which is a token that is dropped already; one at least is finite.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Row = npt.NDArray[np.float64]


class Measures(NamedTuple):
    top: float
    """The highest logit."""
    log_total: float
    """ln of the sum of exp(z - top): a token's ln p is z - top - log_total."""
    entropy: float
    """-sum of p ln p, in nats."""


def measures(z: Tensor) -> Measures:
    """z: [V] float64."""
    top = z.max()
    d = z - top
    weights = d.exp()
    total = weights.sum()
    mean = (weights * d.clamp(min=-1e4)).sum() / total
    log_total = float(total.log())
    return Measures(float(top), log_total, max(0.0, log_total - float(mean)))


def keep_from(z: Tensor, floor: float) -> Tensor:
    """The logits at or above ``floor``; the highest stay whatever it is."""
    return z.masked_fill(z < torch.minimum(z.max(), z.new_tensor(floor)), -math.inf)


def probabilities(z: Row) -> Row:
    """For references. z: [V]."""
    weights = np.exp(z - z.max())
    p: Row = weights / weights.sum()
    return p


def surprise(p: Row) -> Row:
    """-ln p; infinite for a token that is dropped."""
    with np.errstate(divide="ignore"):
        found: Row = -np.log(p)
    return found


def entropy_of(p: Row) -> float:
    return float(-(p[p > 0] * np.log(p[p > 0])).sum())


def dropped(z: Row, keep: npt.NDArray[np.bool_]) -> Row:
    """z where ``keep``, -inf elsewhere."""
    return np.where(keep, z, -np.inf)
