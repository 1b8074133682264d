"""Reads a checkpoint's ``response_template`` (Hugging Face, version 1) into a family's table.

It stands in ``tokenizer_config.json`` and says of each field of a message (thinking, content,
tool_calls) what opens and closes it, how its content is written and, by ``transform``, where name
and arguments of a call stand in that. What is read here:

- literals, and regular expressions of literals, ``\\s*`` and named groups of one class each;
- tool calls whose content is ``json`` (one call, or an array of them with ``transform_each``),
  ``xml-inline`` or ``python-call-list``; JSON also with unquoted keys and quotes of its own.

``start_anchor`` and ``defaults`` concern prompts and messages, not outputs. All else is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, NoReturn

from penstock.services.tokenizer.output.call_scanner import CallScanner, Syntax
from penstock.services.tokenizer.output.family import (
    Action,
    Channel,
    Edge,
    Expect,
    Family,
    Free,
    ReasoningMarks,
    Scan,
    State,
    behind_space,
)
from penstock.services.tokenizer.output.json_calls import call_headers, object_states
from penstock.services.tokenizer.output.json_scanner import JsonScanner
from penstock.services.tokenizer.output.pattern import (
    MAX_NAME,
    SPACE,
    Characters,
    Literal,
    Mark,
    Pattern,
    either,
    name,
    sequence,
)

_TEMPLATE_KEYS = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
_FIELD_KEYS = {
    "open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats", "join",
    "optional", "transform", "transform_each",
}  # fmt: skip
_THINKING = ("thinking", "reasoning", "reasoning_content")
_PIECE = re.compile(
    r"(?P<space>\\s[*+]\??)"
    r"|\(\?P<(?P<label>\w+)>(?P<inside>\\[wS]|\[(?:\\.|[^\]\\])+\]|\.)[*+]\??\)"
    r"|\\(?P<escaped>[^\w\s])"
    r"|(?P<plain>[^\\.*+?()\[\]{}|^$])"
)
_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")


class BadResponseTemplate(ValueError):
    """A template that is wrong, or asks for what is not read. The message names the place."""


def read_response_template(spec: Any, added: Collection[str] = ()) -> Family:
    """The table of a template.

    Args:
        spec: the value of ``response_template``.
        added: texts of the tokens that were added to the vocabulary.

    Raises:
        BadResponseTemplate: where it is wrong, or asks for something that is not read.
    """
    template = _object(spec, "response_template", _TEMPLATE_KEYS)
    if template.get("version", 1) != 1:
        raise BadResponseTemplate(
            f"response_template.version is {template['version']!r}; version 1 is read"
        )
    fields = template.get("fields")
    if not isinstance(fields, Mapping) or not fields:
        raise BadResponseTemplate("response_template.fields must be an object with fields")
    reader = _Reader(added)
    reasoning: ReasoningMarks | None = None
    calls: tuple[tuple[Edge, ...], dict[str, State]] = ((), {})
    around: tuple[Edge, ...] = ()
    for key, value in fields.items():
        field = _Field(f"response_template.fields.{key}", value, reader)
        if key in _THINKING:
            reasoning = field.reasoning()
        elif key == "content":
            around = field.around()
        elif key == "tool_calls":
            calls = field.calls()
        else:
            raise BadResponseTemplate(f"{field.where} is no field that is read")
    return Family(
        name="response_template",
        marks=reader.marks,
        openers=(*calls[0], *around),
        states=calls[1],
        reasoning=reasoning,
        newlines=reader.newlines,
    )


def _object(value: Any, where: str, known: Collection[str]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise BadResponseTemplate(f"{where} must be an object")
    for key in value:
        if key not in known:
            raise BadResponseTemplate(f"{where}.{key} is not known")
    return value


class _Reader:
    """Texts as patterns, in which tokens of the vocabulary are marks."""

    def __init__(self, added: Collection[str]) -> None:
        self.marks: dict[str, str] = {}
        self.newlines = False
        """Space around a value in a tag is no part of it."""
        longest = sorted(filter(None, added), key=len, reverse=True)
        self._tokens = (
            re.compile("(" + "|".join(map(re.escape, longest)) + ")") if longest else None
        )

    def pattern(self, text: str) -> Pattern:
        parts = self._tokens.split(text) if self._tokens is not None else [text]
        found: list[Pattern | str] = []
        for place, part in enumerate(parts):
            if place % 2:
                self.marks[part] = part
                found.append(Mark(part))
            elif part:
                found.append(Literal(part))
        return sequence(*found)


class _Field:
    """One field of a template."""

    def __init__(self, where: str, value: Any, reader: _Reader) -> None:
        self.where = where
        self._reader = reader
        self._spec = _object(value, where, _FIELD_KEYS)
        for literal, pattern in (("open", "open_pattern"), ("close", "close_pattern")):
            if literal in self._spec and pattern in self._spec:
                raise BadResponseTemplate(f"{where} has both {literal} and {pattern}")
        self._content = self._spec.get("content", "text")
        self._arguments = self._spec.get("content_args", {})
        if not isinstance(self._arguments, Mapping):
            self._refuse("has content_args that are no object")

    def reasoning(self) -> ReasoningMarks:
        opening, closing = self._texts("open"), self._texts("close")
        if self._content != "text" or not opening or not closing:
            self._refuse("is read as text between two literals only")
        return ReasoningMarks(opening[0], closing[0])

    def around(self) -> tuple[Edge, ...]:
        """The marks around content, which are no part of it."""
        if self._content != "text":
            self._refuse("is read as text only")
        texts = [*self._texts("open"), *self._texts("close")]
        return tuple(Edge(self._reader.pattern(text), "content") for text in texts)

    def calls(self) -> tuple[tuple[Edge, ...], dict[str, State]]:
        """What opens calls, and the states that it leads to."""
        opening = self._opening()
        if self._has_own_json():
            opening = sequence(opening, SPACE, "{")
        closing = [self._reader.pattern(text) for text in self._texts("close")]
        ends = tuple(Edge(close, "after", (Action.END,)) for close in closing)
        if self._content == "json":
            return self._json_calls(opening, ends)
        if self._content == "xml-inline":
            return self._tags(opening, ends)
        if self._content == "python-call-list":
            self._check_unnamed()
            return _python_calls(opening, ends)
        raise BadResponseTemplate(f"{self.where}.content {self._content!r} is not read for calls")

    def _check_unnamed(self) -> None:
        if "(?P<" in str(self._spec.get("open_pattern", "")):
            self._refuse("has open_pattern with groups, though the content holds the names")

    def _json_calls(
        self, opening: Pattern, ends: tuple[Edge, ...]
    ) -> tuple[tuple[Edge, ...], dict[str, State]]:
        each = self._spec.get("transform_each") is True
        found = self._places("" if each else "content.")
        if found == ("{name}", "{content}"):
            return self._arguments_alone(opening, ends)
        self._check_unnamed()
        keys = [f'"{one}"' for one in found]
        how: dict[str, Any] = {"name_key": keys[0], "keys": (keys[1],)}
        if self._arguments:
            self._refuse("has content_args that are read only for arguments alone")
        others = ('"id"', '"type"', '"tool_call_id"')
        closed = tuple(edge._replace(actions=()) for edge in ends)
        inside = (SPACE, "[", SPACE) if each else (SPACE,)
        following = (",", SPACE) if each else (SPACE,)
        array_end = (Edge(sequence("]"), "array_end"),) if each else ()
        after = (*call_headers(*following, others=others, **how), *array_end, *closed)
        return call_headers(opening, *inside, others=others, **how), {
            **object_states("object_end", ends),
            "object_end": Expect(behind_space(after), "after"),
            "array_end": Expect(behind_space(closed), "after"),
        }

    def _arguments_alone(
        self, opening: Pattern, ends: tuple[Edge, ...]
    ) -> tuple[tuple[Edge, ...], dict[str, State]]:
        """The name stands in the opening, and the content is the arguments."""
        scan = Scan(JsonScanner, "arguments_end", ends)
        if self._has_own_json():
            quote = self._quote()
            scanner = partial(CallScanner, syntax=Syntax("}", quotes='"'))
            scan = Scan(scanner, "arguments_end", ends, quote=quote)
        return (Edge(opening, "arguments", (Action.CALL,)),), {
            "arguments": scan,
            "arguments_end": Expect(behind_space(ends), actions=(Action.END,)),
        }

    def _quote(self) -> Pattern | None:
        """What stands around strings, if it is not JSON's quotes."""
        given = self._arguments.get("string_delims", [])
        if given == []:
            return None
        match given:
            case [[str(opening), str(closing)]] if opening and opening == closing:
                quote = self._reader.pattern(opening)
            case _:
                self._refuse("has string_delims that are read only as one quote")
        return quote

    def _tags(
        self, opening: Pattern, ends: tuple[Edge, ...]
    ) -> tuple[tuple[Edge, ...], dict[str, State]]:
        """A tag for each argument."""
        if self._places("") != ("{name}", "{content}"):
            self._refuse("must take the name from open_pattern for xml-inline")
        source = str(self._arguments.get("tag_pattern", ""))
        before, value, behind = source.partition("(?P<value>.*?)")
        before, behind = re.sub(r"\\s[*+]\??$", "", before), re.sub(r"^\\s[*+]\??", "", behind)
        if not value or not behind or self._arguments.get("merge_duplicates"):
            self._refuse(f"has a tag_pattern or merge_duplicates that is not read: {source!r}")
        self._reader.newlines = source.endswith(r"\s*" + behind)
        form = Action.KEY if self._arguments.get("value_parser") else Action.KEY_STRING
        key = Edge(self._regular(before, "tag_pattern"), "value", (form,))
        value_end = Edge(self._regular(behind, "tag_pattern"), "tags", (Action.VALUE_END,))
        return (Edge(opening, "tags", (Action.CALL,)),), {
            "tags": Expect(behind_space((key, *ends)), "rest_of_call"),
            "value": Free(Channel.VALUE, (value_end, *ends)),
            "rest_of_call": Free(Channel.NOTHING, (key, *ends)),
        }

    def _has_own_json(self) -> bool:
        """The arguments are an object with keys or quotes of its own."""
        found = self._arguments.get("unquoted_keys") or self._arguments.get("string_delims")
        return self._content == "json" and bool(found)

    def _places(self, prefix: str) -> tuple[str, str]:
        """Where name and arguments stand: keys of the content, or ``{name}`` and ``{content}``."""
        transform = self._spec.get("transform")
        function = transform.get("function") if isinstance(transform, Mapping) else None
        if function == "{content}" and prefix == "content.":
            return "name", "arguments"
        if isinstance(function, Mapping):
            found = [str(function.get(key)) for key in ("name", "arguments")]
            if found == ["{name}", "{content}"]:
                return "{name}", "{content}"
            places = [_PLACEHOLDER.fullmatch(one) for one in found]
            keys = [place[1].removeprefix(prefix) for place in places if place is not None]
            if len(keys) == 2 and not any("." in key for key in keys):
                return keys[0], keys[1]
        raise BadResponseTemplate(f"{self.where}.transform is not read: {transform!r}")

    def _opening(self) -> Pattern:
        if "open_pattern" in self._spec:
            return self._regular(str(self._spec["open_pattern"]), "open_pattern")
        texts = self._texts("open")
        if not texts:
            self._refuse("has neither open nor open_pattern")
        patterns = [self._reader.pattern(text) for text in texts]
        return patterns[0] if len(patterns) == 1 else either(*patterns)

    def _texts(self, key: str) -> list[str]:
        """The literals that open or close the field, the longest first."""
        if f"{key}_pattern" in self._spec:
            self._refuse(f"has a {key}_pattern where only a literal is read")
        given = self._spec.get(key, [])
        texts = [given] if isinstance(given, str) else given
        if not isinstance(texts, list) or not all(isinstance(one, str) and one for one in texts):
            self._refuse(f"has {key} that is neither a text nor a list of texts")
        return sorted(texts, key=len, reverse=True)

    def _regular(self, source: str, key: str) -> Pattern:
        """A regular expression of the few forms that are read."""
        source = re.sub(r"\\s[*+]\??$", "", source)
        parts: list[Pattern | str] = []
        labels: set[str] = set()
        text, place = "", 0
        while place < len(source):
            piece = _PIECE.match(source, place)
            if piece is None:
                self._refuse(f"has {key} that is not read from {source[place:]!r} on")
            place = piece.end()
            literal = piece["escaped"] or piece["plain"]
            if literal:
                text += literal
                continue
            if text:
                parts.append(self._reader.pattern(text))
                text = ""
            if piece["space"]:
                parts.append(SPACE)
            else:
                group = _group(piece["label"], piece["inside"], source[place : place + 2])
                if not _is_class(group.inside):
                    self._refuse(f"has {key} with {piece['inside']}, which is no class")
                if not group.group.isidentifier() or group.group in labels:
                    self._refuse(f"has {key} with {group.group} as the name of a group")
                labels.add(group.group)
                parts.append(group)
        if text:
            parts.append(self._reader.pattern(text))
        elif not parts or not self._has_own_json():
            self._refuse(f"has {key} that does not end with a literal")
        return sequence(*parts)

    def _refuse(self, what: str) -> NoReturn:
        raise BadResponseTemplate(f"{self.where} {what}")


def _is_class(inside: str) -> bool:
    try:
        re.compile(f"[{inside}]")
    except re.error:
        return False
    return True


def _group(label: str, inside: str, then: str) -> Characters:
    """A named group of one class of characters; ``.`` ends before what stands behind it."""
    stop = re.escape(then.removeprefix("\\")[:1])
    excluded = r"\ud800-\udfff"
    if inside == ".":
        allowed = f"^{stop}{excluded}"
    elif inside.startswith("[^"):
        allowed = inside[1:-1] + excluded
    elif inside == r"\S":
        allowed = rf"^\s{stop}{excluded}"
    else:
        allowed = inside.removeprefix("[").removesuffix("]") if inside[0] == "[" else inside
    return Characters(allowed, 1, MAX_NAME, label)


def _python_calls(
    opening: Pattern, ends: tuple[Edge, ...]
) -> tuple[tuple[Edge, ...], dict[str, State]]:
    named = sequence(name("()[]{}<>=,;:'\"\\`"), SPACE, "(")
    following = Edge(sequence(",", SPACE, named), "call", (Action.CALL,))
    list_end = Edge(sequence("]"), "list_end", (Action.END,))
    closed = tuple(edge._replace(actions=()) for edge in ends)
    return (Edge(sequence(opening, SPACE, "[", SPACE, named), "call", (Action.CALL,)),), {
        "call": Scan(CallScanner, "call_end", ends),
        "call_end": Expect(behind_space((following, list_end, *ends)), "after", (Action.END,)),
        "list_end": Expect(behind_space(closed), "after"),
    }
