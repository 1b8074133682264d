"""What several samplers measure of a row: torch float64 for the samplers, numpy for references.

A row's logits z may hold -inf, which is a token that is dropped already; one at least is finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.sampling.row_sums import row_sum

Row = npt.NDArray[np.float64]
_LEADING = 1024
"""Tokens that are put in order first."""


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
    total = row_sum(weights)
    mean = row_sum(weights * d.clamp(min=-1e4)) / total
    log_total = float(total.log())
    return Measures(float(top), log_total, max(0.0, log_total - float(mean)))


def keep_from(z: Tensor, floor: float) -> Tensor:
    """The logits at or above ``floor``; the highest stay whatever it is."""
    return z.masked_fill(z < torch.minimum(z.max(), z.new_tensor(floor)), -math.inf)


def first_reaching(
    keys: Tensor, share: float, log_p_of: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """The highest key such that the probabilities of tokens from it on reach ``share``; the lowest
    where rounding keeps them below. Most rows need no sort of all their tokens.

    keys: [V]; log_p_of: ln p of tokens by their keys, descending, and their ids.
    """
    for width in (min(_LEADING, len(keys)), len(keys)):
        ordered, at = keys.topk(width)
        reached = log_p_of(ordered, at).exp().cumsum(0)
        if float(reached[-1]) >= share:
            break
    number = int(torch.searchsorted(reached, reached.new_tensor([share])))
    return ordered[min(number, width - 1)]


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
