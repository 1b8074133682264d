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
    for event in extras.events or ():
        size += FRAME_BYTES
        if isinstance(event, Pooled):
            size += 4 * len(event.values)
            continue
        parts.append(event.logprobs)
        if not isinstance(event, ToolCallOpened):
            size += len(event.text.encode())
    return size + sum(LOGPROB_BYTES * len(named.pieces) for named in parts if named is not None)


def prompt_bytes(details: RowDetails) -> int:
    """About what they bring once, of the prompt: no sign of a slow reader."""
    listed = 0 if details.prompt is None else LOGPROB_BYTES * len(details.prompt.pieces)
    return len(details.echo.encode()) + listed
