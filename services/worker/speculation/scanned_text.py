"""Where a short text has said before what it says now: its bytes are searched from the end.

The C library's search goes through some thousand tokens in a microsecond or two, which is less than
it takes to enter one token in a ``TextIndex``; what is found is the same.
"""

from __future__ import annotations

from array import array

from penstock.services.worker.speculation.text_index import DEPTH, MOST_MATCH, Match

MOST_SCANNED = 4096
"""Tokens of a text that is searched like this: from there on a ``TextIndex`` is faster."""
_TOKEN = 4
"""Bytes of a token."""
_MOST_BETWEEN = 16
"""Places between two tokens, where the same bytes stand by chance, that a search looks at."""


class ScannedText:
    """One sequence's own text, and a search for the end of it."""

    def __init__(self, ngram: int) -> None:
        """ngram: tokens that a match has at least."""
        self._ngram = ngram
        self._bytes = bytearray()

    def __len__(self) -> int:
        return len(self._bytes) // _TOKEN

    @property
    def tokens(self) -> array[int]:
        """A copy."""
        return array("i", self._bytes)

    def extend(self, more: array[int]) -> None:
        self._bytes += more

    def find(self) -> Match | None:
        """The place that has most in common with the end of the text, of the latest ``DEPTH``."""
        text, size = self._bytes, _TOKEN * self._ngram
        if len(text) <= size:
            return None
        ngram, bound = text[-size:], len(text) - _TOKEN
        best, longest, places, between = 0, self._ngram - 1, DEPTH, _MOST_BETWEEN
        while places and between and (begin := text.rfind(ngram, 0, bound)) >= 0:
            if begin % _TOKEN:
                between, bound = between - 1, begin + size - 1
                continue
            end, bound, places = begin + size, begin + size - _TOKEN, places - 1
            length = _common(text, end)
            if length > longest:
                best, longest = end // _TOKEN, length
                if length == MOST_MATCH:
                    break
        return Match(best, longest) if best else None

    def after(self, at: int, count: int) -> list[int]:
        """``count`` tokens from an index on; behind the text's end it begins again there."""
        found = array("i", self._bytes[_TOKEN * at : _TOKEN * (at + count)]).tolist()
        return (found * -(-count // len(found)))[:count] if found else []


def _common(text: bytearray, end: int) -> int:
    """How many tokens ahead of a byte are those at the text's end, ``MOST_MATCH`` at most."""
    whole = len(text)
    most = min(end // _TOKEN, MOST_MATCH)
    if text[end - _TOKEN * most : end] == text[whole - _TOKEN * most :]:
        return most
    found, step = 0, MOST_MATCH // 2
    while step:
        longer = found + step
        if longer <= most and (
            text[end - _TOKEN * longer : end - _TOKEN * found]
            == text[whole - _TOKEN * longer : whole - _TOKEN * found]
        ):
            found = longer
        step //= 2
    return found
