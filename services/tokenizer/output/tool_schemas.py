"""What the tools of a request say about the types of their parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

ToolSchema: TypeAlias = Mapping[str, Any] | bool | None
"""JSON schema of a tool's parameters; ``None``: none is given."""
Kinds: TypeAlias = frozenset[str]
"""JSON schema types that a parameter may have; none: nothing is said."""

STRING: Kinds = frozenset({"string"})
UNKNOWN: Kinds = frozenset()
_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
_OTHER_NAMES = {
    "str": "string", "text": "string", "int": "integer", "long": "integer", "float": "number",
    "double": "number", "bool": "boolean", "none": "null", "list": "array", "tuple": "array",
    "dict": "object", "any": "",
}  # fmt: skip
"""Types as people write them who do not keep to JSON schema."""
_MOST_STEPS = 64
"""References and alternatives that are followed for one parameter."""


class ToolSchemas:
    """The declared tools of a request, by name. Types are worked out when they are asked for."""

    __slots__ = ("_made", "_schemas")

    def __init__(self, schemas: Mapping[str, ToolSchema]) -> None:
        self._schemas = schemas
        self._made: dict[str, ToolParameters] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._schemas

    def __len__(self) -> int:
        return len(self._schemas)

    def of(self, name: str) -> ToolParameters:
        """The parameters of a tool; nothing is known of those of an undeclared one."""
        made = self._made.get(name)
        if made is None:
            schema = self._schemas.get(name)
            made = ToolParameters(schema if isinstance(schema, Mapping) else {})
            if name in self._schemas:
                self._made[name] = made
        return made


class ToolParameters:
    """The parameters of one tool."""

    __slots__ = ("_kinds", "_others", "_properties", "_schema")

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        self._kinds: dict[str, Kinds] = {}
        self._properties: list[Mapping[str, Any]] | None = None
        """All that the schema declares, once it has been asked."""
        self._others: Kinds | None = None
        """The types of what it does not declare."""

    def kinds(self, parameter: str) -> Kinds:
        """The types that a parameter may have. ``UNKNOWN`` where the schema does not say."""
        found = self._kinds.get(parameter)
        if found is None:
            found = self._work_out(parameter)
            if len(self._kinds) < 1024:  # a model may write any number of names
                self._kinds[parameter] = found
        return found

    def _work_out(self, parameter: str) -> Kinds:
        if self._properties is None:
            found = _Steps(self._schema).alternatives(self._schema)
            declared = [schema.get("properties") for schema in found]
            self._properties = [one for one in declared if isinstance(one, Mapping)]
        for properties in self._properties:
            if parameter in properties:
                return _Steps(self._schema).kinds(properties[parameter])
        if self._others is None:
            self._others = _Steps(self._schema).kinds(self._schema.get("additionalProperties"))
        return self._others


class _Steps:
    """Follows references and alternatives, so many at most."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._left = _MOST_STEPS

    def alternatives(self, schema: Any) -> list[Mapping[str, Any]]:
        """The schema and all that it is made of: what it refers to, its alternatives and parts."""
        found: list[Mapping[str, Any]] = []
        todo = [schema]
        while todo and self._left:
            self._left -= 1
            one = todo.pop()
            if not isinstance(one, Mapping):
                continue
            found.append(one)
            reference = one.get("$ref")
            if isinstance(reference, str):
                todo.append(self._target(reference))
            for word in ("anyOf", "oneOf", "allOf"):
                parts = one.get(word)
                if isinstance(parts, list):
                    todo += parts
        return found

    def kinds(self, schema: Any) -> Kinds:
        kinds: set[str] = set()
        for one in self.alternatives(schema):
            kinds |= _own_kinds(one)
        return frozenset(kinds)

    def _target(self, reference: str) -> Any:
        target: Any = self._root
        if not reference.startswith("#"):
            return None
        for step in reference[1:].split("/")[1:]:
            if not isinstance(target, Mapping):
                return None
            target = target.get(step.replace("~1", "/").replace("~0", "~"))
        return target


def _own_kinds(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema names itself, or those of the values that it lists."""
    named = schema.get("type")
    names = named if isinstance(named, list) else [named]
    kinds = {_type_name(name) for name in names if isinstance(name, str)} - {""}
    if not kinds:
        values = schema.get("enum")
        values = list(values) if isinstance(values, list) else []
        if "const" in schema:
            values.append(schema["const"])
        kinds = {_type_of(value) for value in values}
        if not kinds and "properties" in schema:
            kinds = {"object"}
        elif not kinds and ("items" in schema or "prefixItems" in schema):
            kinds = {"array"}
    if kinds and schema.get("nullable") is True:
        kinds.add("null")
    return kinds


def _type_name(name: str) -> str:
    name = name.strip().lower()
    if name in _TYPES:
        return name
    return _OTHER_NAMES.get(name, "")


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"
