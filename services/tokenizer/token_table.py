"""What each token id stands for in text, as a table built once for a model.

Three kinds of table, by the ``decoder`` of tokenizer.json:

- ``ByteTable``: a token is a row of bytes; the text is their UTF-8 (GPT-2, Llama 3, Qwen).
- ``PieceTable``: a token is a piece of text, but ``<0xE2>`` is one byte; rows of such bytes become
  a character when they are valid together, else one U+FFFD for each (Llama 2, Mistral, Gemma).
- ``WindowTable``: anything else (WordPiece, BPE suffixes, CTC); only the tokenizer itself decodes.

Special tokens stand for nothing, or for themselves: transformers' ``skip_special_tokens``.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec
from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>", re.IGNORECASE)
_METASPACE = "▁"


class ByteTable(NamedTuple):
    """``pieces[id]``: ``str`` where the token's bytes are valid UTF-8 alone, else ``bytes``."""

    pieces: list[str | bytes]


class PieceTable(NamedTuple):
    """``pieces[id]``: the token's text, or its single byte."""

    pieces: list[str | bytes]
    strip: str
    """Character removed at the beginning of the whole text …"""
    strip_count: int
    """… at most this many times."""
    first_drops: str
    """Character that the first token loses wherever it stands in it; empty: none."""


class WindowTable(NamedTuple):
    tokenizer: Tokenizer
    skip_special: bool


class CleanedTable(NamedTuple):
    """A table whose text loses the blanks before punctuation (``clean_up_tokenization_spaces``)."""

    table: ByteTable | PieceTable | WindowTable


TokenTable = ByteTable | PieceTable | WindowTable | CleanedTable


def _byte_of_character() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes.

    Printable Latin-1 characters stand for themselves, the 68 other bytes for U+0100 onwards in
    order (``bytes_to_unicode`` of the GPT-2 code release).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    stand_ins = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    stand_ins.update({chr(0x100 + n): byte for n, byte in enumerate(others)})
    return stand_ins


def _tokens(tokenizer: Tokenizer, skip_special: bool) -> list[str | None]:
    """Text of every id; ``None`` for ids that stand for nothing."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    tokens: list[str | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
    for token, number in vocabulary.items():
        tokens[number] = token
    normalizer = tokenizer.normalizer
    for number, added in tokenizer.get_added_tokens_decoder().items():
        text = added.content
        if added.normalized and normalizer is not None:
            text = normalizer.normalize_str(text)
        # The library looks for this text among the special tokens, as they are written.
        skipped = skip_special and added.special and text == added.content
        tokens[number] = None if skipped else text
    return tokens


def _byte_table(tokenizer: Tokenizer, skip_special: bool) -> ByteTable:
    byte_of = _byte_of_character()
    pieces: list[str | bytes] = []
    for token in _tokens(tokenizer, skip_special):
        if token is None:
            pieces.append("")
            continue
        try:
            raw = bytes([byte_of[character] for character in token])
        except KeyError:  # an added token outside the byte alphabet is its own text
            pieces.append(token)
            continue
        try:
            pieces.append(raw.decode())
        except UnicodeDecodeError:
            pieces.append(raw)
    return ByteTable(pieces)


def _piece_table(
    tokenizer: Tokenizer, rules: list[dict[str, Any]], skip_special: bool
) -> PieceTable | None:
    """The table of a Metaspace or Replace/ByteFallback/Fuse/Strip decoder; ``None``: neither."""
    names = [rule.get("type") for rule in rules]
    tokens = _tokens(tokenizer, skip_special)
    if names == ["Metaspace"]:
        space = rules[0].get("replacement", _METASPACE)
        drops = space if rules[0].get("prepend_scheme", "always") != "never" else ""
        pieces: list[str | bytes] = [
            "" if token is None else token.replace(space, " ") for token in tokens
        ]
        if not drops:
            return PieceTable(pieces, "", 0, "")
        # What the first token loses are the spaces that stand for the replacement character only;
        # a vocabulary with real spaces in tokens is left to the tokenizer itself.
        if any(token and " " in token for token in tokens):
            return None
        return PieceTable(pieces, "", 0, " ")
    strip: dict[str, Any] = {"content": "", "start": 0, "stop": 0}
    if names and names[-1] == "Strip":
        strip, names = rules[-1], names[:-1]
    if names != ["Replace", "ByteFallback", "Fuse"] or strip["stop"]:
        return None
    old, new = rules[0].get("pattern", {}).get("String"), rules[0].get("content")
    if not isinstance(old, str) or not isinstance(new, str):
        return None
    pieces = []
    for token in tokens:
        text = "" if token is None else token.replace(old, new)
        byte = _BYTE_TOKEN.fullmatch(text)
        pieces.append(bytes([int(byte[1], 16)]) if byte else text)
    return PieceTable(pieces, strip["content"], strip["start"], "")


def piece_bytes(table: TokenTable, token: int) -> bytes:
    """The bytes that a token alone stands for; none for ids without meaning."""
    if isinstance(table, CleanedTable):
        table = table.table
    if isinstance(table, WindowTable):
        skip = table.skip_special
        text: str = table.tokenizer.decode([token], skip_special_tokens=skip)
        return text.encode()
    if not 0 <= token < len(table.pieces):
        return b""
    piece = table.pieces[token]
    return piece if isinstance(piece, bytes) else piece.encode()


def drops_first_blank(table: TokenTable) -> bool:
    """Whether a text loses the blank that it begins with, as SentencePiece's do."""
    if isinstance(table, CleanedTable):
        table = table.table
    if not isinstance(table, PieceTable):
        return False
    return " " in (table.first_drops, table.strip if table.strip_count else "")


def build_token_table(
    tokenizer: Tokenizer, skip_special: bool = True, *, cleans_up: bool = False
) -> TokenTable:
    """The quickest exact table for this tokenizer's decoder.

    cleans_up: decoded text loses the blanks before punctuation.
    """
    table = _decoder_table(tokenizer, skip_special)
    return CleanedTable(table) if cleans_up else table


def _decoder_table(
    tokenizer: Tokenizer, skip_special: bool
) -> ByteTable | PieceTable | WindowTable:
    decoder = tokenizer.decoder
    if decoder is None:
        return WindowTable(tokenizer, skip_special)
    rule: dict[str, Any] = msgspec.json.decode(decoder.__getstate__())
    rules = rule.get("decoders", []) if rule.get("type") == "Sequence" else [rule]
    if [r.get("type") for r in rules] == ["ByteLevel"]:
        return _byte_table(tokenizer, skip_special)
    return _piece_table(tokenizer, rules, skip_special) or WindowTable(tokenizer, skip_special)
