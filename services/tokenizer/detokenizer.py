"""Incremental detokenization: token by token, text that never has to be taken back.

Whatever the way in which the ids arrive, the pieces of ``push`` and the last one of ``flush``
together are ``Tokenizer.decode(ids, skip_special_tokens=…)``, as the table was made. Each push
costs the same, however long the text already is.
"""

from __future__ import annotations

import re
from codecs import utf_8_decode
from typing import Protocol

from penstock.services.tokenizer.token_table import (
    ByteTable,
    CleanedTable,
    PieceTable,
    TokenTable,
    WindowTable,
)

_WINDOW_LIMIT = 16
"""Tokens after which a windowed decode gives out even an unfinished character."""


class Detokenizer(Protocol):
    """Turns the tokens of one choice into text."""

    def push(self, token: int) -> str:
        """Text that this token completes; may be empty. Ids without meaning give nothing."""
        ...

    def flush(self) -> str:
        """What was held back, at the end of the text; an unfinished character becomes U+FFFD."""
        ...


class ByteDetokenizer:
    """For byte-level vocabularies. Holds at most the 3 bytes of an unfinished character."""

    __slots__ = ("_held", "_pieces")

    def __init__(self, table: ByteTable) -> None:
        self._pieces = table.pieces
        self._held = b""

    def push(self, token: int) -> str:
        pieces = self._pieces
        if not 0 <= token < len(pieces):
            return ""
        piece = pieces[token]
        if piece.__class__ is str:
            if not self._held:
                return piece
            piece = piece.encode()
        data = self._held + piece  # type: ignore[operator]  # bytes: the str case is above
        text, used = utf_8_decode(data, "replace", False)
        self._held = data[used:]
        return text

    def flush(self) -> str:
        text = self._held.decode("utf-8", "replace")
        self._held = b""
        return text


class PieceDetokenizer:
    """For SentencePiece-like vocabularies with byte tokens.

    A row of byte tokens is held until it ends: a later invalid byte makes every byte of its row a
    U+FFFD, also those that were a valid character until then.
    """

    __slots__ = ("_bytes", "_first_drops", "_pieces", "_strip", "_strip_left")

    def __init__(self, table: PieceTable) -> None:
        self._pieces = table.pieces
        self._bytes = bytearray()
        self._first_drops = table.first_drops
        self._strip = table.strip
        self._strip_left = table.strip_count if table.strip else 0

    def push(self, token: int) -> str:
        pieces = self._pieces
        if not 0 <= token < len(pieces):
            return ""
        piece = pieces[token]
        if isinstance(piece, bytes):
            self._bytes += piece
            return ""
        if not piece:  # a special token, skipped before decoding: it does not end a row of bytes
            return ""
        if self._first_drops:
            piece = piece.replace(self._first_drops, "")
            self._first_drops = ""
        if self._bytes:
            piece = self._end_of_bytes() + piece
        return self._stripped(piece) if self._strip_left else piece

    def flush(self) -> str:
        return self._stripped(self._end_of_bytes())

    def _end_of_bytes(self) -> str:
        data = bytes(self._bytes)
        self._bytes.clear()
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(data)

    def _stripped(self, text: str) -> str:
        """Remove what the decoder strips at the beginning of the whole text."""
        while self._strip_left and text:
            if text[0] != self._strip:
                self._strip_left = 0
                break
            text = text[1:]
            self._strip_left -= 1
        return text


class WindowDetokenizer:
    """For any other decoder: decodes a few tokens with and without the new ones, and compares.

    Exact where a token's text depends on its neighbours only (WordPiece, BPE suffixes, no decoder).
    """

    __slots__ = ("_done", "_ids", "_shown", "_skip", "_tokenizer")

    def __init__(self, table: WindowTable) -> None:
        self._tokenizer = table.tokenizer
        self._skip = table.skip_special
        self._ids: list[int] = []
        self._done = 0
        """How many of ``_ids`` have been given out; they remain as the left neighbours."""
        self._shown = ""

    def push(self, token: int) -> str:
        if token < 0 or not self._tokenizer.decode([token], skip_special_tokens=self._skip):
            return ""
        self._ids.append(token)
        text = self._decoded()
        if text.endswith("\ufffd") and len(self._ids) - self._done < _WINDOW_LIMIT:
            return ""
        return self._give(text)

    def flush(self) -> str:
        return self._give(self._decoded()) if self._ids else ""

    def _decoded(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)

    def _give(self, text: str) -> str:
        new = text[len(self._shown) :]
        self._ids = self._ids[self._done :]
        self._done = len(self._ids)
        self._shown = self._decoded() if self._ids else ""
        return new


_REMOVED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
"""The blank of each goes (both of the apostrophe's), one after the other in this order, as in
transformers' ``clean_up_tokenization``."""
_SAFE = re.compile(r"[^ '](?= )|[^ ]{4}\Z")
_MOST_HELD = 256
"""Characters. An endless row of blanks and apostrophes is cleaned in pieces of this length."""


class CleanedDetokenizer:
    """Another detokenizer's text without the blanks before punctuation.

    Text is released up to a place that no replacement can span: each begins with a blank, and only
    one, of an apostrophe, holds a blank further on. So a blank that follows anything but a blank or
    an apostrophe begins anew, and so does what follows four characters without a blank.
    """

    __slots__ = ("_held", "_inner")

    def __init__(self, inner: Detokenizer) -> None:
        self._inner = inner
        self._held = ""

    def push(self, token: int) -> str:
        text = self._held + self._inner.push(token)
        end = 0
        for found in _SAFE.finditer(text):
            end = found.end()
        if len(text) - end > _MOST_HELD:
            end = len(text)
        self._held = text[end:]
        return _cleaned(text[:end])

    def flush(self) -> str:
        text, self._held = self._held + self._inner.flush(), ""
        return _cleaned(text)


def _cleaned(text: str) -> str:
    for pattern in _REMOVED:
        text = text.replace(pattern, pattern.strip(" "))
    return text


def new_detokenizer(table: TokenTable) -> Detokenizer:
    """A fresh detokenizer for one choice."""
    if isinstance(table, CleanedTable):
        return CleanedDetokenizer(new_detokenizer(table.table))
    if isinstance(table, ByteTable):
        return ByteDetokenizer(table)
    if isinstance(table, PieceTable):
        return PieceDetokenizer(table)
    return WindowDetokenizer(table)
