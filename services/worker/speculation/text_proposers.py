"""Drafts from texts: what came next where the same tokens stood before."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.services.worker.speculation.finished_outputs import FinishedOutputs
from penstock.services.worker.speculation.proposer import FINISHED, OWN, Draft
from penstock.services.worker.speculation.scanned_text import MOST_SCANNED, ScannedText
from penstock.services.worker.speculation.text_index import MOST_MATCH, Match, TextIndex

MOST_OWN = 65_536
"""Tokens of a sequence that are searched: the latest, 1 MiB with the index."""

MOST_INDEXED = 2048
"""Tokens that are indexed in one step, beside those that the step before brought."""
_BROUGHT = 31
"""A row of a step has so many drafts at most."""


class _Text:
    """One sequence. It is scanned while it is short; a long one is indexed, from when it is first
    asked about: many never are."""

    __slots__ = ("_fresh", "_ngram", "corpus", "index", "latest", "output")

    def __init__(
        self, text: npt.NDArray[np.int32], prompt_len: int, corpus: bytes, ngram: int
    ) -> None:
        self._ngram = ngram
        self.index: ScannedText | TextIndex = ScannedText(ngram)
        self._fresh = array("i", text[-MOST_OWN:].tobytes())
        """Tokens that are not in ``index`` yet."""
        self.latest = array("i", text[-MOST_MATCH:].tobytes())
        """The end of the text."""
        self.output = array("i", text[prompt_len:].tobytes())
        self.corpus = corpus

    def catch_up(self, most: int) -> int:
        """Index up to ``most`` tokens more, and few in any case. Returns how many of ``most``."""
        fresh, index = self._fresh, self.index
        if isinstance(index, ScannedText):
            if len(index) + len(fresh) <= MOST_SCANNED:
                index.extend(fresh)
                del fresh[:]
                return 0
            fresh = self._fresh = index.tokens + fresh
            index = self.index = TextIndex(MOST_OWN, self._ngram)
        if len(fresh) <= _BROUGHT + 1:
            index.extend(fresh)
            del fresh[:]
            return 0
        if most and not len(index):
            index.reserve(len(fresh))
        done = min(most, len(fresh))
        index.extend(fresh[:done])
        del fresh[:done]
        return done

    def find(self) -> Match | None:
        """Where it has most in common with its end."""
        if isinstance(self.index, ScannedText):
            return self.index.find()
        return self.index.find(self.latest, own=True)

    def draft(self, found: Match, most: int) -> Draft | None:
        """What follows there."""
        index = self.index
        if isinstance(index, ScannedText):
            tokens = index.after(found.at, most)
        else:
            tokens = index.after(found.at, most, own=True)
        return Draft(tokens, OWN, found.length) if tokens else None

    @property
    def is_indexed(self) -> bool:
        return not self._fresh

    def extend(self, tokens: Sequence[int]) -> None:
        self._fresh.extend(tokens)
        self.output.extend(tokens)
        self.latest.extend(tokens)
        if len(self.latest) > 2 * MOST_MATCH:
            del self.latest[:-MOST_MATCH]


class NgramProposer:
    """The continuation of the latest place where a text has its last ``ngram`` tokens before:
    Saxena, *Prompt Lookup Decoding*, 2023."""

    def __init__(self, ngram: int = 3) -> None:
        """ngram: 1 to 4."""
        self._ngram = ngram
        self._texts: dict[int, _Text] = {}
        self._left = MOST_INDEXED
        """Tokens that may be indexed in this step."""

    def next_step(self) -> None:
        self._left = MOST_INDEXED

    def begin(self, slot: int, text: npt.NDArray[np.int32], prompt_len: int, corpus: bytes) -> None:
        """See ``SpeculativeProposer``, for all methods."""
        self._texts[slot] = _Text(text, prompt_len, corpus, self._ngram)

    def took(self, slot: int, tokens: Sequence[int]) -> None:
        text = self._texts.get(slot)
        if text is not None:
            text.extend(tokens)

    def _indexed(self, slot: int) -> _Text | None:
        """The text of a slot, unless there is more of it to index than this step has room for."""
        text = self._texts.get(slot)
        if text is None:
            return None
        self._left -= text.catch_up(self._left)
        return text if text.is_indexed else None

    def propose(self, slot: int, most: int) -> Draft | None:
        text = self._indexed(slot)
        if text is None:
            return None
        found = text.find()
        return None if found is None else text.draft(found, most)

    def forget(self, slot: int) -> None:
        self._texts.pop(slot, None)

    def clear(self) -> None:
        self._texts.clear()


class SuffixProposer(NgramProposer):
    """The continuation of the longest end of a text that stands in the text before, or in a
    finished output of the same corpus; where both are as long, the text's own.

    After Oliaro et al., *SuffixDecoding*, 2024 (arXiv:2411.04975), with ``TextIndex`` in the place
    of suffix trees.
    """

    def __init__(self, most_finished: int) -> None:
        """most_finished: tokens of finished outputs that are kept, at most; 0: none."""
        super().__init__()
        self.finished = FinishedOutputs(most_finished)

    def next_step(self) -> None:
        self._left = MOST_INDEXED - self.finished.index(MOST_INDEXED // 2)

    def propose(self, slot: int, most: int) -> Draft | None:
        text = self._indexed(slot)
        if text is None:
            return None
        own = text.find()
        corpus = None
        if own is None or own.length < MOST_MATCH:
            corpus = self.finished.of(text.corpus)
        if corpus is not None:
            other = corpus.find(text.latest)
            if other is not None and (own is None or other.length > own.length):
                tokens = corpus.after(other.at, most)
                return Draft(tokens, FINISHED, other.length) if tokens else None
        return None if own is None else text.draft(own, most)

    def forget(self, slot: int) -> None:
        text = self._texts.pop(slot, None)
        if text is not None:
            self.finished.add(text.corpus, text.output)
