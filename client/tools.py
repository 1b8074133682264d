"""The tools that a client offers to a model, whatever API it writes them in.

They travel as JSON to a tokenizer: the chat template renders them, the output parser reads their
calls by their schemas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from penstock.client.cache_control import CacheControl
from penstock.protocol.declared import Declared
from penstock.protocol.grammar.request import MAX_SOURCE_BYTES
from penstock.protocol.shown_values import show
from penstock.protocol.validation import InvalidValue
from penstock.protocol.wire.messages.requests import OutputFormat, ReasoningMode, ToolMode

MAX_TOOLS = 1024
MAX_TOOL_NAME = 128

ToolName = Annotated[
    str,
    Meta(
        pattern=r"^[a-zA-Z0-9_.:/-]+\Z",
        max_length=MAX_TOOL_NAME,
        description="Letters, digits and _ . : / -",
    ),
]


class FunctionTool(Declared, kw_only=True):
    """A function that the model may call."""

    name: ToolName
    description: Annotated[str, Meta(description="What it does, for the model.")] | None = None
    parameters: (
        Annotated[dict[str, Any], Meta(description="A JSON schema of its arguments.")] | None
    ) = None
    strict: Annotated[bool, Meta(description="The arguments must be what the schema says.")] | (
        None
    ) = None
    cache_control: CacheControl | None = None


class Choice(msgspec.Struct, frozen=True):
    """Which of the tools the model may call, and whether it must."""

    mode: ToolMode = "auto"
    names: Sequence[str] = ()
    """Those that it may call; empty: all."""


AUTO = Choice()


def output_format(
    tools: Sequence[FunctionTool],
    choice: Choice = AUTO,
    *,
    parallel: bool = True,
    reasoning: ReasoningMode = "apart",
    thinking_budget: int | None = None,
    param: str = "tools",
) -> OutputFormat:
    """How an answer to a chat with these tools is read. Raises ``InvalidValue``.

    param: the name of the tools' field, for errors.
    """
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise InvalidValue(f"{param} has two of the name {show(name)}; one is allowed", param)
    for name in choice.names:
        if name not in names:
            known = ", ".join(map(show, names[:16])) or "none"
            raise InvalidValue(
                f"tool_choice names {show(name)}, which is none of the tools given ({known})",
                "tool_choice",
            )
    if choice.mode == "required" and not tools:
        raise InvalidValue("tool_choice is 'required', but there are no tools", "tool_choice")
    return OutputFormat(
        tools=encode_tools(tools, param),
        mode=choice.mode,
        allowed=list(choice.names),
        strict=[tool.name for tool in tools if tool.strict],
        parallel=parallel,
        reasoning=reasoning,
        thinking_budget=thinking_budget,
    )


def encode_tools(tools: Sequence[FunctionTool], param: str = "tools") -> bytes:
    """The JSON that a chat template is rendered with; empty for no tools. Raises ``InvalidValue``
    where they are too many bytes."""
    if not tools:
        return b""
    encoded = msgspec.json.encode([_declared(tool) for tool in tools])
    if len(encoded) > MAX_SOURCE_BYTES:
        raise InvalidValue(
            f"{param} has {len(encoded)} bytes; at most {MAX_SOURCE_BYTES} are allowed", param
        )
    return encoded


def _declared(tool: FunctionTool) -> dict[str, Any]:
    """A tool as chat templates read it, which is as OpenAI's API writes it."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


class NamedTool(Declared, kw_only=True):
    name: ToolName


class ToolDeclaration(Declared, kw_only=True):
    """A tool in OpenAI's chat completions."""

    type: Literal["function"] = "function"
    function: FunctionTool
    cache_control: CacheControl | None = None


class ToolReference(Declared, kw_only=True):
    type: Literal["function"] = "function"
    function: NamedTool


class AllowedTools(Declared, kw_only=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolReference], Meta(min_length=1, max_length=MAX_TOOLS)]


class ToolChoice(Declared, kw_only=True):
    """Which tool must be called, or which may be."""

    IS_ONE_PARAM: ClassVar[bool] = True

    type: Literal["function", "allowed_tools"]
    function: NamedTool | None = None
    allowed_tools: AllowedTools | None = None

    def __post_init__(self) -> None:
        """Raise ``InvalidValue`` where the type and the rest contradict each other."""
        given = {"function": self.function, "allowed_tools": self.allowed_tools}
        for name, value in given.items():
            if (value is None) == (name == self.type):
                missing = "is missing" if value is None else "is allowed only with that type"
                raise InvalidValue(f"tool_choice.{name} {missing}", "tool_choice")

    def choice(self) -> Choice:
        if self.allowed_tools is not None:
            names = [one.function.name for one in self.allowed_tools.tools]
            return Choice(self.allowed_tools.mode, names)
        return Choice("required", [self.function.name] if self.function else ())


ToolDeclarations = Annotated[
    list[ToolDeclaration],
    Meta(max_length=MAX_TOOLS, description="Functions that the model may call."),
]
ToolChoiceField = Annotated[
    Literal["none", "auto", "required"] | ToolChoice,
    Meta(description="Whether a tool may or must be called, and which ones."),
]


def chosen(asked: ToolMode | ToolChoice | None) -> Choice:
    """What a ``tool_choice`` of OpenAI's chat completions means; ``None``: not given."""
    return asked.choice() if isinstance(asked, ToolChoice) else Choice(asked or "auto")
