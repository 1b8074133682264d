"""A choice of a request in its tokenizer: what its tokens bring, and what has gone out of that."""

from __future__ import annotations

from collections.abc import Collection
from copy import copy
from typing import Protocol

import msgspec

from penstock.protocol.ownership.guard import Guard
from penstock.protocol.wire.messages.requests import ChoiceState
from penstock.protocol.wire.messages.tokens import (
    Content,
    End,
    EndReason,
    Event,
    Reasoning,
    Released,
    RowDetails,
    RowLogprobs,
    Text,
    ToolArguments,
    ToolCallOpened,
)


class Delta(msgspec.Struct, gc=False):
    """What some tokens of a choice brought."""

    content: Content
    """Released; empty while a character or a possible stop string is unfinished."""
    used: int
    """How many of the tokens belong to the answer: those after the one that completed the stop
    string are dropped and count in no usage."""
    stop: str | None
    """The stop string that ended the choice."""
    over: bool = False
    """The choice ends here without one: it may have no more of what came."""


class Stream(Protocol):
    """The content of one choice: incremental decode, stop strings, parsers."""

    @property
    def stop(self) -> str | None:
        """The stop string that was found."""

    @property
    def reasoning_tokens(self) -> int:
        """How many tokens were thinking."""

    def push(self, tokens: memoryview, last_is_stop: bool) -> Delta:
        """Take int32 tokens; with ``last_is_stop`` the last one ends the choice unseen."""

    def finish(self, *, complete: bool = False) -> Content:
        """The choice ended: release what was held back. complete: the model has ended it, so that
        what it has begun is closed."""

    def replay(self, tokens: memoryview) -> Content:
        """Rebuild the state after a continuation; returns all that these tokens brought."""

    def pooled(self, values: bytes) -> Event:
        """What the request's task has made of its prompt."""

    def details(
        self, row: int, first: bool, tokens: memoryview, found: RowLogprobs | None
    ) -> RowDetails | None:
        """What row ``row`` brings beside the content of these tokens, which were pushed last.

        first: nothing came of the choice before them.
        """


def joined(first: Content, second: Content) -> Content:
    """One after the other."""
    if isinstance(first, str) and isinstance(second, str):
        return first + second
    return [*_listed(first), *_listed(second)]


def _listed(content: Content) -> list[Event]:
    if isinstance(content, str):
        return [Text(content)] if content else []
    return content


def unreleased(content: Content, released: Released) -> Content:
    """What of ``content``, all that a choice has brought, lies after ``released``."""
    if isinstance(content, str):
        return content[released.text :]
    skip, left = copy(released), list[Event]()
    for event in content:
        match event:
            case Text():
                rest, skip.text = _cut(event, skip.text)
            case Reasoning():
                rest, skip.reasoning = _cut(event, skip.reasoning)
            case ToolArguments():
                rest, skip.arguments = _cut(event, skip.arguments)
            case ToolCallOpened() if skip.calls:
                rest, skip.calls = None, skip.calls - 1
            case _:
                rest = event
        left += [rest] if rest is not None else []
    return left


def _cut(event: Text | Reasoning | ToolArguments, skip: int) -> tuple[Event | None, int]:
    """What of an event lies after ``skip`` characters, if anything, and how many remain to be
    skipped."""
    rest = event.text[skip:]
    left = msgspec.structs.replace(event, text=rest) if rest else None
    return left, max(0, skip - len(event.text))


class Choice:
    """What has come of one choice: ``output`` holds its token ids as int32 bytes."""

    __slots__ = (
        "_released",
        "count",
        "detailed",
        "ended",
        "guard",
        "named",
        "output",
        "received",
        "released_text",
        "stream",
    )

    def __init__(
        self,
        stream: Stream,
        detailed: bool = False,
        named: Collection[int] = (),
        guard: Guard | None = None,
    ) -> None:
        """detailed: its rows bring more than text. named: the client's ``stop_token_ids``; an end
        names no other token. guard: may hold its tokens back."""
        self.stream = stream
        self.guard = guard
        self.named = named
        self.detailed = detailed
        self.output = bytearray()
        self.released_text = 0
        self._released = Released()
        """But for ``text``: ``released_text`` is newer."""
        self.count = 0
        self.received = 0
        """Tokens that have come from engines and stand: more than ``count`` while some are held
        back."""
        self.ended = False

    def replay(self, tokens: memoryview, released: Released) -> Content:
        """Go on after a choice that another tokenizer began, from its int32 ids and what has gone
        out of it. Returns what lies after that; usually empty."""
        self.output += tokens.tobytes()
        self.count = self.received = len(tokens)
        if self.guard is not None:
            self.guard.replay(tokens, released.redraws)
        self._released, self.released_text = released, released.text
        return unreleased(self.stream.replay(tokens), released)

    @property
    def held(self) -> int:
        """Tokens that are held back."""
        return 0 if self.guard is None else self.guard.held

    def state(self, number: int) -> ChoiceState:
        """What an engine needs to go on with it, as choice ``number``."""
        guard = self.guard
        if guard is None:
            return ChoiceState(number, bytes(self.output), self.released)
        return ChoiceState(number, guard.drawn(), self.released, guard.sampling())

    def redrawn(self, content: Content) -> Content:
        """The content of a row, as one that tells of redraws where it is the first behind them."""
        guard = self.guard
        if guard is None or guard.redraws == self._released.redraws:
            return content
        self._released = msgspec.structs.replace(self._released, redraws=guard.redraws)
        return _listed(content)

    @property
    def released(self) -> Released:
        """What has gone out of it."""
        return msgspec.structs.replace(self._released, text=self.released_text)

    def release(self, events: list[Event]) -> Released:
        """Count what goes out now. Returns the counts."""
        released = self.released
        released.add(events)
        self._released, self.released_text = released, released.text
        return released

    def push(self, tokens: memoryview, end: End | None) -> tuple[Content, memoryview, End | None]:
        """The content of int32 tokens, those of them that count, and the end, if this is it.

        The first end in token order wins: the engine's, or what ends it in its content before that.
        """
        stream = self.stream
        last_is_stop = (
            end is not None and end.reason == EndReason.STOP and isinstance(end.stop, int)
        )
        delta = stream.push(tokens, last_is_stop)
        content = delta.content
        if delta.stop is not None or delta.over:
            tokens, end = tokens[: delta.used], End(0, EndReason.STOP, delta.stop)
        elif end is None:
            return content, tokens, None
        else:
            content = joined(content, stream.finish(complete=end.reason == EndReason.STOP))
            if stream.stop is not None:  # what was held back completed a stop string
                end = End(0, EndReason.STOP, stream.stop)
            elif last_is_stop and end.stop not in self.named:
                end = msgspec.structs.replace(end, stop=None)
        if thought := stream.reasoning_tokens:
            end = msgspec.structs.replace(end, reasoning_tokens=thought)
        return content, tokens, end
