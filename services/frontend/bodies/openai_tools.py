"""The tools of a body of OpenAI's Responses API, and which of them are to be called. Each kind is
declared by itself; its ``type`` tells which it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from penstock.client.tools import MAX_TOOLS, ToolName
from penstock.protocol.declared import Declared
from penstock.protocol.validation import InvalidValue


def _said(description: str) -> Meta:
    return Meta(description=description)


_TOOL_NEUTRAL: Mapping[str, Any] = {
    "allowed_callers": (["direct"],),
    "async": (False,),
    "defer_loading": (False,),
}


class FunctionDeclaration(Declared, kw_only=True):
    NEUTRAL: ClassVar[Mapping[str, Any]] = _TOOL_NEUTRAL

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: Annotated[dict[str, Any], _said("A JSON schema of its arguments.")] | None = None
    strict: bool | None = None
    output_schema: Annotated[dict[str, Any], _said("Has no effect.")] | None = None


class CustomFormat(Declared, kw_only=True):
    """What the input of a custom tool looks like."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomDeclaration(Declared, kw_only=True):
    """A tool that takes text."""

    NEUTRAL: ClassVar[Mapping[str, Any]] = _TOOL_NEUTRAL

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: CustomFormat | None = None


class NamespaceDeclaration(Declared, kw_only=True):
    """Functions and custom tools under one name."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)]


TOOL_KINDS: dict[str, type[Declared]] = {
    "function": FunctionDeclaration,
    "custom": CustomDeclaration,
    "namespace": NamespaceDeclaration,
}


class ReferredTool(Declared, kw_only=True):
    type: Literal["function", "custom"]
    name: ToolName
    namespace: ToolName | None = None


class ChosenTool(Declared, kw_only=True):
    """Which tool must be called, or which may be."""

    IS_ONE_PARAM: ClassVar[bool] = True

    type: Literal["function", "custom", "allowed_tools"]
    name: ToolName | None = None
    namespace: ToolName | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[ReferredTool], Meta(min_length=1, max_length=MAX_TOOLS)] | None = None

    def __post_init__(self) -> None:
        """Raise ``InvalidValue`` where the type and the rest contradict each other."""
        lists = self.type == "allowed_tools"
        needed = {"name": not lists, "mode": lists, "tools": lists}
        for name, is_needed in needed.items():
            if (getattr(self, name) is None) == is_needed:
                fault = "is missing" if is_needed else f"is not allowed with type {self.type!r}"
                raise InvalidValue(f"tool_choice.{name} {fault}", "tool_choice")
