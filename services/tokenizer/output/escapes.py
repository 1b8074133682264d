"""Escapes of Python's and JSON's strings, in text that holds whole escapes only."""

from __future__ import annotations

import re

_BACKSLASH = "\udfff"
"""Stands for an escaped backslash meanwhile. No text holds it."""
_SIMPLE = (
    ("\\n", "\n"), ("\\t", "\t"), ("\\r", "\r"), ("\\'", "'"), ('\\"', '"'), ("\\/", "/"),
    ("\\b", "\b"), ("\\f", "\f"), ("\\a", "\a"), ("\\v", "\v"), ("\\0", "\0"), ("\\\n", ""),
)  # fmt: skip
_BY_NUMBER = re.compile(r"((?:\\u[0-9a-fA-F]{4})++)|\\x[0-9a-fA-F]{2}|\\U[0-9a-fA-F]{8}")


def unescaped(text: str) -> str:
    """The text with its escapes resolved. Unknown ones stay as they are; what is no character
    becomes U+FFFD."""
    if "\\" not in text:
        return text
    text = text.replace("\\\\", _BACKSLASH)
    if "\\u" in text or "\\x" in text or "\\U" in text:
        text = _BY_NUMBER.sub(_characters, text)
    for escape, character in _SIMPLE:
        if escape in text:
            text = text.replace(escape, character)
    return text.replace(_BACKSLASH, "\\")


def _characters(found: re.Match[str]) -> str:
    escapes = found[0]
    if found[1] is not None and len(escapes) > len("\\u0000"):
        units = bytes.fromhex(escapes.replace("\\u", ""))
        return units.decode("utf-16-be", "replace").replace("\\", _BACKSLASH)
    number = int(escapes[2:], 16)
    if 0xD800 <= number <= 0xDFFF or number > 0x10FFFF:
        return "\ufffd"
    return _BACKSLASH if number == 0x5C else chr(number)
