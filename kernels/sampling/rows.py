"""What each row of a batch asks of the draw."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.kernels.draw_keys import UInt64Array

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


class SamplingRows(NamedTuple):
    """What each of the R rows asks for; host arrays."""

    temperature: FloatArray
    top_k: IntArray
    """0 or less: all."""
    top_p: FloatArray
    keys: UInt64Array
    """From ``draw_keys``."""
    min_p: FloatArray | None = None
    """0: all. ``None``: 0 in every row."""

    @staticmethod
    def greedy(count: int) -> SamplingRows:
        """Rows of which the highest logit wins."""
        zeros, none = np.zeros(count, np.float32), np.zeros(count, np.int64)
        return SamplingRows(zeros, none, zeros + 1.0, np.zeros(count, np.uint64))

    def take(self, index: IntArray) -> SamplingRows:
        return SamplingRows(
            self.temperature[index],
            self.top_k[index],
            self.top_p[index],
            self.keys[index],
            None if self.min_p is None else self.min_p[index],
        )

    def limited(self, vocab: int) -> npt.NDArray[np.bool_]:
        """Rows that keep less than the whole vocabulary, if they are drawn."""
        found = ((self.top_k > 0) & (self.top_k < vocab)) | (self.top_p < 1.0)
        return found if self.min_p is None else found | (self.min_p > 0.0)
