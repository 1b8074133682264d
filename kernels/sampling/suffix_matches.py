"""Where a sequence has said before what it says now: earlier places that end as it ends.

For a sequence h of n tokens, a place i < n - 1 matches with length L if the L tokens up to i are
the latest L tokens, and not L + 1. A token adds one to the length of the matches that it goes on
with, and ends the others, so that a step looks at the places of the latest token alone: at most n
numbers, in a few array operations, whatever the sequence repeats. From nothing, matches up to
``_SHORT`` are found by comparing so many arrays of at most n numbers, and longer ones, where they
matter, by Z's algorithm, which is linear too (Gusfield, "Algorithms on Strings, Trees, and
Sequences", 1997, section 1.4).

No match goes over a *breaker*: a token that ends every match, and that none begins again with.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
_SHORT = 128
_FIRST_ROOM = 256


class SuffixMatches:
    """The tokens of one sequence, and the places that match its end."""

    def __init__(
        self, tokens: Int32Array, breakers: Int32Array | None = None, most: int = 2**31 - 1
    ) -> None:
        """breakers: ascending; most: longer matches may be taken to be so long."""
        self.count = len(tokens)
        self._tokens = np.zeros(max(_FIRST_ROOM, 2 * self.count), np.int32)
        self._tokens[: self.count] = tokens
        self._breakers = np.zeros(0, np.int32) if breakers is None else breakers
        self._most = most
        self._lengths = np.zeros(len(self._tokens), np.int32)
        """Of each place, 0 but while ``add`` runs."""
        self.places, self.lengths = self._from_nothing()
        """Places ascending, and the length of each match, 1 or more."""

    @property
    def tokens(self) -> Int32Array:
        return self._tokens[: self.count]

    @property
    def following(self) -> Int32Array:
        """The token after each of ``places``."""
        return self._tokens[self.places + 1]

    def add(self, token: int) -> None:
        """One more token."""
        if self.count == len(self._tokens):
            self._tokens = np.concatenate((self._tokens, np.zeros_like(self._tokens)))
            self._lengths = np.zeros(len(self._tokens), np.int32)
        before, self._tokens[self.count] = self.tokens, token
        self.count += 1
        if self._breaks(token):
            self.places = self.lengths = np.zeros(0, np.int32)
            return
        found = np.flatnonzero(before == token).astype(np.int32)
        scratch = self._lengths
        onwards = self.places + 1
        scratch[onwards] = self.lengths
        lengths = scratch[found] + 1
        scratch[onwards] = 0
        self.places, self.lengths = found, lengths

    def _breaks(self, token: int) -> bool:
        at = int(np.searchsorted(self._breakers, token))
        return at < len(self._breakers) and int(self._breakers[at]) == token

    def _from_nothing(self) -> tuple[Int32Array, Int32Array]:
        h = self.tokens
        none = np.zeros(0, np.int32)
        if not self.count or self._breaks(int(h[-1])):
            return none, none
        places = np.flatnonzero(h[:-1] == h[-1]).astype(np.int32)
        longest = min(self._unbroken(), self._most)
        lengths = np.ones(len(places), np.int32)
        alive = np.arange(len(places))
        for back in range(1, min(longest, _SHORT)):
            alive = alive[places[alive] >= back]
            alive = alive[h[places[alive] - back] == h[-1 - back]]
            lengths[alive] += 1
        if longest > _SHORT and len(alive := alive[lengths[alive] == _SHORT]):
            z = np.array(z_lengths(h[::-1]), np.int32)
            lengths[alive] = np.minimum(z[self.count - 1 - places[alive]], longest)
        return places, lengths

    def _unbroken(self) -> int:
        """How many of the latest tokens there are up to a breaker."""
        if not len(self._breakers):
            return self.count
        broken = np.flatnonzero(np.isin(self.tokens, self._breakers))
        return self.count - 1 - int(broken[-1]) if len(broken) else self.count


class TokenMarks:
    """Finds what is there more than once, without a sort. One for many sequences."""

    def __init__(self) -> None:
        self._marks = np.zeros(0, np.int32)

    def last_of_each(self, tokens: Int32Array) -> npt.NDArray[np.int64]:
        """The index of each token's last occurrence, ascending."""
        if not len(tokens):
            return np.zeros(0, np.int64)
        if len(self._marks) <= (highest := int(tokens.max())):
            self._marks = np.zeros(2 * highest + 1, np.int32)
        index = np.arange(len(tokens), dtype=np.int32)
        self._marks[tokens] = index  # of equal tokens the last one is written last
        return np.flatnonzero(self._marks[tokens] == index)


def z_lengths(tokens: Int32Array) -> list[int]:
    """Of each place, how many tokens from it on are those from the beginning on."""
    s = tokens.tolist()
    count = len(s)
    z = [count] * count
    left = right = 0
    for i in range(1, count):
        length = min(right - i, z[i - left]) if i < right else 0
        while i + length < count and s[length] == s[i + length]:
            length += 1
        z[i] = length
        if i + length > right:
            left, right = i, i + length
    return z
