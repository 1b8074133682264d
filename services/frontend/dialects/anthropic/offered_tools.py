"""Which tools a model is offered at the end of a conversation.

A client may declare tools that wait (``defer_loading``) until the conversation names them: the
result of a search of the client's own (``tool_reference``), or a message of the system
(``tool_addition``, ``tool_removal``). Chat templates list tools at the beginning of a prompt. So
those that came later stand behind the others, in the order in which they came, and a prompt shares
its beginning with the earlier ones up to there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.protocol.shown_values import show
from penstock.protocol.validation import InvalidValue
from penstock.services.frontend.bodies.anthropic import (
    Block,
    CustomTool,
    InputMessage,
    ToolChange,
)


def offered_tools(
    declared: Sequence[CustomTool], messages: Sequence[InputMessage]
) -> list[CustomTool]:
    """Raises ``InvalidValue`` for a tool that is not declared."""
    known = {tool.name: tool for tool in declared}
    if len(known) < len(declared):
        return list(declared)  # of two with one name; who reads them refuses that
    offered = {name: tool for name, tool in known.items() if not tool.defer_loading}
    for where, block in _blocks(messages):
        match block:
            case Block(type="tool_result", content=list(parts)):
                for number, part in enumerate(parts):
                    if (name := part.tool_name) is not None:
                        tool = _found(known, name, f"{where}.content[{number}].tool_name")
                        offered.setdefault(name, tool)
            case Block(type="tool_addition", tool=ToolChange(definition=CustomTool() as tool)):
                known[tool.name] = offered[tool.name] = tool
            case Block(type="tool_addition", tool=ToolChange(name=str(name))):
                offered.setdefault(name, _found(known, name, f"{where}.tool.name"))
            case Block(type="tool_removal", tool=ToolChange(name=str(name))):
                _found(known, name, f"{where}.tool.name")
                offered.pop(name, None)
    return list(offered.values())


def _blocks(messages: Sequence[InputMessage]) -> Iterator[tuple[str, Block]]:
    for index, message in enumerate(messages):
        if not isinstance(message.content, str):
            for number, block in enumerate(message.content):
                yield f"messages[{index}].content[{number}]", block


def _found(known: dict[str, CustomTool], name: str, where: str) -> CustomTool:
    if name not in known:
        names = ", ".join(map(show, list(known)[:16])) or "none"
        raise InvalidValue(
            f"{where} is {show(name)}, which is none of the tools given ({names})", "messages"
        )
    return known[name]
