"""Tokens of a choice become events, and events become the columns of a ``TextBatch``."""

from __future__ import annotations

from collections.abc import Collection
from copy import copy
from typing import Protocol

import msgspec

from penstock.protocol.wire.messages.tokens import (
    Content,
    End,
    EndReason,
    Event,
    Reasoning,
    Released,
    RowDetails,
    RowEvents,
    RowLogprobs,
    RowStart,
    Text,
    TextBatch,
    TokenBatch,
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

    def finish(self) -> Content:
        """The choice ended: release what was held back."""

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
    """What of ``content``, all that a choice has brought, lies after ``released``.

    A part of an event has no logprobs: its tokens had theirs in another row. One that lies wholly
    after it keeps its own.
    """
    if isinstance(content, str):
        return content[released.text :]
    skip, left = copy(released), list[Event]()
    for event in content:
        match event:
            case Text():
                rest, skip.text = _cut(event, skip.text, bool(left))
            case Reasoning():
                rest, skip.reasoning = _cut(event, skip.reasoning, bool(left))
            case ToolArguments():
                rest, skip.arguments = _cut(event, skip.arguments, bool(left))
            case ToolCallOpened() if skip.calls:
                rest, skip.calls = None, skip.calls - 1
            case _:
                rest = event
        left += [rest] if rest is not None else []
    return left


def _cut(
    event: Text | Reasoning | ToolArguments, skip: int, behind: bool
) -> tuple[Event | None, int]:
    """What of an event lies after ``skip`` characters, if anything, and how many remain to be
    skipped. behind: something before it is unreleased, so it is as well, even if it is empty."""
    if not skip and (event.text or behind):
        return event, 0
    rest = event.text[skip:]
    left = msgspec.structs.replace(event, text=rest, logprobs=None) if rest else None
    return left, max(0, skip - len(event.text))


class Choice:
    """What has come of one choice: ``output`` holds its token ids as int32 bytes."""

    __slots__ = (
        "_released",
        "count",
        "detailed",
        "ended",
        "named",
        "output",
        "released_text",
        "stream",
    )

    def __init__(self, stream: Stream, detailed: bool = False, named: Collection[int] = ()) -> None:
        """detailed: its rows bring more than text. named: the client's ``stop_token_ids``; an end
        names no other token."""
        self.stream = stream
        self.named = named
        self.detailed = detailed
        self.output = bytearray()
        self.released_text = 0
        self._released = Released()
        """But for ``text``: ``released_text`` is newer."""
        self.count = 0
        self.ended = False

    def replay(self, tokens: memoryview, released: Released) -> Content:
        """Go on after a choice that another tokenizer began, from its int32 ids and what has gone
        out of it. Returns what lies after that; usually empty."""
        self.output += tokens.tobytes()
        self.count = len(tokens)
        self._released, self.released_text = released, released.text
        return unreleased(self.stream.replay(tokens), released)

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

        The first end in token order wins: the engine's, or a stop string before it.
        """
        stream = self.stream
        last_is_stop = (
            end is not None and end.reason == EndReason.STOP and isinstance(end.stop, int)
        )
        delta = stream.push(tokens, last_is_stop)
        content = delta.content
        if delta.stop is not None:
            tokens, end = tokens[: delta.used], End(0, EndReason.STOP, delta.stop)
        elif end is None:
            return content, tokens, None
        else:
            content = joined(content, stream.finish())
            if stream.stop is not None:  # what was held back completed a stop string
                end = End(0, EndReason.STOP, stream.stop)
            elif last_is_stop and end.stop not in self.named:
                end = msgspec.structs.replace(end, stop=None)
        if thought := stream.reasoning_tokens:
            end = msgspec.structs.replace(end, reasoning_tokens=thought)
        return content, tokens, end


class TokenExtras(msgspec.Struct, frozen=True, gc=False):
    """What a row of a ``TokenBatch`` brings beside tokens."""

    start: RowStart | None = None
    end: End | None = None
    logprobs: RowLogprobs | None = None
    pooled: bytes | None = None


NO_EXTRAS = TokenExtras()


def token_extras(batch: TokenBatch) -> dict[int, TokenExtras] | None:
    """Row → its extras, for rows that have any; ``None``: all are tokens alone."""
    if not (batch.starts or batch.ends or batch.logprobs or batch.pooled):
        return None
    starts = {one.row: one for one in batch.starts}
    ends = {one.row: one for one in batch.ends}
    logprobs = {one.row: one for one in batch.logprobs}
    pooled = {one.row: one.values for one in batch.pooled}
    return {
        row: TokenExtras(starts.get(row), ends.get(row), logprobs.get(row), pooled.get(row))
        for row in starts.keys() | ends.keys() | logprobs.keys() | pooled.keys()
    }


class TextRows:
    """Columns of one ``TextBatch`` in the making."""

    __slots__ = (
        "attempts", "choices", "counts", "details", "ends", "events", "ids", "indices",
        "released", "starts", "texts", "tokens",
    )  # fmt: skip

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.choices: list[int] = []
        self.attempts: list[int] = []
        self.indices: list[int] = []
        self.counts: list[int] = []
        self.tokens = bytearray()
        self.texts: list[str] = []
        self.released: list[int] = []
        self.ends: list[End] = []
        self.starts: list[RowStart] = []
        self.details: list[RowDetails] = []
        self.events: list[RowEvents] = []

    def add(
        self,
        request_id: int,
        attempt: int,
        number: int,
        choice: Choice,
        tokens: memoryview,
        content: Content,
        end: End | None,
        more: TokenExtras,
    ) -> None:
        """Add a row, and note in ``choice`` what it has brought."""
        data = tokens.tobytes()
        if choice.detailed:
            first = choice.count == 0
            details = choice.stream.details(len(self.ids), first, tokens, more.logprobs)
            if details is not None:
                self.details.append(details)
        self.ids.append(request_id)
        self.choices.append(number)
        self.attempts.append(attempt)
        self.indices.append(choice.count)
        self.counts.append(len(tokens))
        self.tokens += data
        if isinstance(content, str):
            choice.released_text += len(content)
            self.texts.append(content)
        else:
            self.texts.append("")
            self.events.append(RowEvents(len(self.ids) - 1, content, choice.release(content)))
        self.released.append(choice.released_text)
        choice.output += data
        choice.count += len(tokens)
        start = more.start
        if start is not None:
            self.starts.append(RowStart(len(self.ids) - 1, start.cached, start.queued_s))
        if end is not None:
            self.ends.append(msgspec.structs.replace(end, row=len(self.ids) - 1))
            choice.ended = True

    def batch(self) -> TextBatch:
        return TextBatch(
            self.ids,
            self.choices,
            self.attempts,
            self.indices,
            self.counts,
            bytes(self.tokens),
            self.texts,
            self.released,
            self.ends,
            self.starts,
            self.details,
            self.events,
        )


def whole_answer(request_id: int, attempt: int, event: Event) -> TextBatch:
    """An answer that is one event and takes no token."""
    ends, rows = [End(0, EndReason.STOP)], [RowEvents(0, [event], Released())]
    return TextBatch([request_id], [0], [attempt], [0], [0], b"", [""], [0], ends, events=rows)
