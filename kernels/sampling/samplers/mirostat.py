"""Mirostat 2.0: the surprise of what is drawn is steered to a target (Basu et al., "Mirostat: A
Neural Text Decoding Algorithm That Directly Controls Perplexity", 2021).

A row has a bound mu, 2 tau at first. Tokens with -log2 p > mu are dropped, but the highest. After a
draw of a token x, mu -= eta * (S(x) - tau). Aphrodite, whose sampler stands alone, takes S(x) from
the row as it was before anything was dropped, and the paper from the renormalised rest. S(x) here
is the model's own: -log2 of the token's probability in the row as the model made it, its logprob.
Where mirostat is all that is asked for, that is Aphrodite's. So mu follows from the tokens and the
model alone, and a sequence that lost its worker gets it back.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from torch import Tensor

from penstock.kernels.sampling.samplers.distribution import (
    Row,
    dropped,
    keep_from,
    measures,
    probabilities,
    surprise,
)

_LN2 = math.log(2.0)


def reference(z: Row, mu: float) -> Row:
    p = probabilities(z)
    return dropped(z, (surprise(p) / _LN2 <= mu) | (p == p.max()))


def apply(z: Tensor, mu: float) -> Tensor:
    found = measures(z)
    return keep_from(z, found.top + found.log_total - mu * _LN2)


def first_bound(tau: float) -> float:
    """mu before any output."""
    return 2.0 * tau


def next_bound(mu: float, tau: float, eta: float, logprob: float) -> float:
    """mu after a token; logprob: the model's own, in nats."""
    return mu - eta * (-logprob / _LN2 - tau)


def bound_after(tau: float, eta: float, logprobs: npt.ArrayLike) -> float:
    """mu after tokens with these logprobs, in their order."""
    mu = first_bound(tau)
    for logprob in np.asarray(logprobs, np.float64).tolist():
        mu = next_bound(mu, tau, eta, logprob)
    return mu
