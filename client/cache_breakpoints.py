"""Where the messages and tools of OpenAI's chats have ``cache_control``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.client.cache_control import Place, PromptCacheControl, cache_hints
from penstock.client.messages import PART_SEPARATOR, Message
from penstock.client.tools import ToolDeclaration
from penstock.protocol.wire.messages.cache_hints import CacheHints


def hints_of_chat(
    whole: PromptCacheControl | None,
    messages: Sequence[Message],
    tools: Sequence[ToolDeclaration] = (),
) -> CacheHints | None:
    """What a chat says of its prefixes. ``messages``: as they came, with content in parts. Raises
    ``InvalidValue``."""
    places = list(_places(messages))
    for tool in tools:
        for control in (tool.cache_control, tool.function.cache_control):
            if control is not None:
                places.append(Place(0, 0, control.seconds))
    return cache_hints(whole, behind_tools(places, messages), len(messages))


def behind_tools(places: Sequence[Place], messages: Sequence[Message]) -> Sequence[Place]:
    """The places, but none at the beginning of what the system says, or behind it but ahead of the
    tools: chat templates have these ahead of the first turn, before or behind the system's words.
    """
    if not places:
        return places
    system = ("system", "developer")
    roles = enumerate(one.role for one in messages)
    first = next((index for index, role in roles if role not in system), len(messages))
    return [p if p.characters or p.message > first else p._replace(message=first) for p in places]


def _places(messages: Sequence[Message]) -> Iterator[Place]:
    for index, message in enumerate(messages):
        if message.cache_control is not None:
            yield Place(index + 1, 0, message.cache_control.seconds)
        if not isinstance(message.content, list):
            continue
        length, last = -len(PART_SEPARATOR), len(message.content) - 1
        for number, part in enumerate(message.content):
            length += len(PART_SEPARATOR) + len(part.text)
            if part.cache_control is not None:
                seconds = part.cache_control.seconds
                inside = Place(index, length, seconds)
                yield Place(index + 1, 0, seconds) if number == last else inside
