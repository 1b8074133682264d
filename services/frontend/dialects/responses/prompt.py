"""From items to the messages that a chat template renders."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from penstock.client.messages import CalledFunction, Message, ToolCall
from penstock.services.frontend.bodies.openai_items import (
    CustomCallItem,
    CustomOutputItem,
    FunctionCallItem,
    FunctionOutputItem,
    InputItem,
    MessageItem,
    ReasoningItem,
)
from penstock.services.frontend.dialects.responses.items import text_of, thought_of
from penstock.services.frontend.dialects.responses.tools import INPUT, function_name


def messages_of(instructions: str | None, items: Iterable[InputItem]) -> list[Message]:
    """The chat. What an assistant thought, said and called in one turn becomes one message, and
    what stands before the first other message one of the system: most templates know no more.

    Raises ``InvalidValue`` for thinking that cannot be read.
    """
    messages: list[Message] = []
    if instructions:
        messages.append(Message(role="system", content=instructions))
    for item in items:
        match item:
            case MessageItem(role="assistant"):
                _said(messages, text_of(item.content))
            case MessageItem():
                _heard(messages, item)
            case ReasoningItem():
                if thought := thought_of(item):
                    _turn(messages, thinks=True).reasoning_content = thought
            case FunctionCallItem():
                name = function_name(item.name, item.namespace)
                _called(messages, item.call_id, name, item.arguments)
            case CustomCallItem():
                name = function_name(item.name, item.namespace)
                arguments = msgspec.json.encode({INPUT: item.input}).decode()
                _called(messages, item.call_id, name, arguments)
            case FunctionOutputItem() | CustomOutputItem():
                messages.append(
                    Message(role="tool", content=text_of(item.output), tool_call_id=item.call_id)
                )
    return messages


def _heard(messages: list[Message], item: MessageItem) -> None:
    text = text_of(item.content)
    is_system = item.role in ("system", "developer")
    if is_system and len(messages) == 1 and messages[0].role == "system":
        messages[0].content = f"{messages[0].content}\n\n{text}"
    else:
        role = "system" if is_system else item.role
        messages.append(Message(role=role, content=text))


def _turn(messages: list[Message], *, thinks: bool = False, says: bool = False) -> Message:
    """The assistant's message that goes on, or a new one where it could not."""
    last = messages[-1] if messages else None
    if last is not None and last.role == "assistant":
        is_begun = last.content is not None or bool(last.tool_calls)
        if not (thinks and (is_begun or last.reasoning_content)) and not (says and is_begun):
            return last
    made = Message(role="assistant")
    messages.append(made)
    return made


def _said(messages: list[Message], text: str) -> None:
    _turn(messages, says=True).content = text


def _called(messages: list[Message], call_id: str, name: str, arguments: str) -> None:
    message = _turn(messages)
    call = ToolCall(id=call_id, function=CalledFunction(name=name, arguments=arguments))
    message.tool_calls = [*(message.tool_calls or ()), call]
