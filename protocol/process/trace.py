"""What this process does when: a recorder that is off until an observer asks for it.

Off, a place that may record costs one check of ``TRACE.on``. On, an event is 32 bytes in a ring:
start and end (nanoseconds of the monotonic clock, which all processes of a host share), name, lane
and a number. The recorder ends by itself after the seconds that were asked for, ``MAX_SECONDS`` at
most; the ring then goes to the observer piece by piece, one a tick. A place that records reads

    began = time.monotonic_ns() if TRACE.on else 0
    ...
    if began:
        TRACE.add(PLAN, began, step)
"""

from __future__ import annotations

import itertools
import struct
import time

from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.membership import Trace, Traced

MAX_SECONDS = 60.0
RING_EVENTS = 1 << 18
PIECE_EVENTS = 1 << 15
"""A megabyte a tick."""
EVENT = struct.Struct("<qqHH4xq")
"""Start, end, name, lane, number."""
_pack_into = EVENT.pack_into
_SIZE = EVENT.size
_now = time.monotonic_ns

MAIN, DEVICE, THREADS = 0, 1, 2
"""Lanes: the process's loop; what its device does; the first of its other threads."""
(ACCEPT, ENCODE, APPLY, PLAN, SEND_PLAN, HAND_OUT, PREPARE, LAUNCH, WAIT, SEND_RESULT, STEP) = (
    range(11)
)
_OWN_NAMES = [
    "accept request", "encode", "apply result", "plan", "send plan", "hand out tokens", "prepare",
    "launch", "wait for the device", "send result", "step",
]  # fmt: skip
_MESSAGES: dict[type, int] = {
    kind: len(_OWN_NAMES) + number for number, kind in enumerate(Message.__args__)
}
NAMES = [*_OWN_NAMES, *(kind.__name__ for kind in _MESSAGES)]
"""Names by their numbers. The handling of a message has its type's name."""


class Recorder:
    """The events of one process. Threads may add; the rest is for the main thread."""

    def __init__(self) -> None:
        self.on = False
        self.observer = ""
        """Where the recording goes; empty: nobody asked, or all is sent."""
        self._ring: bytearray | None = None
        self._next = itertools.count().__next__
        """Counts the events."""
        self._until = 0.0
        self._pieces: list[Traced] = []

    def ask(self, message: Trace, now: float) -> Traced | None:
        """Begin to record. Returns a refusal when another observer was first."""
        if self.observer:
            return Traced([], b"", 0, False, "another recording is under way; try again later")
        self._ring = bytearray(RING_EVENTS * _SIZE)
        self._next = itertools.count().__next__
        self._until = now + min(message.seconds, MAX_SECONDS)
        self.observer = message.reply_to
        self.on = True
        return None

    def add(self, name: int, began: int, number: int = 0, lane: int = MAIN, ended: int = 0) -> None:
        """Record what began at ``began`` and ended at ``ended``, or now."""
        ring = self._ring
        if ring is not None:
            at = self._next() % RING_EVENTS * _SIZE  # atomic: threads never share a place
            _pack_into(ring, at, began, ended or _now(), name, lane, number)

    def add_message(self, message: Message, began: int) -> None:
        """Record the handling of a message."""
        self.add(_MESSAGES[type(message)], began)

    def next_piece(self, now: float) -> Traced | None:
        """Once the time is over: what the observer gets next; the last one ends the recording."""
        if now < self._until:
            return None
        if self.on:
            self._end()
        piece = self._pieces.pop(0)
        if not piece.more:
            self.drop()
        return piece

    def _end(self) -> None:
        """Stop, and cut the ring into pieces, oldest event first."""
        self.on = False
        ring, self._ring = self._ring, None
        if ring is None:
            return
        total = self._next()
        split = total % RING_EVENTS * _SIZE
        whole = bytes(ring[split:] + ring[:split]) if total > RING_EVENTS else bytes(ring[:split])
        step = PIECE_EVENTS * _SIZE
        parts = [whole[at : at + step] for at in range(0, len(whole), step)] or [b""]
        dropped = max(0, total - RING_EVENTS)
        last = len(parts) - 1
        self._pieces = [
            Traced(NAMES, part, dropped, number < last) for number, part in enumerate(parts)
        ]

    def drop(self) -> None:
        """Forget the recording: it is sent, or its observer has left."""
        self.on = False
        self.observer = ""
        self._ring = None
        self._pieces = []


TRACE = Recorder()
"""The recorder of this process."""
