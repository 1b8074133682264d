"""How far the reader of a stream may fall behind before it is given up."""

from __future__ import annotations

from penstock.client.sink import RowExtras
from penstock.protocol.logprobs import NamedLogprobs
from penstock.protocol.wire.messages.tokens import Pooled, RowDetails, ToolCallOpened

MIN_BYTES = 256 * 1024
STEPS = 32
"""Steps of an answer that may wait, where they take more than ``MIN_BYTES``."""
FRAME_BYTES = 320
"""About one event without logprobs, its token's text included."""
LOGPROB_BYTES = 100
"""About one token's name, bytes and logprob, as JSON."""
ID_BYTES = 2
"""About what a byte of an int32 id takes as JSON: a number of six digits and its comma are 7."""


class Share:
    """What one of several writers has waiting on a connection: never less than it really is, and
    no more than that and what waited beside it when it last wrote."""

    __slots__ = ("most",)

    def __init__(self) -> None:
        self.most = 0
        """Who writes while nothing waits sets it to what it has written."""

    def add(self, size: int, waits: int) -> None:
        """It writes so many bytes, while ``waits`` of all writers wait."""
        self.most = min(self.most, waits) + size

    def of(self, waits: int) -> int:
        """Its bytes among those of all writers that wait, at most."""
        return min(self.most, waits)


def backlog_limit(choices: int, logprobs: int | None) -> int:
    """Bytes that may wait for the reader of a request with so many choices in all, each of whose
    tokens is rendered with ``logprobs`` others beside it (``None``: without logprobs)."""
    listed = 0 if logprobs is None else 1 + logprobs
    return max(MIN_BYTES, STEPS * choices * (FRAME_BYTES + listed * LOGPROB_BYTES))


def rendered_bytes(text: str, extras: RowExtras) -> int:
    """About what a row takes as JSON."""
    details = extras.details or RowDetails(0, None)
    parts: list[NamedLogprobs | None] = [details.tokens, details.prompt]
    size = len(text.encode()) + len(details.echo.encode())
    size += ID_BYTES * (len(extras.ids) + len(extras.prompt or b""))
    for event in extras.events or ():
        size += FRAME_BYTES
        if isinstance(event, Pooled):
            size += 4 * len(event.values)
            continue
        if not isinstance(event, ToolCallOpened):
            size += len(event.text.encode())
    return size + sum(LOGPROB_BYTES * len(named.pieces) for named in parts if named is not None)


def prompt_bytes(extras: RowExtras) -> int:
    """About what a row brings once, of the prompt: no sign of a slow reader."""
    ids, details = ID_BYTES * len(extras.prompt or b""), extras.details
    if details is None:
        return ids
    listed = 0 if details.prompt is None else LOGPROB_BYTES * len(details.prompt.pieces)
    return len(details.echo.encode()) + listed + ids
