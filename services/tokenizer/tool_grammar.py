"""The grammar of tool calls: what a model writes where it must call tools, or begins to.

A call's envelope (marks, the tool's name, where arguments stand) follows from the family's table.
Where tools may be called or not, and calls begin with a token of their own, the answer is free
until that token comes, and costs nothing until then.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from penstock.protocol.grammar.json_schema.check import refuse
from penstock.protocol.grammar.request import (
    MAX_SOURCE_BYTES,
    Grammar,
    GrammarParam,
    ToolGrammar,
)
from penstock.protocol.wire.messages.requests import TOKEN_BYTES, OutputFormat
from penstock.services.tokenizer.channel_grammar import Channels, Turn, in_channels
from penstock.services.tokenizer.lark_text import quoted, regex
from penstock.services.tokenizer.literal_grammar import LiteralRules
from penstock.services.tokenizer.message_grammar import Messages, in_messages
from penstock.services.tokenizer.output.family import ArgumentForm, Envelope, Family
from penstock.services.tokenizer.output.machine import Vocabulary
from penstock.services.tokenizer.output.tool_schemas import STRING, ToolSchemas
from penstock.services.tokenizer.prompt_error import PromptError
from penstock.services.tokenizer.thinking import Thinking

Strictness = Literal["auto", "function", "parameter"]
"""What calls are held to where they are no must; see ``--tool-strictness``."""
_ANY_OBJECT = {"type": "object"}
_PLACE = re.compile(r"\{(index|key)\}")
_INDEX = "/[0-9]{1,4}/"
_TEXT = r"/(?s:.*)/"
_NOTHING = '""'
_ANY_KEY = r"/[^<>\"\n]{1,64}/"


class _Tool(NamedTuple):
    name: str
    schema: dict[str, Any] | None
    """To be kept to; ``None``: any arguments do."""
    is_strict: bool = False
    """All of the schema must be enforced."""


def tool_grammar(
    family: Family,
    vocabulary: Vocabulary,
    output: OutputFormat,
    strictness: Strictness,
    content: Grammar | None = None,
    turn: Turn = Turn.HEADER,
) -> Grammar | None:
    """The grammar of an answer with these tools; ``None``: it is free. In channels it holds to the
    budget of thinking; see ``within_budget`` for others.

    Args:
        content: what an answer that calls no tool must look like.
        turn: where the prompt ends, for a family with channels.

    Raises ``PromptError`` where a strict tool's schema cannot be enforced, or a call is a must and
    the family has no grammar.
    """
    envelope, required = _envelope(family, vocabulary), output.mode == "required"
    channels, anything = _channels(family, vocabulary, turn, output), content
    if channels is not None and content is None and output.thinking_budget is not None:
        anything = _encoded(channels.free(), "tools")
    if not output.tools or output.mode == "none":
        if channels is None or content is None or turn is Turn.ELSEWHERE:
            return anything
        return _encoded(channels.around(None, content), content.param)
    if envelope is None:
        if required or output.strict:
            raise _no_grammar(family)
        return anything
    free = not required and content is None
    if free and not output.strict and strictness == "auto":
        return anything
    tools = list(_tools(output, required or strictness == "parameter"))
    writer = _Writer(envelope, vocabulary)
    opening = writer.opening if free and not family.channels else None
    if free and opening is None and not output.strict:
        return anything  # all of the answer would have to be watched
    source = writer.write(tools, parallel=output.parallel, opened=opening is not None)
    if channels is not None:
        source = channels.around(source, content, required=required)
    elif content is not None and not required:
        source = msgspec.structs.replace(source, content=content)
    elif free and opening is None:
        source = writer.or_text(source)
    grammar = _encoded(source, "tools")
    if opening is None:
        return grammar
    start = opening.to_bytes(TOKEN_BYTES, "little")
    return msgspec.structs.replace(grammar, start_after=start, may_end=True)


def _no_grammar(family: Family) -> PromptError:
    return PromptError(
        f"tool_choice and strict tools need a grammar, and there is none for calls as this model "
        f"writes them ({family.name}); send tool_choice: 'auto' without strict",
        "tool_choice",
    )


def _envelope(family: Family, vocabulary: Vocabulary) -> Envelope | None:
    """What stands around calls, as models with this vocabulary write them."""
    older = family.older_envelope
    return older if older is not None and _is_older(family, vocabulary) else family.envelope


def _channels(
    family: Family, vocabulary: Vocabulary, turn: Turn, output: OutputFormat
) -> Channels | Messages | None:
    """What stands around the parts of an answer, where the family has such."""
    if in_channels(family, vocabulary):
        return Channels(family, vocabulary, turn, output.thinking_budget)
    if in_messages(family, vocabulary):
        return Messages(family, vocabulary, turn, output.thinking_budget)
    return None


def _is_older(family: Family, vocabulary: Vocabulary) -> bool:
    """Whether the vocabulary has marks of the family, but not the one of its newer form."""
    return family.newer_mark not in vocabulary.added and family.marks["open"] in vocabulary.added


def _encoded(source: ToolGrammar, param: GrammarParam) -> Grammar:
    encoded = msgspec.json.encode(source).decode()
    if len(encoded.encode()) > MAX_SOURCE_BYTES:
        raise PromptError(
            f"{param}: the grammar of the answer has {len(encoded)} bytes; at most "
            f"{MAX_SOURCE_BYTES} are allowed: send fewer or smaller schemas",
            param,
        )
    return Grammar("tools", encoded, param=param)


def within_budget(tokens: int, thought: Thinking, answer: Grammar | None) -> Grammar:
    """Thinking of so many tokens at most, which is closed then, and the answer behind it: one that
    is free until a call begins (``may_end``) does not think again."""
    close = int.from_bytes(thought.start_after, "little")
    opening = int.from_bytes(thought.may_open, "little") if thought.may_open else None
    thinking = f"thought <[{close}]>" if tokens else f"<[{close}]>"
    rules = [f"thought[max_tokens={tokens}]: {_TEXT}"] if tokens else []
    body = "<[*]>*" if answer is None else "@content"
    if answer is not None and answer.may_end:
        calls = answer.starts_after()
        ends = ",".join(map(str, calls if opening is None else [*calls, opening]))
        begins = ",".join(map(str, calls))
        body = f"<[^{ends}]>* (<[{begins}]> @content)?"
    rules.append(f"answer: {body}")
    start = f"{thinking} answer"
    if opening is not None and answer is not None:
        start = f"(<[{opening}]> {thinking})? answer"
    source = ToolGrammar("\n".join([f"start: {start}", *rules]), {}, answer)
    grammar = _encoded(source, "tools" if answer is None else answer.param)
    if thought.may_open and answer is None:  # an answer that does not begin so is free
        return msgspec.structs.replace(grammar, start_after=thought.may_open, may_end=True)
    return grammar


def _tools(output: OutputFormat, with_schemas: bool) -> Iterable[_Tool]:
    """Those that may be called, each with its schema where that is to be kept to."""
    for one in msgspec.json.decode(output.tools):
        name, schema = one["function"]["name"], one["function"].get("parameters")
        if output.allowed and name not in output.allowed:
            continue
        is_strict = name in output.strict
        if not isinstance(schema, dict) or not (is_strict or with_schemas):
            yield _Tool(name, None)
            continue
        schema = {"type": "object", **schema}
        reason = refuse(schema)
        if reason is not None and is_strict:
            raise PromptError(f"tools: the schema of {name!r}, which is strict: {reason}", "tools")
        yield _Tool(name, schema if reason is None else None, is_strict)


class _Writer:
    """Writes a grammar for llguidance: rules in Lark's syntax, and the schemas that they name."""

    def __init__(self, envelope: Envelope, vocabulary: Vocabulary) -> None:
        self._envelope = envelope
        self._added = vocabulary.added
        marks = sorted(filter(None, self._added), key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, marks)) or "(?!)")
        self._rules: list[str] = []
        self._schemas: dict[str, dict[str, Any]] = {}
        self._literal_rules: LiteralRules | None = None
        if envelope.literals is not None:
            self._literal_rules = LiteralRules(envelope.literals, self._text, self._rule)

    @property
    def opening(self) -> int | None:
        """The token that every row of calls begins with, if one does."""
        found = self._marks.match(self._beginning)
        return self._added[found[0]] if found else None

    @property
    def _beginning(self) -> str:
        return self._envelope.open or self._envelope.before_name

    def write(self, tools: list[_Tool], *, parallel: bool, opened: bool) -> ToolGrammar:
        """opened: the token that begins the calls has come."""
        envelope = self._envelope
        opening = self._marks.match(self._beginning) if opened else None
        skipped = len(opening[0]) if opening else 0
        for number, tool in enumerate(tools):
            self._rule(f"arguments_{number}", self._arguments(number, tool))
            self._rule(f"first_{number}", self._call(number, tool, envelope.open, skipped))
        start = _any_of("first", tools)
        if parallel and envelope.separator is not None:
            for number, tool in enumerate(tools):
                self._rule(f"next_{number}", self._call(number, tool, envelope.separator, 0))
            start += f" {_any_of('next', tools)}*"
        start += f" {self._text(envelope.close)}"
        return ToolGrammar("\n".join([f"start: {start}", *self._rules]), self._schemas)

    def or_text(self, source: ToolGrammar) -> ToolGrammar:
        """The same, or any text that does not begin as calls do."""
        beginning = regex(self._beginning.lstrip()[:1])
        text = rf"TEXT: {_TEXT} & ~/\s*{beginning}(?s:.*)/"
        lark = source.lark.replace("start: ", "start: calls | TEXT\ncalls: ", 1)
        return ToolGrammar(f"{lark}\n{text}", source.schemas)

    def _call(self, number: int, tool: _Tool, before: str, skipped: int) -> str:
        """before: what stands before the call. Adjacent texts are one terminal: of two terminals
        of which one begins as the other, the compiler's lexer would take the longer one."""
        envelope = self._envelope
        head = f"{before}{envelope.before_name}"[skipped:]
        if "{name}" not in envelope.before_name + envelope.after_name:
            head += "{name}"
        head = self._text(head + envelope.after_name, name=tool.name)
        return f"{head} arguments_{number} {self._text(envelope.end, name=tool.name)}"

    def _rule(self, name: str, body: str) -> None:
        self._rules.append(f"{name}: {body or _NOTHING}")

    def _arguments(self, number: int, tool: _Tool) -> str:
        if self._envelope.form is ArgumentForm.JSON:
            schema = _ANY_OBJECT if tool.schema is None else tool.schema
            return self._schema(f"object_{number}", schema)
        if self._literal_rules is not None:
            return self._as_literals(tool, self._literal_rules)
        return self._parameters(number, tool)

    @staticmethod
    def _as_literals(tool: _Tool, rules: LiteralRules) -> str:
        arguments = rules.arguments(tool.schema)
        if tool.is_strict and rules.unenforced:
            lacking = ", ".join(rules.unenforced)
            raise PromptError(
                f"tools: the schema of {tool.name!r}, which is strict: {lacking} cannot be "
                "enforced in calls as this model writes them; leave it out, or strict",
                "tools",
            )
        return arguments

    def _parameters(self, number: int, tool: _Tool) -> str:
        """Each parameter of the schema at most once and in its order, or any text without one."""
        schema = tool.schema or {}
        properties = schema.get("properties")
        if not isinstance(properties, dict) or not properties:
            return "" if tool.schema and tool.schema.get("properties") == {} else self._any(number)
        required = schema.get("required") or ()
        found = ToolSchemas({tool.name: schema}).of(tool.name)
        parts: list[str] = []
        for position, (key, of_key) in enumerate(properties.items()):
            kinds = found.kinds(key)
            name = f"parameter_{number}_{position}"
            if kinds and not kinds & STRING:
                whole = self._as_json(name, key, of_key, schema)
            else:
                whole = self._as_text(name, key, of_key)
            parts.append(f"({whole})" if key in required else f"({whole})?")
        return " ".join(parts)

    def _any(self, number: int) -> str:
        """Parameters of any name."""
        name = f"any_{number}"
        parts = [self._as_text(name, "", {})]
        if self._envelope.before_json:
            parts.append(self._as_json(f"{name}_json", "", {}, {}))
        self._rule(name, " | ".join(parts))
        return f"{name}*"

    def _as_json(self, name: str, key: str, of_key: Any, schema: Mapping[str, Any]) -> str:
        envelope = self._envelope
        definitions = {word: schema[word] for word in ("$defs", "definitions") if word in schema}
        value = {**of_key, **definitions} if isinstance(of_key, dict) else {}
        if refuse(value) is not None:
            value = {}
        before = self._text(envelope.before_json or envelope.before_value, key=key)
        return f"{before} {self._schema(name, value)} {self._text(envelope.after_value, key=key)}"

    def _as_text(self, name: str, key: str, of_key: Any) -> str:
        """key: empty: any."""
        envelope = self._envelope
        before = self._text(envelope.before_value, key=key)
        values = of_key.get("enum") if isinstance(of_key, dict) else None
        after = self._text(envelope.after_value, key=key)
        if isinstance(values, list) and values and all(isinstance(one, str) for one in values):
            return f"{before} ({' | '.join(map(quoted, values))}) {after}"
        excluded = envelope.value_excludes
        if not excluded or self._marks.search(excluded):
            return f"{before} {_TEXT} {after}"
        # One terminal for the value and what ends it: a text alone would swallow the end.
        ending, terminal = regex(envelope.after_value), name.upper()
        twice = "(?s:.*)".join(("", *itertools.repeat(regex(excluded), 2), ""))
        self._rule(terminal, f"/(?s:.*){ending}/ & ~/{twice}/")
        return f"{before} {terminal}"

    def _schema(self, name: str, schema: dict[str, Any]) -> str:
        self._schemas[name] = schema
        return f"@{name}"

    def _text(self, text: str, *, name: str = "", key: str = "") -> str:
        """A text of the envelope with its places filled. Its marks are tokens where the vocabulary
        has them so. key: empty: any."""
        parts: list[str] = []
        for piece in re.split(r"(\{(?:index|key)\})", text.replace("{name}", name)):
            found = _PLACE.fullmatch(piece)
            if found is None:
                parts += self._literals(piece)
            elif found[1] == "index":
                parts.append(_INDEX)
            else:
                parts.append(quoted(key) if key else _ANY_KEY)
        return " ".join(parts) or _NOTHING

    def _literals(self, text: str) -> Iterator[str]:
        place = 0
        for found in self._marks.finditer(text):
            if found.start() > place:
                yield quoted(text[place : found.start()])
            yield f"<[{self._added[found[0]]}]>"
            place = found.end()
        if place < len(text):
            yield quoted(text[place:])


def _any_of(rule: str, tools: list[_Tool]) -> str:
    return f"({' | '.join(f'{rule}_{number}' for number, _ in enumerate(tools))})"
