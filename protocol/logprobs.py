"""Logprobs on their way from a worker to a client: one packed entry a token.

An entry is 3 + 2 N words of 32 bits, little endian: the token's id, its rank (1 is the likeliest)
and its logprob (fp32); then the ids of the N likeliest tokens, the likeliest first; then their
logprobs. Only the tokenizer knows what the ids stand for: it adds the tokens' bytes and where each
begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from penstock.protocol.sampling import MAX_LOGPROBS

OWN_WORDS = 3
WORD_BYTES = 4


def entry_bytes(most: int) -> int:
    """Bytes of an entry with so many likeliest tokens."""
    return WORD_BYTES * (OWN_WORDS + 2 * most)


class PackedLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Logprobs of consecutive tokens."""

    most: int
    """Likeliest tokens in each entry."""
    entries: bytes

    def first(self, count: int) -> PackedLogprobs:
        """The logprobs of the first ``count`` tokens."""
        size = count * entry_bytes(self.most)
        return self if size == len(self.entries) else PackedLogprobs(self.most, self.entries[:size])


class NamedLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Logprobs of consecutive tokens, with the bytes that they stand for."""

    most: int
    entries: bytes
    pieces: list[bytes]
    """The bytes of every id in the entries, in order: 1 + ``most`` for each. The first token of a
    prompt has no entry: one more piece comes before all others."""
    offsets: list[int]
    """Characters of the text before each token; also for the first token of a prompt."""


class Logprob(NamedTuple):
    """One token that came or might have come."""

    token: int
    rank: int
    logprob: float
    piece: bytes


class TokenLogprobs(NamedTuple):
    """A token of the text, and the likeliest ones at its place."""

    own: Logprob
    top: list[Logprob]


def unpack(named: NamedLogprobs, skip: int = 0) -> Iterator[TokenLogprobs]:
    """The entries one by one. skip: pieces that come before those of the entries."""
    most, size = named.most, entry_bytes(named.most) // WORD_BYTES
    words = memoryview(named.entries).cast("i")
    numbers = memoryview(named.entries).cast("f")
    piece = skip
    for first in range(0, len(words), size):
        own = Logprob(words[first], words[first + 1], numbers[first + 2], named.pieces[piece])
        ids = first + OWN_WORDS
        top = [
            Logprob(words[ids + n], n + 1, numbers[ids + most + n], named.pieces[piece + 1 + n])
            for n in range(most)
        ]
        yield TokenLogprobs(own, top)
        piece += 1 + most


__all__ = [
    "MAX_LOGPROBS",
    "Logprob",
    "NamedLogprobs",
    "PackedLogprobs",
    "TokenLogprobs",
    "entry_bytes",
    "unpack",
]
