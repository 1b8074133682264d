"""Where a text has said before what it says now: chains of equal n-grams, as LZ77 coders keep them.

A table of hashes names the latest place of each n-gram, and from each place a chain leads to the
one before with the same hash (RFC 1951, section 4). A search looks at a few places of the chain and
takes the one with the longest text in common. Suffix automata find the longest of all, but have
about 24 bytes of states and 80 of transitions for a token, where this has 16; the longest match of
the latest places is also the likelier one to go on alike.

Costs are bounded whatever the text: an appended token changes two numbers, and a search compares
``DEPTH`` places of ``MOST_MATCH`` tokens at most.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

DEPTH = 4
"""Places that a search looks at, at most."""
MOST_MATCH = 32
"""Tokens that a match is compared for, at most."""
END = -1
"""Stands between texts: nothing matches it, and no draft goes over it."""
_LEAST_BITS, _MOST_BITS = 6, 22
_PIECE = 2048
"""Tokens that are entered in a widened table at once, then with each ``extend``."""
_BULK = 32
"""So many tokens and more are appended by operations on arrays."""
_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5)
_WORD = (1 << 64) - 1

Tokens = npt.NDArray[np.int32]


class Match(NamedTuple):
    """A place that follows the same tokens as the end of the text asked about."""

    at: int
    """Index of the token that came next there."""
    length: int
    """Tokens in common ahead of it, ``MOST_MATCH`` at most."""


class TextIndex:
    """The latest ``most`` tokens of a text, or of several with ``END`` between them.

    16 bytes a token, and 4 more where it holds less than half of what its table is for.
    """

    def __init__(self, most: int, ngram: int = 3) -> None:
        """ngram: tokens that a match has at least, 1 to 4."""
        self.most, self.ngram = most, ngram
        self.tokens = array("i")
        """A ring of ``most`` entries once it is full."""
        self.end = 0
        """Index of the next token to be written."""
        self._factors = _FACTORS[:ngram]
        self._before = array("i")
        self._latest = array("i", [-1]) * (1 << _LEAST_BITS)
        self._mask = (1 << _LEAST_BITS) - 1
        self._narrow: array[int] | None = None
        """The table that was widened last, for tokens below ``_rest``: the others are entered."""
        self._narrow_mask = self._rest = 0

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_bytes(self) -> int:
        narrow = len(self._narrow) if self._narrow is not None else 0
        return 4 * (2 * len(self.tokens) + len(self._latest) + narrow)

    def reserve(self, count: int) -> None:
        """Make an empty table as large as so many tokens need. Of an empty index, so that it is
        not made anew while they come."""
        bits = min(max(_LEAST_BITS, (min(count, self.most) - 1).bit_length()), _MOST_BITS)
        self._mask = (1 << bits) - 1
        self._latest = array("i", [-1]) * (1 << bits)

    def append(self, token: int) -> None:
        """Add a token, and the n-gram that it ends."""
        tokens, end = self.tokens, self.end
        if end == len(tokens):
            tokens.append(token)
            self._before.append(-1)
            if end > self._mask and self._mask < (1 << _MOST_BITS) - 1:
                self._widen(end)
        else:
            tokens[end] = token
            self._before[end] = -1
        self.end = end + 1 if end + 1 < self.most else 0
        if end + 1 < self.ngram or token < 0:
            return
        place = self._hash(tokens[end + 1 - self.ngram : end + 1])
        self._before[end] = self._head(place)
        self._latest[place] = end

    def _head(self, place: int) -> int:
        """The latest token with a hash; -1: none."""
        head = self._latest[place]
        if head < 0 and self._narrow is not None:
            return self._narrow[place & self._narrow_mask]
        return head

    def extend(self, more: Sequence[int] | Tokens) -> None:
        """Add tokens in their order; of more than ``most`` the last ones."""
        more = more[-self.most :]
        while len(more):
            room = self.most - self.end
            part, more = more[:room], more[room:]
            if len(part) < _BULK:
                for token in part:
                    self.append(int(token))
            else:
                self._extend(np.asarray(part, np.int32))
        if self._narrow is not None:
            self._enter(_PIECE)

    def find(self, text: array[int], own: bool = False) -> Match | None:
        """The place that has most in common with the end of ``text``, of those looked at; the
        latest of equal ones. own: it is this index's own text, whose end is no answer."""
        ngram, tokens = self.ngram, self.tokens
        if len(text) < ngram or (own and self.end < ngram):
            return None
        place = self._head(self._hash(text[len(text) - ngram :]))
        if own and place == self.end - 1:
            place = self._before[place]
        best, longest = -1, ngram - 1
        for _ in range(DEPTH):
            if place < longest:  # none, or too near to the beginning to be longer
                if place < 0:
                    break
            else:
                length = _common(tokens, place, text)
                if length > longest:
                    best, longest = place, length
                    if length == MOST_MATCH:
                        break
            place = self._before[place]
        at = best + 1
        return None if not 0 < at < len(tokens) or at == self.end else Match(at, longest)

    def after(self, at: int, count: int, own: bool = False) -> list[int]:
        """Up to ``count`` tokens from an index on, up to where a text ends. own: the text repeats
        itself from there on, so behind its end it begins again at ``at``."""
        end = self.end if at < self.end else len(self.tokens)
        found = self.tokens[at : min(at + count, end)].tolist()
        if END in found:
            return found[: found.index(END)]
        if own and found and len(found) < count and at < self.end:
            return (found * -(-count // len(found)))[:count]
        return found

    def _hash(self, ngram: Sequence[int]) -> int:
        mixed = 0
        for token, factor in zip(ngram, self._factors, strict=True):
            mixed += token * factor
        mixed &= _WORD
        return (mixed ^ mixed >> 29) & self._mask

    def _hashes(self, tokens: Tokens) -> npt.NDArray[np.int64]:
        """Of the n-grams that end at each token from index ``ngram`` - 1 on."""
        count = len(tokens) - self.ngram + 1
        mixed = np.zeros(max(count, 0), np.uint64)
        for first, factor in enumerate(self._factors):
            mixed += tokens[first : first + count].astype(np.int64).view(np.uint64) * np.uint64(
                factor
            )
        mixed ^= mixed >> np.uint64(29)
        return (mixed & np.uint64(self._mask)).view(np.int64)

    def _extend(self, more: Tokens) -> None:
        """``append`` for many tokens, for which there is room ahead of the ring's end."""
        end, count = self.end, len(more)
        grown = max(0, end + count - len(self.tokens))
        self.tokens.extend([0] * grown)
        self._before.extend([-1] * grown)
        np.frombuffer(self.tokens, np.int32)[end : end + count] = more
        if len(self.tokens) > self._mask + 1 and self._mask < (1 << _MOST_BITS) - 1:
            self._widen(end)
        self.end = (end + count) % self.most
        begin = max(0, end - self.ngram + 1)
        text = np.frombuffer(self.tokens, np.int32)[begin : end + count]
        before, latest = (
            np.frombuffer(self._before, np.int32),
            np.frombuffer(self._latest, np.int32),
        )
        before[end : end + count] = -1
        places = self._hashes(text)
        ends = np.arange(begin + self.ngram - 1, end + count)
        known = text[len(text) - len(ends) :] >= 0 if len(ends) else ends
        places, ends = places[known], ends[known]
        if not len(ends):
            return
        order = np.argsort(places, kind="stable")
        places, ends = places[order], ends[order]
        first = np.ones(len(ends), np.bool_)
        first[1:] = places[1:] != places[:-1]
        before[ends[1:]] = ends[:-1]
        heads = latest[places[first]]
        if self._narrow is not None:
            narrow = np.frombuffer(self._narrow, np.int32)[places[first] & self._narrow_mask]
            heads = np.where(heads < 0, narrow, heads)
        before[ends[first]] = heads
        last = np.ones(len(ends), np.bool_)
        last[:-1] = first[1:]
        latest[places[last]] = ends[last]

    def _widen(self, count: int) -> None:
        """As many hashes as there are tokens. What had the same one stays in one chain: a search
        tells apart. count: tokens that are indexed."""
        if self._narrow is not None:
            self._enter(self._rest)
        self._narrow, self._narrow_mask, self._rest = self._latest, self._mask, count
        self.reserve(len(self.tokens))
        self._enter(_PIECE)

    def _enter(self, most: int) -> None:
        """Enter up to so many tokens that the widened table lacks, the latest first: it takes
        some milliseconds for a hundred thousand."""
        end = self._rest
        begin = max(0, end - most)
        first = max(0, begin - self.ngram + 1)
        tokens = np.frombuffer(self.tokens, np.int32)[first:end]
        latest = np.frombuffer(self._latest, np.int32)
        places = self._hashes(tokens)
        ends = np.arange(len(places)) + first + self.ngram - 1
        wanted = (tokens[self.ngram - 1 :] >= 0) & (latest[places] < 0)
        latest[places[wanted]] = ends[wanted]
        self._rest = begin
        if not begin:
            self._narrow = None


def _common(tokens: array[int], place: int, text: array[int]) -> int:
    """How many tokens up to index ``place`` are those at the end of ``text``."""
    most = min(place + 1, len(text), MOST_MATCH)
    text_end, end = len(text), place + 1
    if tokens[end - most : end] == text[text_end - most :]:
        return most
    found, step = 0, MOST_MATCH // 2
    while step:
        longer = found + step
        if (
            longer <= most
            and tokens[end - longer : end - found] == text[text_end - longer : text_end - found]
        ):
            found = longer
        step //= 2
    return found
