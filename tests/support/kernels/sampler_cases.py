"""Samplers with numbers to try, and rows of logits that are hard for some of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from penstock.kernels.sampling import Stage
from penstock.kernels.sampling.samplers import MIROSTAT, SAMPLERS, XTC
from penstock.kernels.sampling.samplers.xtc import coin

Array = np.ndarray

CASES = [
    Stage("temperature", [0.6]),
    Stage("temperature", [1e-5]),
    Stage("dynamic_temperature", [0.3, 1.8, 1.0]),
    Stage("dynamic_temperature", [0.0, 2.0, 2.5]),
    Stage("nsigma", [1.0]),
    Stage("nsigma", [2.2]),
    Stage("top_a", [0.3]),
    Stage("top_a", [1.0]),
    Stage("min_p", [0.2]),
    Stage("tfs", [0.9]),
    Stage("tfs", [0.4]),
    Stage("eta_cutoff", [0.05]),
    Stage("eta_cutoff", [0.9]),
    Stage("epsilon_cutoff", [0.04]),
    Stage("epsilon_cutoff", [1.0]),
    Stage("typical_p", [0.7]),
    Stage("typical_p", [0.2]),
    Stage("smoothing", [0.3, 1.0]),
    Stage("smoothing", [1.2, 2.5]),
    Stage("smoothing", [0.8, 6.0]),
    Stage("xtc", [0.1, 0.5]),
    Stage("xtc", [0.0, 1.0]),
    Stage("skew", [0.7]),
    Stage("skew", [-1.5]),
    Stage("top_k", [5.0]),
    Stage("top_p", [0.8]),
    Stage("mirostat", [3.0, 0.1]),
]
"""Every sampler, at usual numbers and at extreme ones."""


def rows(vocab: int, seed: int = 0) -> dict[str, Array]:
    """Rows of logits [V] float32, by what is hard about them."""
    rng = np.random.default_rng(seed)
    usual = (2.5 * rng.standard_normal(vocab)).astype(np.float32)
    cut = usual.copy()
    cut[rng.permutation(vocab)[: vocab // 3]] = -math.inf
    ties = np.round(usual).astype(np.float32)
    alone = np.full(vocab, -math.inf, np.float32)
    alone[vocab // 2] = 1.5
    peak = np.full(vocab, -80.0, np.float32)
    peak[3] = 90.0
    return {
        "usual": usual,
        "shifted": usual + np.float32(40),
        "flat": np.full(vocab, 0.25, np.float32),
        "with dropped tokens": cut,
        "with ties": ties,
        "of one token": alone,
        "with a peak": peak,
    }


def reference(z: Array, stages: Sequence[Stage], key: int = 0, bound: float = 6.0) -> Array:
    """What the references make of a row, one after the other."""
    z = z.astype(np.float64)
    for name, values in stages:
        numbers = [bound] if name == MIROSTAT else [*values, coin(key)] if name == XTC else values
        z = SAMPLERS[name].reference(z, *numbers)
    return z


def shares(z: Array) -> Array:
    """Probabilities of a row [V]."""
    weights = np.exp(z - z.max())
    return weights / weights.sum()
