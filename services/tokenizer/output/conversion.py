"""A parameter's value, written as text, as JSON of its declared type.

The rules are those of vLLM's and SGLang's converters, where these agree: a string stays what it is;
of several types the first that the text fits counts, a string last; what fits none is a string.
They differ on parameters that the schema does not know: vLLM's parser for Qwen3-Coder takes the
text for a string, both parsers for GLM take JSON for what it says. The latter holds here, since the
templates of these models write all but strings as JSON.
"""

from __future__ import annotations

import ast
import re
from json.encoder import encode_basestring
from typing import Any

import msgspec

from penstock.services.tokenizer.output.budget import LITERAL, Budget
from penstock.services.tokenizer.output.tool_schemas import STRING, Kinds

_MAX_LITERAL = 4096
"""Characters of a Python literal that is read; the reader takes a hundred times what JSON takes."""
_INTEGER = re.compile(r"[+-]?[0-9]{1,4000}")
_WHOLE = re.compile(r"([+-]?[0-9]{1,300})\.0*")
_LITERALS = {"none": "null", "null": "null", "true": "true", "false": "false"}


def quoted(text: str) -> str:
    """A text as a JSON string."""
    return encode_basestring(text)


def convert(text: str, kinds: Kinds, budget: Budget) -> str:
    """The JSON of a value. kinds: its declared types; none: unknown. budget: what literals of
    Python's take from; without it they are strings."""
    if kinds == STRING:
        return quoted(text)
    stripped = text.strip()
    word = _LITERALS.get(stripped.lower())
    if word == "null" and (not kinds or "null" in kinds):
        return "null" if kinds or stripped == "null" else quoted(text)
    number = _number(stripped, kinds)
    if number is not None:
        return number
    if word in ("true", "false") and (
        "boolean" in kinds or (not kinds and stripped in ("true", "false"))
    ):
        return word
    if stripped[:1] in ("{", "[", "("):
        found = _structure(stripped, kinds, budget)
        if found is not None:
            return found
    if kinds and "string" not in kinds:
        return _any_json(stripped) or quoted(text)
    return quoted(text)


def _number(text: str, kinds: Kinds) -> str | None:
    """A number as JSON, if the text is one and the type allows it."""
    if kinds and not kinds & {"integer", "number"}:
        return None
    if text[:1] not in "+-0123456789." or not text:
        return None
    if not kinds or "integer" in kinds:
        whole = _WHOLE.fullmatch(text) if kinds and "number" not in kinds else None
        digits = whole[1] if whole else text
        if _INTEGER.fullmatch(digits):
            if _is_json(digits):
                return digits
            return str(int(digits)) if kinds else None
    if kinds and "number" not in kinds:
        return None
    if _is_json(text):
        return text
    if not kinds:
        return None
    try:
        value = float(text)
    except ValueError:
        return None
    return repr(value) if value - value == 0 else None


def _structure(text: str, kinds: Kinds, budget: Budget) -> str | None:
    """An array or object as JSON, from JSON or from a literal of Python's."""
    if kinds and not kinds & {"array", "object"}:
        return None
    wanted = {"[": "array", "(": "array", "{": "object"}[text[0]]
    if kinds and wanted not in kinds:
        return None
    if _is_json(text):
        return text
    if len(text) > _MAX_LITERAL or not kinds or not budget.spend(LITERAL + len(text) // LITERAL):
        return None
    try:
        return msgspec.json.encode(_plain(ast.literal_eval(text))).decode()
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def _any_json(text: str) -> str | None:
    """The text, if it is JSON and no string."""
    return text if text[:1] != '"' and _is_json(text) else None


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
    return True


def _plain(value: Any) -> Any:
    """What a literal gave, if JSON can say it. Raises ``TypeError``."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if value - value != 0:
            raise TypeError("JSON has no such number")
        return value
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(one) for key, one in value.items()}
    raise TypeError("JSON has no such value")
