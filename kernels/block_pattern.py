"""Blocks that queries see besides their window or chunk, if these lie ahead of it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]


class BlockPattern(NamedTuple):
    """Blocks of ``block_size`` positions, by their numbers in the sequence."""

    first: int = 0
    """So many at the beginning, which take what weight a query has to spare: the sinks of
    "Efficient Streaming Language Models with Attention Sinks" (Xiao et al. 2024)."""
    every: int = 0
    """Each so many-th, from the first one on: "Generating Long Sequences with Sparse Transformers"
    (Child et al. 2019)."""

    def mask(self, count: int) -> BoolArray:
        """Which of the first ``count`` blocks these are."""
        numbers = np.arange(count)
        chosen = numbers < self.first
        return chosen | (numbers % self.every == 0) if self.every else chosen


NO_BLOCKS = BlockPattern()
