"""Where a conversation of Anthropic's API has ``cache_control``, in the messages made of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from penstock.client.cache_breakpoints import behind_tools
from penstock.client.cache_control import Place, cache_hints
from penstock.client.messages import Message
from penstock.protocol.wire.messages.cache_hints import MAX_BREAKPOINTS, CacheHints
from penstock.services.frontend.bodies.anthropic import Block, ConversationBody, InputMessage
from penstock.services.frontend.dialects.anthropic.conversation import merged, system_text


class _Mark(NamedTuple):
    """On a block of a message, each by its number."""

    message: int
    block: int
    seconds: int


def hints_of(body: ConversationBody, messages: Sequence[Message]) -> CacheHints | None:
    """What a body says of its prefixes. ``messages``: the whole conversation. Raises
    ``InvalidValue``."""
    marks = list(_marks(body.messages))
    places = [Place(0, 0, one.seconds) for tool in body.tools or () if (one := tool.cache_control)]
    places += _of_system(body)
    if len(marks) + len(places) > MAX_BREAKPOINTS:  # which is told below
        return cache_hints(body.cache_control, [*places, *(Place(*mark) for mark in marks)])
    last_of = {mark.seconds: mark for mark in marks}
    found = {mark: _place(body, mark, messages) for mark in last_of.values()}
    places += [found.get(mark, Place(0, 0, mark.seconds)) for mark in marks]
    return cache_hints(body.cache_control, behind_tools(places, messages), len(messages))


def _of_system(body: ConversationBody) -> Iterator[Place]:
    if not isinstance(body.system, list):
        return
    whole = system_text(body.system)
    for number, block in enumerate(body.system, 1):
        if block.cache_control is not None:
            text = system_text(body.system[:number])
            inside = 0 if len(text) == len(whole) else len(text)
            yield Place(0, inside, block.cache_control.seconds)


def _marks(messages: Sequence[InputMessage]) -> Iterator[_Mark]:
    for index, message in enumerate(messages):
        if isinstance(message.content, str):
            continue
        for number, block in enumerate(message.content):
            if block.cache_control is not None:
                yield _Mark(index, number, block.cache_control.seconds)
            if isinstance(block.content, list):
                for part in block.content:
                    if part.cache_control is not None:
                        yield _Mark(index, number, part.cache_control.seconds)


def _place(body: ConversationBody, mark: _Mark, messages: Sequence[Message]) -> Place:
    """Where a block ends: the conversation up to there is made, as the whole one was."""
    marked = body.messages[mark.message]
    blocks: list[Block] = marked.content if isinstance(marked.content, list) else []
    if mark.message + 1 == len(body.messages) and mark.block + 1 == len(blocks):
        return Place(len(messages), 0, mark.seconds)
    cut = msgspec.structs.replace(marked, content=blocks[: mark.block + 1])
    before = merged(body.system, [*body.messages[: mark.message], cut])
    if not before:
        return Place(0, 0, mark.seconds)
    index, last = len(before) - 1, before[-1]
    length = len(last.content or "")
    if index < len(messages) and length == len(messages[index].content or ""):
        calls = len(last.tool_calls or ()), len(messages[index].tool_calls or ())
        if calls[0] == calls[1]:
            return Place(index + 1, 0, mark.seconds)
    return Place(index, length, mark.seconds)
