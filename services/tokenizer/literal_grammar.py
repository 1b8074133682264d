"""Grammar rules for arguments that are literals: ``a=1, b=['x', True]`` or ``a:1,b:[…]``.

A schema becomes rules in Lark's syntax as far as its shape goes: types, ``enum``, properties and
items. Parameters come in the order of the schema, each at most once. What a rule cannot say is
noted (``unenforced``), so that a strict tool can be refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from penstock.services.tokenizer.lark_text import quoted, regex
from penstock.services.tokenizer.output.family import Literals

_ANNOTATIONS = frozenset(
    {
        "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated",
        "description", "examples", "readOnly", "title", "writeOnly",
    }
)  # fmt: skip
"""Keywords that ask for nothing."""
_SHAPE = frozenset(
    {
        "$ref", "additionalProperties", "anyOf", "const", "enum", "items", "properties", "required",
        "type",
    }
)  # fmt: skip
_CONSTANTS = {True: ("true", "True"), False: ("false", "False"), None: ("null", "None")}
_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
_KEY = r"""[^\s=:,()\[\]{}<>|\"'\\\x00-\x1f]{1,64}"""
"""A name that needs no quotes."""
_INTEGER = r"-?(?:0|[1-9][0-9]{0,18})"
_NUMBER = _INTEGER + r"(?:\.[0-9]{1,18})?(?:[eE][+-]?[0-9]{1,2})?"
_ESCAPE = r"""\\(?:[\"'\\\/bfnrt]|u(?:[0-9a-ce-fA-CE-F][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}))"""
_MAX_RULES = 4096
"""Of one tool; further values are any literal."""

Rule = Callable[[str, str], None]
"""Adds a rule: its name and its body."""


class LiteralRules:
    """Writes the rules of one request's arguments."""

    def __init__(self, syntax: Literals, text: Callable[[str], str], rule: Rule) -> None:
        """text: an expression that matches a text, marks in it as their tokens."""
        self._syntax = syntax
        self._text = text
        self._rule = rule
        self._quote = text(syntax.quote) if syntax.quote else ""
        self._quotes_by_token = self._quote.startswith("<[")
        self._made = 0
        """Rules of the schema that is written …"""
        self._number = 0
        """… and of all schemas."""
        self._root: Mapping[str, Any] = {}
        self._references: dict[str, str] = {}
        self.unenforced: dict[str, None] = {}
        """Keywords of the schema that was written last which no rule says."""
        self._write_any()

    def arguments(self, schema: Mapping[str, Any] | None) -> str:
        """An expression for the arguments of a call between its brackets. ``None``: any."""
        self._root, self._references, self.unenforced = schema or {}, {}, {}
        self._made = 0
        if schema is None:
            return self._list_of("literal_argument")
        return self._members(schema, self._argument, "literal_argument")

    # --- literals

    def _write_any(self) -> None:
        """Rules of any value."""
        assign = regex(self._syntax.assign)
        self._rule("LITERAL_COMMA", "/, ?/")
        self._rule("LITERAL_COLON", "/: ?/")
        self._rule("LITERAL_NUMBER", f"/{_NUMBER}/")
        self._rule("LITERAL_INTEGER", f"/{_INTEGER}/")
        self._rule("literal_argument", "LITERAL_ARGUMENT literal_value")
        self._rule("LITERAL_ARGUMENT", f"/{_KEY}{assign}/")
        if self._syntax.quote:
            self._write_between_marks(regex(self._syntax.quote))
            self._rule("LITERAL_KEY", f"/{_KEY}:/")
            self._rule("literal_member", "LITERAL_KEY literal_value")
        else:
            parts = (
                f"{mark}(?:{_ESCAPE}|[^{mark}\\\\\\x00-\\x1f])*{mark}" for mark in ("'", '\\"')
            )
            self._rule("literal_string", " | ".join(f"/{one}/" for one in parts))
            self._rule("literal_member", "literal_string LITERAL_COLON literal_value")
        constants = " | ".join(self._constant(one) for one in _CONSTANTS)
        self._rule(
            "literal_value",
            f"literal_string | LITERAL_NUMBER | {constants} | literal_list | literal_object",
        )
        self._rule("literal_list", f'"[" {self._list_of("literal_value")} "]"')
        self._rule("literal_object", f'"{{" {self._list_of("literal_member")} "}}"')

    def _write_between_marks(self, mark: str) -> None:
        """A string between marks. Where these are no tokens, text and mark are one terminal: a text
        alone would swallow the mark."""
        if self._quotes_by_token:
            self._rule("literal_string", f"{self._quote} /(?s:.*)/ {self._quote}")
            return
        twice = f"(?s:.*){mark}(?s:.*){mark}(?s:.*)"
        self._rule("LITERAL_TEXT", f"/(?s:.*){mark}/ & ~/{twice}/")
        self._rule("literal_string", f"{self._quote} LITERAL_TEXT")

    @staticmethod
    def _list_of(item: str) -> str:
        return f"({item} (LITERAL_COMMA {item})*)?"

    def _constant(self, value: bool | None) -> str:
        json, python = _CONSTANTS[value]
        return f'"{json}"' if self._syntax.quote else f'("{json}" | "{python}")'

    def _literal(self, value: Any) -> str | None:
        """An expression for one value; ``None``: it is none that can be written so."""
        if value is None or isinstance(value, bool):
            return self._constant(value)
        if isinstance(value, int | float):
            return quoted(msgspec.json.encode(value).decode())
        if isinstance(value, str):
            return self._string(value)
        return None

    def _string(self, text: str) -> str | None:
        quote = self._syntax.quote
        if not quote:
            return f"({' | '.join(map(quoted, python_strings(text)))})"
        if quote in text:
            return None
        if self._quotes_by_token:
            return f"{self._quote} {quoted(text) if text else ''} {self._quote}"
        return quoted(quote + text + quote)

    # --- schemas

    def _value(self, schema: Any) -> str:
        """An expression for the values that a schema takes."""
        if schema is True or schema == {} or self._made > _MAX_RULES:
            return "literal_value"
        if not isinstance(schema, Mapping):
            self._skip("false" if schema is False else "items")
            return "literal_value"
        for keyword in schema.keys() - _ANNOTATIONS - _SHAPE:
            self._skip(keyword)
        for alone in ("$ref", "anyOf"):
            if alone in schema:  # the keywords beside it would have to hold as well
                for keyword in schema.keys() & _SHAPE - {alone}:
                    self._skip(keyword)
        if "$ref" in schema:
            return self._referred(schema["$ref"])
        if "const" in schema or "enum" in schema:
            return self._one_of(schema.get("enum", [schema.get("const")]))
        if isinstance(schema.get("anyOf"), list):
            return f"({' | '.join(map(self._value, schema['anyOf']))})"
        kinds = schema.get("type", [])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(kinds, list) or not kinds or not set(kinds) <= set(_TYPES):
            kinds = ["object"] if "properties" in schema else []
        found = [self._of_type(kind, schema) for kind in kinds]
        return f"({' | '.join(found)})" if found else "literal_value"

    def _one_of(self, values: Any) -> str:
        found = [self._literal(one) for one in values] if isinstance(values, list) else []
        if not found or None in found:
            self._skip("enum")
            return "literal_value"
        return f"({' | '.join(filter(None, found))})"

    def _of_type(self, kind: str, schema: Mapping[str, Any]) -> str:
        match kind:
            case "string":
                return "literal_string"
            case "integer":
                return "LITERAL_INTEGER"
            case "number":
                return "LITERAL_NUMBER"
            case "boolean":
                return f"{self._constant(True)} | {self._constant(False)}"
            case "null":
                return self._constant(None)
            case "array":
                item = self._named(self._value(schema.get("items", True)))
                return f'"[" {self._list_of(item)} "]"'
        return f'"{{" {self._members(schema, self._member, "literal_member")} "}}"'

    def _referred(self, name: Any) -> str:
        """A definition is a rule of its own, which may refer to itself."""
        if name in self._references:
            return self._references[name]
        found: Any = self._root
        for step in str(name).removeprefix("#/").split("/"):
            found = found.get(step) if isinstance(found, Mapping) else None
        if not str(name).startswith("#/") or found is None:
            self._skip("$ref")
            return "literal_value"
        rule = self._references[name] = self._next()
        self._rule(rule, self._value(found))
        return rule

    def _members(
        self, schema: Mapping[str, Any], member: Callable[[str, str], str | None], any_member: str
    ) -> str:
        """Properties in their order; without any, whatever an object may hold."""
        properties, required = schema.get("properties"), list(schema.get("required") or ())
        properties = dict(properties) if isinstance(properties, Mapping) else {}
        properties |= {key: True for key in required if key not in properties}
        if not properties:
            if schema.get("additionalProperties") is False:
                return '""'
            if schema.get("additionalProperties") not in (None, True, {}):
                self._skip("additionalProperties")
            return self._list_of(any_member)
        parts: list[tuple[str, bool]] = []
        for key, of_key in properties.items():
            written = member(key, self._value(of_key))
            if written is None:
                self._skip(f"the name {key!r}")
                if key in required:
                    return self._list_of(any_member)
                continue
            parts.append((self._named(written), key in required))
        return self._chain(parts)

    def _argument(self, key: str, value: str) -> str | None:
        return f"{quoted(key + self._syntax.assign)} {value}" if is_plain(key) else None

    def _member(self, key: str, value: str) -> str | None:
        if not self._syntax.quote:
            return f"{self._string(key)} LITERAL_COLON {value}"
        return f"{quoted(key + ':')} {value}" if is_plain(key) else None

    def _chain(self, parts: list[tuple[str, bool]]) -> str:
        """The parts in their order, with commas between; (expression, whether it must come)."""
        later, first = '""', '""'
        for part, must_come in reversed(parts):
            begun = f"{part} {later}"
            both = f"LITERAL_COMMA {begun}"
            later_too = self._named(both if must_come else f"({both}) | {later}")
            first = self._named(begun if must_come else f"({begun}) | {first}")
            later = later_too
        return first

    def _named(self, body: str) -> str:
        rule = self._next()
        self._rule(rule, body)
        return rule

    def _next(self) -> str:
        self._made += 1
        self._number += 1
        return f"literal_{self._number}"

    def _skip(self, keyword: str) -> None:
        self.unenforced[keyword] = None


def _string_between(mark: str) -> str:
    return f"{mark}(?:{_ESCAPE}|[^{mark}\\\\\\x00-\\x1f])*{mark}"


def is_plain(key: str) -> bool:
    """Whether a name may stand without quotes."""
    return (
        bool(key)
        and len(key) <= 64
        and not set(key) & set("=:,()[]{}<>|\"'\\")
        and (key.isprintable() and " " not in key)
    )


def python_strings(text: str) -> Iterable[str]:
    """A text as Python writes it, between either kind of quotes."""
    double = msgspec.json.encode(text).decode()
    yield double
    yield "'" + double[1:-1].replace('\\"', '"').replace("'", "\\'") + "'"
