"""What sequences have put out, by whom it may be known: bounded, and salted as the prefix cache."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from penstock.services.worker.speculation.text_index import END, TextIndex

LARGEST_SHARE = 4
"""One corpus has at most this part of all tokens, so that no tenant fills the memory alone."""
LEAST_OUTPUT = 8
"""Shorter outputs are not kept."""
MOST_WAITING = 1024
"""Outputs that are to be indexed; those that end meanwhile are not kept."""


class FinishedOutputs:
    """The latest outputs of each corpus. What is dropped for others is that of the corpus that was
    used least recently, whole."""

    def __init__(self, most: int) -> None:
        """most: tokens kept over all corpora; 0: none."""
        self.most = most
        self.num_tokens = 0
        self._corpora: OrderedDict[bytes, TextIndex] = OrderedDict()
        self._waiting: deque[tuple[bytes, Sequence[int]]] = deque()
        """Outputs, or what is left of the first one, that ``index`` has not come to."""

    @property
    def num_bytes(self) -> int:
        return sum(corpus.num_bytes for corpus in self._corpora.values())

    def of(self, corpus: bytes) -> TextIndex | None:
        """The outputs of a corpus; ``None``: there are none."""
        return self._corpora.get(corpus)

    def add(self, corpus: bytes, output: Sequence[int]) -> None:
        """Keep an output, or the end of one that is too long, once ``index`` has come to it."""
        largest = self.most // LARGEST_SHARE
        if len(output) < LEAST_OUTPUT or largest <= LEAST_OUTPUT:
            return
        if len(self._waiting) >= MOST_WAITING:
            return
        self._waiting.append((corpus, output[-(largest - 1) :]))

    def index(self, most: int) -> int:
        """Let up to ``most`` tokens more be found; returns how many."""
        done = 0
        while self._waiting and done < most:
            corpus, output = self._waiting.popleft()
            part, rest = output[: most - done], output[most - done :]
            if rest:
                self._waiting.appendleft((corpus, rest))
            self._keep(corpus, part, ends=not rest)
            done += len(part)
        return done

    def _keep(self, corpus: bytes, part: Sequence[int], *, ends: bool) -> None:
        index = self._corpora.get(corpus)
        if index is None:
            index = self._corpora[corpus] = TextIndex(self.most // LARGEST_SHARE)
        self._corpora.move_to_end(corpus)
        known = len(index)
        index.extend(part)
        if ends:
            index.append(END)
        self.num_tokens += len(index) - known
        while self.num_tokens > self.most:
            _, oldest = self._corpora.popitem(last=False)
            self.num_tokens -= len(oldest)
