"""Texts in the syntax of Lark, in which grammars for llguidance are written."""

from __future__ import annotations

import msgspec


def quoted(text: str) -> str:
    """A string that matches a text. Lark's strings have the escapes of JSON's."""
    return msgspec.json.encode(text).decode()


def regex(text: str) -> str:
    """A regular expression, to stand between slashes, that matches a text."""
    return "".join(
        character if character.isalnum() else f"\\x{{{ord(character):x}}}" for character in text
    )
