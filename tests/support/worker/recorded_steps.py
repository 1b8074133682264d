"""What a worker records of its steps for timelines, while somebody observes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.protocol.process.trace import EVENT, TRACE
from penstock.protocol.wire.messages.membership import Trace


@contextmanager
def recording() -> Iterator[None]:
    TRACE.ask(Trace("ipc:///o", 1.0), 0.0)
    try:
        yield
    finally:
        TRACE.drop()


def recorded() -> list[tuple[int, ...]]:
    """Start, end, name, lane and step of each event so far; ends the recording."""
    found = []
    while TRACE.observer:
        piece = TRACE.next_piece(2.0)
        assert piece is not None
        found += list(EVENT.iter_unpack(piece.events))
    return found
