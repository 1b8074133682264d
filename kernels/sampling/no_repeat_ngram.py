"""No n-gram twice: a token may not come that followed an earlier copy of the latest n - 1 tokens of
prompt and output (Paulus, Xiong and Socher, "A Deep Reinforced Model for Abstractive
Summarization", 2017; transformers' ``NoRepeatNGramLogitsProcessor``). With n = 1 no token of prompt
or output comes again."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.kernels.sampling.rows import IntArray
from penstock.kernels.sampling.suffix_matches import SuffixMatches, TokenMarks


def reference(z: npt.NDArray[np.float64], tokens: list[int], size: int) -> npt.NDArray[np.float64]:
    """One row, by the definition."""
    latest = tokens[len(tokens) - size + 1 :]
    z = z.copy()
    for first in range(len(tokens) - size + 1):
        if tokens[first : first + size - 1] == latest:
            z[tokens[first + size - 1]] = -np.inf
    return z


def bans(matches: SuffixMatches, size: int, marks: TokenMarks) -> IntArray:
    """The tokens that may not come, each once."""
    banned = matches.tokens if size == 1 else matches.following[matches.lengths >= size - 1]
    return banned[marks.last_of_each(banned)].astype(np.int64)
