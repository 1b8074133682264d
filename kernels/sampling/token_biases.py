"""Biases and bans of single tokens: z[t] += bias, or z[t] = -inf.

OpenAI's ``logit_bias``; the end tokens while ``min_tokens`` is not reached; the last tokens of bad
words. A list of (row, token, value) entries; the value -inf is a ban, and a ban wins over a bias.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.sampling.rows import FloatArray, IntArray


class TokenBiases(NamedTuple):
    """An adjustment by E entries, of any number for a row."""

    entry_rows: IntArray
    tokens: IntArray
    values: FloatArray
    """-inf: a ban."""

    @property
    def rows(self) -> IntArray:
        return np.unique(self.entry_rows)

    def apply(self, logits: Tensor, place: IntArray) -> None:
        """Add and ban in place; see ``Adjustment``."""
        device = logits.device
        row = torch.from_numpy(place[self.entry_rows]).to(device)
        token = torch.from_numpy(self.tokens).to(device)
        value = torch.from_numpy(self.values).to(device)
        # A ban adds -inf whatever is added before or after it: biases are finite.
        logits.index_put_((row, token), value, accumulate=True)
