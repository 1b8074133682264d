"""What an answer may look like, as a client asks for it: the field of a request and its checks.

``response_format`` (OpenAI) and ``structured_outputs`` (vLLM) become one ``Grammar``, which travels
with the sampling parameters. Nothing is compiled here; ``grammar_compiler`` does that in the
processes that need it.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

MAX_SOURCE_BYTES = 256 * 1024
MAX_CHOICES = 4096
MAX_CHOICE_BYTES = 4096
MAX_NAME_LENGTH = 64
"""Of ``json_schema.name``, as in OpenAI's API."""
MAX_DESCRIPTION_LENGTH = 4096
MAX_DEPTH = 100
"""Levels of arrays and objects in a schema; the library's JSON reader ends at 128."""
MAX_START_BYTES = 64

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]
GrammarParam = Literal["response_format", "structured_outputs"]
"""The request field that a grammar came from."""

_SOURCES = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
"""Keys of ``structured_outputs`` of which exactly one says what is wanted."""
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "disable_any_whitespace": (True, False),
    "disable_fallback": (True, False),
    "disable_additional_properties": (False,),
}
"""Other keys of vLLM's, with the values that can be honoured."""
_BRACKET = re.compile(r"[\[\]{}]")
_SCHEMA_KEYS = frozenset({"name", "description", "schema", "strict"})


class BadGrammar(ValueError):
    """A ``response_format`` or ``structured_outputs`` that cannot be served.

    ``param`` names the request field at fault.
    """

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class Grammar(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the answer must look like. Append new fields at the end only."""

    kind: GrammarKind
    source: Annotated[str, Meta(max_length=MAX_SOURCE_BYTES)] = ""
    """JSON text of the schema or of the list of choices; the regex; the Lark or GBNF text."""
    compact: bool = False
    """JSON without any white space between its parts."""
    param: GrammarParam = "structured_outputs"
    """The request field that errors name."""
    start_after: Annotated[bytes, Meta(max_length=MAX_START_BYTES)] = b""
    """int32 token ids, little endian: the answer is free until one of them has come."""
    may_open: Annotated[bytes, Meta(max_length=4)] = b""
    """An int32 token id: only an answer that begins with it is free until ``start_after``."""

    def starts_after(self) -> list[int]:
        """The ids of ``start_after``."""
        raw = self.start_after
        return [int.from_bytes(raw[i : i + 4], "little") for i in range(0, len(raw) - 3, 4)]

    def fits(self) -> bool:
        """Whether the source is within ``MAX_SOURCE_BYTES``."""
        return len(self.source.encode()) <= MAX_SOURCE_BYTES


def from_response_format(value: Any) -> Grammar | None:
    """OpenAI's ``response_format``; ``None`` for ``{"type": "text"}``. Raises ``BadGrammar``."""
    param: GrammarParam = "response_format"
    given = _object(value, param, param)
    kind = given.get("type")
    known = {"type", "json_schema"} if kind == "json_schema" else {"type"}
    _refuse_unknown(given, known, param, param)
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_object", param=param)
    if kind != "json_schema":
        raise BadGrammar(
            "response_format.type: Expected 'text', 'json_object' or 'json_schema' "
            f"(the value is {_shown(kind)})",
            param,
        )
    where = "response_format.json_schema"
    format = _object(given.get("json_schema"), where, param)
    _refuse_unknown(format, _SCHEMA_KEYS, where, param)
    if not format.get("name"):
        raise BadGrammar(f"{where}.name: Required, and missing", param)
    _check_string(format, "name", MAX_NAME_LENGTH, where)
    _check_string(format, "description", MAX_DESCRIPTION_LENGTH, where)
    if not isinstance(format.get("strict", False), bool):
        raise BadGrammar(f"{where}.strict: Expected true or false", param)
    if "schema" not in format:
        raise BadGrammar(f"{where}.schema: Required, and missing", param)
    return _schema(format["schema"], f"{where}.schema", param, compact=False)


def from_structured_outputs(value: Any) -> Grammar:
    """vLLM's ``structured_outputs``: an object with one of ``json``, ``json_object``, ``regex``,
    ``choice``, ``grammar``. Raises ``BadGrammar``."""
    param: GrammarParam = "structured_outputs"
    given = _object(value, param, param)
    _refuse_unknown(given, {*_SOURCES, *_HARMLESS}, param, param)
    for name, allowed in _HARMLESS.items():
        if name in given and not any(given[name] is one for one in allowed):
            raise BadGrammar(f"{param}.{name}: {_shown(given[name])} is not supported", param)
    asked = [name for name in _SOURCES if name in given]
    if len(asked) != 1:
        raise BadGrammar(
            f"{param}: Expected exactly one of {', '.join(_SOURCES)}; "
            f"got {', '.join(asked) or 'none of them'}",
            param,
        )
    (name,) = asked
    where, content = f"{param}.{name}", given[name]
    compact = given.get("disable_any_whitespace", False)
    if name == "json":
        return _schema(content, where, param, compact=compact)
    if name == "choice":
        return _choices(content, where)
    if name == "json_object":
        if content is not True:
            raise BadGrammar(f"{where}: Expected true (the value is {_shown(content)})", param)
        return Grammar("json_object", compact=compact)
    if not isinstance(content, str) or not content.strip():
        raise BadGrammar(f"{where}: Expected a string that is not empty", param)
    if name == "grammar" and content.lstrip().startswith("{"):
        raise BadGrammar(f"{where}: Expected a grammar in Lark or GBNF syntax, not JSON", param)
    return _bounded(Grammar("regex" if name == "regex" else "grammar", content), where)


def conflict(grammar: Grammar, *, allowed_token_ids: bool, bad_words: bool) -> str | None:
    """Why a grammar cannot go together with the other parameters given; ``None``: it can.

    Each of these takes tokens away that a grammar may need, until none is left.
    """
    for name, given in (("allowed_token_ids", allowed_token_ids), ("bad_words", bad_words)):
        if given:
            return (
                f"{name} and {grammar.param} contradict each other: together they may leave no "
                "token that could come next; send one of them"
            )
    return None


def read_schema(text: str, param: str) -> Any:
    """The value of a schema's JSON text, nested at most ``MAX_DEPTH`` deep.

    Raises ``BadGrammar``. The depth is counted before anything recurses into the text.
    """
    if (levels := depth(text)) > MAX_DEPTH:
        raise BadGrammar(
            f"{param}: the schema is nested {levels} levels deep; at most {MAX_DEPTH}", param
        )
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise BadGrammar(f"{param}: the schema is not valid JSON: {error}", param) from None


def depth(text: str) -> int:
    """The deepest level of arrays and objects in a JSON text. Takes no stack."""
    outside = "".join(text.replace("\\\\", "").replace('\\"', "").split('"')[::2])
    deepest = level = 0
    for bracket in _BRACKET.findall(outside):
        level += 1 if bracket in "[{" else -1
        deepest = max(deepest, level)
    return deepest


def _schema(
    value: Any,
    where: str,
    param: GrammarParam,
    *,
    compact: bool,
) -> Grammar:
    if isinstance(value, str) and param == "structured_outputs":
        if len(value) > MAX_SOURCE_BYTES:
            raise _too_large(where, len(value), param)
        value = read_schema(value, param)
    if value is True:
        value = {}
    if not isinstance(value, dict):
        raise BadGrammar(f"{where}: Expected an object (the value is {_shown(value)})", param)
    try:
        text = msgspec.json.encode(value).decode()
    except (RecursionError, UnicodeError, ValueError) as error:
        raise BadGrammar(f"{where}: cannot be read: {error}", param) from None
    return _bounded(Grammar("json_schema", text, compact=compact, param=param), where)


def _choices(value: Any, where: str) -> Grammar:
    param = "structured_outputs"
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CHOICES:
        raise BadGrammar(f"{where}: Expected an array of 1 to {MAX_CHOICES} strings", param)
    for one in value:
        if not isinstance(one, str) or not one:
            raise BadGrammar(
                f"{where}: Expected strings that are not empty (one is {_shown(one)})", param
            )
        if len(one) > MAX_CHOICE_BYTES:
            raise BadGrammar(
                f"{where}: a string has {len(one)} characters; at most {MAX_CHOICE_BYTES}", param
            )
    distinct = list(dict.fromkeys(value))
    return _bounded(Grammar("choice", msgspec.json.encode(distinct).decode()), where)


def _bounded(grammar: Grammar, where: str) -> Grammar:
    try:
        size = len(grammar.source.encode())
    except UnicodeEncodeError:
        raise BadGrammar(f"{where}: holds half of a surrogate pair", grammar.param) from None
    if size > MAX_SOURCE_BYTES:
        raise _too_large(where, size, grammar.param)
    return grammar


def _too_large(where: str, size: int, param: str) -> BadGrammar:
    return BadGrammar(f"{where}: has {size} bytes; at most {MAX_SOURCE_BYTES}", param)


def _object(value: Any, where: str, param: str) -> dict[str, Any]:
    """The object without its nulls, which count as absent."""
    if not isinstance(value, dict):
        raise BadGrammar(f"{where}: Expected an object (the value is {_shown(value)})", param)
    return {name: one for name, one in value.items() if one is not None}


def _refuse_unknown(
    given: dict[str, Any], known: set[str] | frozenset[str], where: str, param: str
) -> None:
    if unknown := [name for name in given if name not in known]:
        names = ", ".join(_shown(name) for name in unknown[:8])
        raise BadGrammar(
            f"{where}: unknown or not supported: {names}; known are {', '.join(sorted(known))}",
            param,
        )


def _check_string(given: dict[str, Any], name: str, max_length: int, where: str) -> None:
    value = given.get(name, "")
    if not isinstance(value, str) or len(value) > max_length:
        raise BadGrammar(
            f"{where}.{name}: Expected a string of at most {max_length} characters",
            "response_format",
        )


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "an array"
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "…"
