"""The tools that a client offers, as functions that a model knows.

A custom tool takes text, and models call functions with JSON: it becomes a function with one
parameter, ``input``. The tools of a namespace become functions whose names begin with its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from penstock.client.tools import MAX_TOOL_NAME, MAX_TOOLS, Choice, FunctionTool
from penstock.protocol.shown_values import show
from penstock.protocol.validation import InvalidValue, read
from penstock.services.frontend.bodies.openai_tools import (
    TOOL_KINDS,
    ChosenTool,
    CustomDeclaration,
    CustomFormat,
    FunctionDeclaration,
    NamespaceDeclaration,
    ReferredTool,
)

INPUT = "input"
"""The parameter of the function that a custom tool becomes."""
_BETWEEN = "__"


class ToolIdentity(NamedTuple):
    """What a client knows a tool by."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


class OfferedTools(NamedTuple):
    """The functions, and whose they are by their names."""

    functions: list[FunctionTool]
    identities: Mapping[str, ToolIdentity]

    def identity(self, function: str) -> ToolIdentity:
        """Of a called function; a model may call one that there is not."""
        return self.identities.get(function) or ToolIdentity(function)


def function_name(name: str, namespace: str | None) -> str:
    """The name that a model calls a tool by."""
    if not namespace:
        return name
    return f"{namespace}{'' if namespace.endswith(_BETWEEN) else _BETWEEN}{name}"


def offered(declared: Sequence[Any]) -> OfferedTools:
    """The tools of a body. Raises ``InvalidValue``."""
    functions: list[FunctionTool] = []
    identities: dict[str, ToolIdentity] = {}
    for index, one in enumerate(declared):
        _add(one, f"tools[{index}]", None, functions, identities)
    if len(functions) > MAX_TOOLS:
        raise InvalidValue(
            f"tools holds {len(functions)} tools with those of its namespaces; at most "
            f"{MAX_TOOLS} are allowed",
            "tools",
        )
    return OfferedTools(functions, identities)


def _add(
    declared: Any,
    where: str,
    namespace: str | None,
    functions: list[FunctionTool],
    identities: dict[str, ToolIdentity],
) -> None:
    tool = _read(declared, where, within=namespace is not None)
    if isinstance(tool, NamespaceDeclaration):
        for index, one in enumerate(tool.tools):
            _add(one, f"{where}.tools[{index}]", tool.name, functions, identities)
        return
    name = function_name(tool.name, namespace)
    if len(name) > MAX_TOOL_NAME:
        raise InvalidValue(
            f"{where}: the name {show(name)} has {len(name)} characters with its namespace; at "
            f"most {MAX_TOOL_NAME} are allowed",
            "tools",
        )
    if name in identities:
        raise InvalidValue(f"tools has two of the name {show(name)}; one is allowed", "tools")
    is_custom = isinstance(tool, CustomDeclaration)
    identities[name] = ToolIdentity(tool.name, namespace, is_custom)
    if isinstance(tool, CustomDeclaration):
        functions.append(_custom(tool, name, where))
    else:
        functions.append(
            FunctionTool(
                name=name,
                description=tool.description,
                parameters=tool.parameters,
                strict=tool.strict,
            )
        )


def _read(
    declared: Any, where: str, *, within: bool
) -> FunctionDeclaration | CustomDeclaration | NamespaceDeclaration:
    if not isinstance(declared, dict):
        raise InvalidValue(f"{where} is {show(declared)}; an object is allowed", "tools")
    kind = declared.get("type")
    kinds = [one for one in TOOL_KINDS if not within or one != "namespace"]
    if kind not in kinds:
        *some, last = map(show, kinds)
        raise InvalidValue(
            f"{where}.type is {show(kind)}; {', '.join(some)} or {last} is allowed (the server "
            "runs no tools itself: leave out those that it would have to run)",
            "tools",
        )
    found: FunctionDeclaration | CustomDeclaration | NamespaceDeclaration
    found = read(declared, TOOL_KINDS[kind], where)
    return found


def _custom(tool: CustomDeclaration, name: str, where: str) -> FunctionTool:
    schema: dict[str, Any] = {"type": "string", "description": "The whole input of the tool."}
    description = tool.description or ""
    wanted = tool.format
    if wanted is not None and _is_grammar(wanted, f"{where}.format"):
        if wanted.syntax == "regex":
            schema["pattern"] = f"^(?:{wanted.definition})$"
        else:
            description += (
                f"\n\nThe input must match this grammar, in Lark's syntax:\n{wanted.definition}"
            )
    return FunctionTool(
        name=name,
        description=description.strip() or None,
        parameters={
            "type": "object",
            "properties": {INPUT: schema},
            "required": [INPUT],
            "additionalProperties": False,
        },
        strict=True if "pattern" in schema else None,
    )


def _is_grammar(wanted: CustomFormat, where: str) -> bool:
    """Raises ``InvalidValue`` where the type and the rest contradict each other."""
    is_grammar = wanted.type == "grammar"
    for name, value in (("syntax", wanted.syntax), ("definition", wanted.definition)):
        if (value is None) == is_grammar:
            fault = "is missing" if is_grammar else "is allowed only with type 'grammar'"
            raise InvalidValue(f"{where}.{name} {fault}", "tools")
    return is_grammar


def choice_of(asked: str | ChosenTool | None, tools: OfferedTools) -> Choice:
    """What a ``tool_choice`` means; ``None``: not given. Raises ``InvalidValue``."""
    if not isinstance(asked, ChosenTool):
        return Choice(asked or "auto")  # type: ignore[arg-type]
    if asked.tools is not None:
        return Choice(asked.mode or "auto", [_function(one, tools) for one in asked.tools])
    return Choice("required", [_function(asked, tools)])


def _function(named: ReferredTool | ChosenTool, tools: OfferedTools) -> str:
    """The function of a named tool; without a namespace the only tool of that name is meant."""
    is_custom = named.type == "custom"
    found = [
        function
        for function, identity in tools.identities.items()
        if (identity.name, identity.is_custom) == (named.name, is_custom)
        and named.namespace in (None, identity.namespace)
    ]
    if len(found) > 1 and named.name in found:
        found = [named.name]
    if len(found) == 1:
        return found[0]
    known = ", ".join(map(show, list(tools.identities)[:16])) or "none"
    fault = "several of the tools given" if found else "none of the tools given"
    raise InvalidValue(
        f"tool_choice names the {named.type} {show(named.name)}, which is {fault} ({known})",
        "tool_choice",
    )
