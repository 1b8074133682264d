"""What has come of choices becomes the columns of a ``TextBatch``."""

from __future__ import annotations

import msgspec

from penstock.protocol.ownership.choice import Choice
from penstock.protocol.ownership.guard import TokenExtras
from penstock.protocol.wire.messages.tokens import (
    Content,
    End,
    EndReason,
    Event,
    Released,
    RowDetails,
    RowEvents,
    RowStart,
    TextBatch,
    TokenBatch,
)


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
        choice.received = choice.count + choice.held
        start = more.start
        if start is not None:
            self.starts.append(msgspec.structs.replace(start, row=len(self.ids) - 1, max_tokens=0))
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
