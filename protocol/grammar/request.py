"""What an answer may look like, as a client asks for it: the field of a request and its checks.

``response_format`` (OpenAI), ``structured_outputs`` (vLLM) and ``output_config`` (Anthropic) become
one ``Grammar``, which travels with the sampling parameters. Nothing is compiled here;
``grammar_compiler`` does that in the processes that need it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from penstock.protocol.declared import Declared
from penstock.protocol.shown_values import show
from penstock.protocol.validation import InvalidValue, read

MAX_SOURCE_BYTES = 256 * 1024
MAX_CHOICES = 4096
MAX_CHOICE_BYTES = 4096
MAX_NAME_LENGTH = 64
"""Characters of ``json_schema.name``, at most, as in OpenAI's API."""
MAX_DESCRIPTION_LENGTH = 4096
MAX_DEPTH = 100
"""Levels of arrays and objects in a schema; the library's JSON reader ends at 128."""
MAX_START_BYTES = 64

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "grammar", "tools"]
GrammarParam = Literal[
    "response_format",
    "structured_outputs",
    "text.format",
    "output_config",
    "format",
    "grammar",
    "tools",
]
"""The request field that a grammar came from."""

_SOURCES = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
"""Fields of ``StructuredOutputs`` of which exactly one says what is wanted."""
_BRACKET = re.compile(r"[\[\]{}]")


class BadGrammar(InvalidValue):
    """What is asked for cannot be served. ``param`` names the request field at fault."""


class JsonSchemaFormat(Declared, kw_only=True):
    """A schema of OpenAI's ``response_format``."""

    name: Annotated[str, Meta(min_length=1, max_length=MAX_NAME_LENGTH)]
    schema: dict[str, Any] | bool
    description: Annotated[str, Meta(max_length=MAX_DESCRIPTION_LENGTH)] | None = None
    strict: bool | None = None


class ResponseFormat(Declared, kw_only=True):
    """What OpenAI's API calls ``response_format``."""

    IS_ONE_PARAM: ClassVar[bool] = True

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Declared, kw_only=True):
    """What vLLM calls ``structured_outputs``; exactly one of the first five says what is wanted."""

    IS_ONE_PARAM: ClassVar[bool] = True
    NEUTRAL: ClassVar[Mapping[str, Any]] = {"disable_additional_properties": (False,)}

    json: Annotated[dict[str, Any] | str | bool, Meta(description="A JSON schema.")] | None = None
    json_object: Annotated[bool, Meta(description="Any JSON object.")] | None = None
    regex: Annotated[str, Meta(min_length=1, description="The whole answer matches.")] | None = None
    choice: (
        Annotated[
            list[Annotated[str, Meta(min_length=1, max_length=MAX_CHOICE_BYTES)]],
            Meta(min_length=1, max_length=MAX_CHOICES, description="One of these strings."),
        ]
        | None
    ) = None
    grammar: (
        Annotated[str, Meta(min_length=1, description="A grammar in Lark or GBNF syntax.")] | None
    ) = None
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None


class Grammar(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the answer must look like. Append new fields at the end only."""

    kind: GrammarKind
    source: Annotated[str, Meta(max_length=MAX_SOURCE_BYTES)] = ""
    """JSON text of the schema, of the list of choices or of a ``ToolGrammar``; the regex; the Lark
    or GBNF text."""
    compact: bool = False
    """JSON without any white space between its parts."""
    param: GrammarParam = "structured_outputs"
    """The request field that errors name."""
    start_after: Annotated[bytes, Meta(max_length=MAX_START_BYTES)] = b""
    """int32 token ids, little endian: the answer is free until one of them has come."""
    may_open: Annotated[bytes, Meta(max_length=4)] = b""
    """An int32 token id: only an answer that begins with it is free until ``start_after``."""
    padded: bool = False
    """The model's decoder drops a blank at the beginning of an answer: its tokens may have one."""
    may_end: bool = False
    """An answer may end before a token of ``start_after`` has come."""

    def starts_after(self) -> list[int]:
        """The ids of ``start_after``."""
        raw = self.start_after
        return [int.from_bytes(raw[i : i + 4], "little") for i in range(0, len(raw) - 3, 4)]

    def fits(self) -> bool:
        """Whether the source is within ``MAX_SOURCE_BYTES``."""
        return len(self.source.encode()) <= MAX_SOURCE_BYTES


class ToolGrammar(msgspec.Struct, frozen=True):
    """The source of a grammar of tool calls. No client writes one."""

    lark: str
    """Rules in llguidance's Lark syntax; ``@name`` stands for the JSON of a schema."""
    schemas: dict[str, dict[str, Any]] = {}
    content: Grammar | None = None
    """What may stand instead of calls."""


def from_response_format(value: Any) -> Grammar | None:
    """OpenAI's ``response_format``; ``None`` for ``{"type": "text"}``. Raises ``InvalidValue``."""
    param: GrammarParam = "response_format"
    given: ResponseFormat = read(value, ResponseFormat, param)
    format = given.json_schema
    if given.type == "json_schema":
        if format is None:
            raise BadGrammar(f"{param}.json_schema is missing; an object is required", param)
        return _schema(format.schema, f"{param}.json_schema.schema", param, compact=False)
    if format is not None:
        raise BadGrammar(
            f"{param}.json_schema is an object; it is allowed only with the type 'json_schema'",
            param,
        )
    return None if given.type == "text" else Grammar("json_object", param=param)


def from_output_config(schema: dict[str, Any]) -> Grammar:
    """The schema of Anthropic's ``output_config.format``. Raises ``InvalidValue``."""
    return _schema(schema, "output_config.format.schema", "output_config", compact=False)


def from_text_format(
    kind: Literal["text", "json_object", "json_schema"], schema: dict[str, Any] | None
) -> Grammar | None:
    """``text.format`` of OpenAI's Responses API; ``None`` for ``text``. Raises ``InvalidValue``."""
    param: GrammarParam = "text.format"
    if kind == "json_schema":
        if schema is None:
            raise BadGrammar(f"{param}.schema is missing; an object is required", param)
        return _schema(schema, f"{param}.schema", param, compact=False)
    if schema is not None:
        raise BadGrammar(f"{param}.schema is allowed only with the type 'json_schema'", param)
    return None if kind == "text" else Grammar("json_object", param=param)


def from_structured_outputs(value: Any) -> Grammar:
    """vLLM's ``structured_outputs``. Raises ``InvalidValue``."""
    param: GrammarParam = "structured_outputs"
    given: StructuredOutputs = read(value, StructuredOutputs, param)
    asked = [name for name in _SOURCES if getattr(given, name) is not None]
    if len(asked) != 1:
        names = ", ".join(_SOURCES)
        found = (
            f"none of {names}; exactly one" if not asked else f"{' and '.join(asked)}; one alone"
        )
        raise BadGrammar(f"{param} has {found} is allowed", param)
    (name,) = asked
    where, compact = f"{param}.{name}", bool(given.disable_any_whitespace)
    if given.json is not None:
        return _schema(given.json, where, param, compact=compact)
    if given.choice is not None:
        distinct = list(dict.fromkeys(given.choice))
        return _bounded(Grammar("choice", msgspec.json.encode(distinct).decode()), where)
    if given.json_object is not None:
        if not given.json_object:
            raise BadGrammar(f"{where} is false; only true is allowed", param)
        return Grammar("json_object", compact=compact)
    content = given.regex or given.grammar or ""
    if not content.strip():
        raise BadGrammar(f"{where} is blank; a string that is not empty is allowed", param)
    if given.grammar is not None and content.lstrip().startswith("{"):
        raise BadGrammar(f"{where} is JSON; a grammar in Lark or GBNF syntax is allowed", param)
    return _bounded(Grammar("regex" if name == "regex" else "grammar", content), where)


def of_schema(value: Any, param: GrammarParam) -> Grammar:
    """A JSON schema that is the whole of a field. Raises ``InvalidValue``."""
    return _schema(value, param, param, compact=False)


def of_text(text: str, param: GrammarParam) -> Grammar:
    """A grammar in Lark or GBNF syntax that is the whole of a field. Raises ``InvalidValue``."""
    if text.lstrip().startswith("{"):
        raise BadGrammar(f"{param} is JSON; a grammar in Lark or GBNF syntax is allowed", param)
    return _bounded(Grammar("grammar", text, param=param), param)


def conflict(
    grammar: Grammar,
    *,
    allowed_token_ids: bool,
    bad_words: bool,
    no_repeat_ngram_size: bool = False,
    banned_strings: bool = False,
) -> str | None:
    """Why a grammar cannot go together with the other parameters given; ``None``: it can.

    Each of these takes tokens away that a grammar may need, until none is left.
    """
    for name, given in (
        ("allowed_token_ids", allowed_token_ids),
        ("bad_words", bad_words),
        ("no_repeat_ngram_size", no_repeat_ngram_size),
        ("banned_strings", banned_strings),
    ):
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
        raise BadGrammar(f"{where} is {show(value)}; an object is allowed", param)
    try:
        text = msgspec.json.encode(value).decode()
    except (RecursionError, UnicodeError, ValueError) as error:
        raise BadGrammar(f"{where} cannot be read: {error}", param) from None
    return _bounded(Grammar("json_schema", text, compact=compact, param=param), where)


def _bounded(grammar: Grammar, where: str) -> Grammar:
    try:
        size = len(grammar.source.encode())
    except UnicodeEncodeError:
        raise BadGrammar(f"{where} holds half of a surrogate pair", grammar.param) from None
    if size > MAX_SOURCE_BYTES:
        raise _too_large(where, size, grammar.param)
    return grammar


def _too_large(where: str, size: int, param: str) -> BadGrammar:
    return BadGrammar(f"{where} has {size} bytes; at most {MAX_SOURCE_BYTES} are allowed", param)
