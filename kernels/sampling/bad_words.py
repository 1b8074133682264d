"""Words that may not come: the last token of one is banned right after the others.

A word of tokens w[0] … w[n-1] bans w[n-1] while the sequence's latest n - 1 *output* tokens are
w[0] … w[n-2] (transformers' ``NoBadWordsLogitsProcessor`` looks at the prompt too). So the latest
``RING`` output tokens of every slot are kept: output i is entry i % ``RING``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.kernels.sampling.rows import FloatArray, IntArray
from penstock.kernels.sampling.token_biases import TokenBiases

RING = 64
"""Tokens of a word, at most."""
WORDS = 128
"""Words of a slot, at most."""
WORD_TOKENS = 2048
"""Tokens of a slot's words together, at most."""


class WordTable:
    """The words and the latest outputs of every slot; host arrays, laid out as the GPU has them."""

    def __init__(self, slots: int) -> None:
        self.tokens = np.zeros((slots, WORD_TOKENS), np.int32)
        """The tokens of a slot's words, one after the other."""
        self.starts = np.zeros((slots, WORDS + 1), np.int32)
        """Word w is tokens starts[w] … starts[w + 1] - 1; one of no tokens bans nothing."""
        self.ring = np.zeros((slots, RING), np.int32)
        """The latest output tokens."""

    def begin(self, slot: int, words: Sequence[Sequence[int]], output: Sequence[int]) -> None:
        """Give a slot its words, and the output that its sequence has.

        Raises ``ValueError`` where the words pass a limit.
        """
        lengths = [len(word) for word in words]
        if len(words) > WORDS or sum(lengths) > WORD_TOKENS or max(lengths, default=0) > RING:
            raise ValueError(
                f"{len(words)} bad words of {sum(lengths)} tokens, the longest of "
                f"{max(lengths, default=0)}; at most {WORDS} of {WORD_TOKENS}, and {RING} in one"
            )
        flat = [token for word in words for token in word]
        self.tokens[slot, : len(flat)] = flat
        ends = np.cumsum([0, *lengths])
        self.starts[slot] = ends[-1]
        self.starts[slot, : len(ends)] = ends
        first = max(0, len(output) - RING)
        self.ring[slot, np.arange(first, len(output)) % RING] = output[first:]

    def add_outputs(self, slots: IntArray, tokens: IntArray, num_output: IntArray) -> None:
        """A new token of each of these slots, which had ``num_output`` before."""
        self.ring[slots, num_output % RING] = tokens

    def bans(self, rows: IntArray, slots: IntArray, num_output: IntArray) -> TokenBiases:
        """What may not come next in these rows of the batch, whose slots have so much output."""
        starts = self.starts[slots]
        begin, last = starts[:, :-1], starts[:, 1:] - 1
        before = last - begin
        matches = (before >= 0) & (before <= num_output[:, None])
        at = np.arange(len(rows))[:, None]
        tokens, ring = self.tokens[slots], self.ring[slots]
        for back in range(1, int(before.max(initial=0)) + 1):
            latest = ring[at, (num_output[:, None] - back) % RING]
            word = tokens[at, np.maximum(last - back, 0)]
            matches &= (back > before) | (word == latest)
        which, word_index = np.nonzero(matches)
        banned = tokens[which, last[which, word_index]].astype(np.int64)
        values: FloatArray = np.full(len(banned), -np.inf, np.float32)
        return TokenBiases(rows[which], banned, values)
