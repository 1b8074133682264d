"""The events of one push, neighbours of one kind merged."""

from __future__ import annotations

from penstock.protocol.wire.messages.tokens import (
    Content,
    Event,
    Reasoning,
    Text,
    ToolArguments,
    ToolCallOpened,
)


class Collected:
    """Gathers what a push releases. Each piece is taken once, whatever comes after it."""

    __slots__ = ("_events", "_index", "_kind", "_pieces")

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._pieces: list[str] = []
        """Of the event that grows."""
        self._kind: type[Text] | type[Reasoning] | type[ToolArguments] = Text
        self._index = 0

    def text(self, text: str) -> None:
        if text:
            if self._kind is not Text:
                self._close(Text)
            self._pieces.append(text)

    def reasoning(self, text: str) -> None:
        if text:
            if self._kind is not Reasoning:
                self._close(Reasoning)
            self._pieces.append(text)

    def arguments(self, index: int, text: str) -> None:
        if text:
            if self._kind is not ToolArguments or self._index != index:
                self._close(ToolArguments)
                self._index = index
            self._pieces.append(text)

    def opened(self, index: int, call_id: str, name: str) -> None:
        self._close(Text)
        self._events.append(ToolCallOpened(index, call_id, name))

    def take(self) -> Content:
        """All of it, a string if it is content alone. Nothing is left."""
        if self._kind is Text and not self._events:
            text = "".join(self._pieces)
            self._pieces.clear()
            return text
        self._close(Text)
        events, self._events = self._events, []
        return events

    def _close(self, then: type[Text] | type[Reasoning] | type[ToolArguments]) -> None:
        if self._pieces:
            text = "".join(self._pieces)
            self._pieces.clear()
            if self._kind is ToolArguments:
                self._events.append(ToolArguments(self._index, text))
            elif self._kind is Reasoning:
                self._events.append(Reasoning(text))
            else:
                self._events.append(Text(text))
        self._kind = then
