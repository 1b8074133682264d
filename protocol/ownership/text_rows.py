"""Tokens of a choice become text, and texts become the columns of a ``TextBatch``."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import msgspec

from penstock.protocol.wire.messages.tokens import (
    End,
    EndReason,
    RowDetails,
    RowLogprobs,
    RowStart,
    TextBatch,
)


class Delta(Protocol):
    """What a stream makes of some tokens."""

    text: str
    used: int
    """How many of the tokens belong to the answer; the rest lie after a stop string."""
    stop: str | None
    """The stop string that was found."""


class Stream(Protocol):
    """The text of one choice: incremental decode and stop strings."""

    released: int
    """Characters released in all."""

    @property
    def stop(self) -> str | None:
        """The stop string that was found."""

    def push(self, tokens: memoryview, last_is_stop: bool) -> Delta:
        """Take int32 tokens; with ``last_is_stop`` the last one ends the choice unseen."""

    def finish(self) -> str:
        """The choice ended: release what was held back."""

    def replay(self, tokens: memoryview, released: int) -> str:
        """Rebuild the state after a continuation; returns the text after ``released``."""

    def details(
        self, row: int, first: bool, tokens: memoryview, found: RowLogprobs | None
    ) -> RowDetails | None:
        """What row ``row`` brings beside the text of these tokens, which were pushed last.

        first: nothing came of the choice before them.
        """


class Choice:
    """What has come of one choice: ``output`` holds its token ids as int32 bytes."""

    __slots__ = ("count", "detailed", "ended", "named", "output", "stream")

    def __init__(self, stream: Stream, detailed: bool = False, named: Collection[int] = ()) -> None:
        """detailed: its rows bring more than text. named: the client's ``stop_token_ids``; an end
        names no other token."""
        self.stream = stream
        self.named = named
        self.detailed = detailed
        self.output = bytearray()
        self.count = 0
        self.ended = False

    def push(self, tokens: memoryview, end: End | None) -> tuple[str, memoryview, End | None]:
        """The text of int32 tokens, those of them that count, and the end, if this is it.

        The first end in token order wins: the engine's, or a stop string before it.
        """
        stream = self.stream
        last_is_stop = (
            end is not None and end.reason == EndReason.STOP and isinstance(end.stop, int)
        )
        delta = stream.push(tokens, last_is_stop)
        if delta.stop is not None:
            return delta.text, tokens[: delta.used], End(0, EndReason.STOP, delta.stop)
        if end is None:
            return delta.text, tokens, None
        text = delta.text + stream.finish()
        if stream.stop is not None:  # what was held back completed a stop string
            end = End(0, EndReason.STOP, stream.stop)
        elif last_is_stop and end.stop not in self.named:
            end = msgspec.structs.replace(end, stop=None)
        return text, tokens, end


class TextRows:
    """Columns of one ``TextBatch`` in the making."""

    __slots__ = (
        "attempts", "choices", "counts", "details", "ends", "ids", "indices", "released",
        "starts", "texts", "tokens",
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

    def add(
        self,
        request_id: int,
        attempt: int,
        number: int,
        choice: Choice,
        tokens: memoryview,
        text: str,
        end: End | None,
        start: RowStart | None,
        logprobs: RowLogprobs | None,
    ) -> None:
        """Add a row, and note in ``choice`` what it has brought."""
        data = tokens.tobytes()
        if choice.detailed:
            first = choice.count == 0
            details = choice.stream.details(len(self.ids), first, tokens, logprobs)
            if details is not None:
                self.details.append(details)
        self.ids.append(request_id)
        self.choices.append(number)
        self.attempts.append(attempt)
        self.indices.append(choice.count)
        self.counts.append(len(tokens))
        self.tokens += data
        self.texts.append(text)
        self.released.append(choice.stream.released)
        choice.output += data
        choice.count += len(tokens)
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
        )
