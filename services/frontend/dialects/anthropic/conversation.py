"""A conversation as Anthropic's API writes it, in the messages that chat templates know.

Consecutive messages of one role become one, as they do there. The results of calls, which that
API lets a user say, become messages of the role ``tool``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

import msgspec

from penstock.client.messages import CalledFunction, Message, ToolCall
from penstock.protocol.validation import InvalidValue
from penstock.services.frontend.bodies.anthropic import (
    BLOCK_FIELDS,
    Block,
    InputMessage,
    ResultPart,
    SystemBlock,
)
from penstock.services.frontend.dialects.anthropic.signature import signed_thought
from penstock.services.frontend.dialects.unseen import IMAGE

BILLING = "x-anthropic-billing-header:"
"""A line that one client puts before its system prompt, other in each request: with it no prefix
of the prompt would be found in the cache."""
_SEPARATOR = "\n"
"""What stands between the texts of one message, as in other chats."""


def conversation(
    system: str | Sequence[SystemBlock] | None, given: Sequence[InputMessage]
) -> list[Message]:
    """The messages for the template. Raises ``InvalidValue``."""
    found = merged(system, given)
    last = found[-1] if found else None
    if last is not None and last.role == "assistant" and last.tool_calls:
        raise InvalidValue(
            f"messages[{len(given) - 1}] ends with a tool_use block; a message with its "
            "tool_result must follow",
            "messages",
        )
    if last is not None and last.role == "assistant" and not last.content:
        found.pop()  # an answer that is to begin with nothing
    return found


def merged(
    system: str | Sequence[SystemBlock] | None, given: Sequence[InputMessage]
) -> list[Message]:
    """The same of a conversation that may end anywhere. Raises ``InvalidValue``."""
    found: list[Message] = []
    if system and (text := system_text(system)):
        found.append(Message(role="system", content=text))
    for index, message in enumerate(given):
        for one in _messages(message, f"messages[{index}]"):
            if found and found[-1].role == one.role != "tool":
                _merge(found[-1], one)
            else:
                found.append(one)
    return found


def continues(messages: Sequence[Message]) -> bool:
    """The answer continues the last message."""
    return bool(messages) and messages[-1].role == "assistant"


def system_text(system: str | Sequence[SystemBlock]) -> str:
    """What the system says, in one text."""
    texts = [system] if isinstance(system, str) else [block.text for block in system]
    return _SEPARATOR.join(text for text in map(_without_billing, texts) if text)


def _without_billing(text: str) -> str:
    while text.startswith(BILLING):
        text = text.partition("\n")[2]
    return text


def _merge(into: Message, message: Message) -> None:
    into.content = _SEPARATOR.join(filter(None, (_text(into), _text(message))))
    if message.tool_calls:
        into.tool_calls = [*(into.tool_calls or ()), *message.tool_calls]
    if message.reasoning_content:
        thoughts = (into.reasoning_content, message.reasoning_content)
        into.reasoning_content = _SEPARATOR.join(filter(None, thoughts))


def _text(message: Message) -> str:
    return message.content if isinstance(message.content, str) else ""


def _messages(message: InputMessage, where: str) -> list[Message]:
    """What a message stands for: several, where it has results of tools. Raises
    ``InvalidValue``."""
    if isinstance(message.content, str):
        return [Message(role=message.role, content=message.content)]
    for number, block in enumerate(message.content):
        _check(block, message.role, f"{where}.content[{number}]")
    if message.role == "assistant":
        return [_assistant(message.content)]
    found: list[Message] = []
    texts: list[str] = []
    changes = [block for block in message.content if block.tool is not None]
    for block in message.content:
        if block.tool is not None:
            continue  # what it says is seen in the tools
        if block.type == "text":
            texts.append(block.text or "")
            continue
        if texts:
            found.append(Message(role=message.role, content=_SEPARATOR.join(texts)))
            texts = []
        found.append(Message(role="tool", tool_call_id=block.tool_use_id, content=_result(block)))
    if texts or not (found or changes):
        found.append(Message(role=message.role, content=_SEPARATOR.join(texts)))
    return found


_ROLES = {
    "text": ("user", "assistant", "system"),
    "tool_result": ("user",),
    "tool_use": ("assistant",),
    "thinking": ("assistant",),
    "redacted_thinking": ("assistant",),
    "tool_addition": ("system",),
    "tool_removal": ("system",),
}
"""In whose messages a block of each type may stand."""
_ALL = [name for needed, more in BLOCK_FIELDS.values() for name in (*needed, *more)]
_needed_of = {kind: attrgetter("type", *needed) for kind, (needed, _) in BLOCK_FIELDS.items()}
"""What a block of each type must have."""
_others_of = {
    kind: attrgetter(*(name for name in _ALL if name not in (*needed, *more)))
    for kind, (needed, more) in BLOCK_FIELDS.items()
}
"""What it must not have."""


def _check(block: Block, role: str, where: str) -> None:
    """Raise ``InvalidValue`` where a block lacks a field of its type, has one of another type, or
    stands in the wrong message."""
    others = _others_of[block.type](block)
    if None in _needed_of[block.type](block) or others.count(None) != len(others):
        raise _wrong_fields(block, where)
    if role not in _ROLES[block.type]:
        raise InvalidValue(
            f"{where} is a block of the type {block.type!r}, which is not allowed in a message of "
            f"the role {role!r}",
            "messages",
        )
    if block.type == "thinking" and _thought(block) is None:
        raise InvalidValue(
            f"{where}.signature is not that of the thinking in it; send the block as it came, or "
            "leave it out",
            "messages",
        )


def _thought(block: Block) -> str | None:
    return signed_thought(block.signature or "", block.thinking or "")


def _wrong_fields(block: Block, where: str) -> InvalidValue:
    needed, more = BLOCK_FIELDS[block.type]
    for name in needed:
        if getattr(block, name) is None:
            must = f"a block of the type {block.type!r} must have it"
            return InvalidValue(f"{where}.{name} is missing; {must}", "messages")
    known = (*needed, *more)
    extra = next(n for n in _ALL if n not in known and getattr(block, n) is not None)
    within = f"in a block of the type {block.type!r}"
    return InvalidValue(f"{where}.{extra} is not allowed {within}", "messages")


def _assistant(blocks: Iterable[Block]) -> Message:
    """What is thought and not said by this API's own words (``redacted_thinking``) is left out."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for block in blocks:
        match block:
            case Block(type="text", text=str(text)):
                texts.append(text)
            case Block(type="thinking"):
                thoughts.append(_thought(block) or "")
            case Block(type="tool_use", id=str(number), name=str(name), input=dict(arguments)):
                encoded = msgspec.json.encode(arguments).decode()
                function = CalledFunction(name=name, arguments=encoded)
                calls.append(ToolCall(id=number, function=function))
    return Message(
        role="assistant",
        content=_SEPARATOR.join(texts),
        reasoning_content=_SEPARATOR.join(filter(None, thoughts)) or None,
        tool_calls=calls or None,
    )


def _result(block: Block) -> str:
    """What a tool has given; templates have no other way to say that it failed."""
    content: str | list[ResultPart] = block.content or ""
    text = content if isinstance(content, str) else _SEPARATOR.join(map(_part, content))
    if block.is_error and not text.lower().startswith("error"):
        return f"Error: {text}"
    return text


def _part(part: ResultPart) -> str:
    if part.tool_name is not None:
        return f"The tool {part.tool_name} can be called now."
    return IMAGE if part.text is None else part.text
