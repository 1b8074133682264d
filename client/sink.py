"""Where the events of one request go."""

from __future__ import annotations

from typing import Protocol

import msgspec

from penstock.protocol.wire.messages.requests import Rejected
from penstock.protocol.wire.messages.tokens import (
    End,
    Event,
    Released,
    RowDetails,
    RowStart,
    TextBatch,
)


class RowExtras(msgspec.Struct, frozen=True, gc=False):
    """What a row brings beside plain text."""

    start: RowStart | None = None
    """Comes with the first row of a choice that ran."""
    end: End | None = None
    details: RowDetails | None = None
    """Comes where the request asks for logprobs or its prompt."""
    events: list[Event] | None = None
    """The events of a row that is more than one plain text; its text is empty then."""
    released: Released | None = None
    """With events: what has gone out on each channel, this row included."""
    ids: bytes = b""
    """The row's token ids as int32, for a sink that wants them."""
    prompt: bytes | None = None
    """The prompt's token ids as int32, for a sink that wants ids; with the choice's first ones."""


NO_EXTRAS = RowExtras()


class Sink(Protocol):
    """Where one request's events go. Called in order; never after its end.

    What a sink raises ends its own request with a 500 and concerns no other.
    """

    @property
    def wants_ids(self) -> bool:
        """Rows bring the ids of their tokens. Asked once, when the request is opened."""

    def on_accepted(self, prompt_tokens: int) -> None:
        """The request waits or runs in an engine. Called once, before any row."""

    def on_row(self, choice: int, text: str, tokens: int, extras: RowExtras | None = None) -> None:
        """One row: ``text`` may be empty; ``tokens`` counts new output tokens."""

    def on_continued(self) -> None:
        """It is started again elsewhere, after what has come so far: a process was lost that had
        it (a tokenizer, an engine, or a router that it waited at)."""

    def on_rejected(self, rejected: Rejected) -> None:
        """The whole request ends with this error, before or after ``on_accepted``."""


def row_extras(batch: TextBatch) -> dict[int, RowExtras] | None:
    """Row → its extras, for rows that have any; ``None``: all are plain text."""
    if not (batch.ends or batch.starts or batch.details or batch.events):
        return None
    starts = {one.row: one for one in batch.starts}
    ends = {one.row: one for one in batch.ends}
    details = {one.row: one for one in batch.details}
    events = {one.row: (one.events, one.released) for one in batch.events}
    return {
        row: RowExtras(
            starts.get(row), ends.get(row), details.get(row), *events.get(row, (None, None))
        )
        for row in starts.keys() | ends.keys() | details.keys() | events.keys()
    }
