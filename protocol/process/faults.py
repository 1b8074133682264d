"""Faults on order, for tests: off unless ``--fault`` names them.

A fault is ``SERVICE:ACTION[=SECONDS]@POINT[=N]``. ``POINT`` is ``step`` (the worker's or the
scheduler's N-th step) or the name of a message (its N-th arrival); without N, every time. Or it is
``token=N``: each step of a worker that a sequence with token N in its prompt joins, poison.

| action | what happens |
| --- | --- |
| ``raise`` | an exception at that point |
| ``oom`` | a ``MemoryError`` at that point |
| ``sleep=S`` | the process blocks for S seconds |
| ``stop`` | the process stops itself with SIGSTOP |
| ``kill`` | the process kills itself with SIGKILL |
| ``drop`` | the message is lost |
| ``delay=S`` | the message arrives S seconds later |
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator

import msgspec

from penstock.protocol.wire.codec import Message

_SPEC = re.compile(
    r"(?P<service>\w+):(?P<action>raise|oom|sleep|stop|kill|drop|delay)"
    r"(=(?P<seconds>[0-9]+(\.[0-9]+)?))?@(?P<point>\w+)(=(?P<nth>[0-9]+))?"
)
_TIMED = frozenset({"sleep", "delay"})
_OF_MESSAGES = frozenset({"drop", "delay"})
_POINTS = frozenset({"step", "token"})
_MESSAGES = frozenset(kind.__name__ for kind in Message.__args__)


class FaultError(RuntimeError):
    """The exception that ``raise`` raises."""


class BadFault(ValueError):
    """A ``--fault`` that cannot be read."""


class _Fault(msgspec.Struct, frozen=True):
    action: str
    seconds: float
    point: str
    nth: int | None


def _read(spec: str) -> tuple[str, _Fault]:
    """(service, fault). Raises ``BadFault`` for what could never happen as well."""
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise BadFault(f"--fault {spec!r}: expected SERVICE:ACTION[=SECONDS]@POINT[=N]")
    action, point = match["action"], match["point"]
    if point not in _POINTS and point not in _MESSAGES:
        raise BadFault(f"--fault {spec!r}: {point} is neither step nor token nor a message's name")
    if action in _OF_MESSAGES and point in _POINTS:
        raise BadFault(f"--fault {spec!r}: only a message can {action}")
    if point == "token" and (match["service"] != "worker" or not match["nth"]):
        raise BadFault(f"--fault {spec!r}: only a worker meets a token, and it needs =N")
    if (action in _TIMED) != bool(match["seconds"]):
        needs = "needs" if action in _TIMED else "takes no"
        raise BadFault(f"--fault {spec!r}: {action} {needs} =SECONDS")
    nth = int(match["nth"]) if match["nth"] else None
    if nth == 0 and point != "token":
        raise BadFault(f"--fault {spec!r}: N counts from 1")
    return match["service"], _Fault(action, float(match["seconds"] or 0), point, nth)


class Faults:
    """The faults that one process plays."""

    def __init__(self, specs: list[str], service: str) -> None:
        self._faults: list[_Fault] = []
        self._seen: Counter[str] = Counter()
        self._delayed: list[tuple[float, int, Message]] = []
        for spec in specs:
            concerned, fault = _read(spec)
            if concerned == service:
                self._faults.append(fault)

    def __bool__(self) -> bool:
        return bool(self._faults)

    def at(self, point: str) -> None:
        """The process has reached ``point``: play what was ordered for it."""
        if not self._faults:
            return
        for fault in self._due(point):
            self._play(fault)

    def joined(self, prompt: bytes) -> None:
        """A sequence with a prompt of these int32 ids joins a step: play what was ordered for one
        of them."""
        for fault in self._faults:
            if fault.point == "token" and fault.nth in memoryview(prompt).cast("i"):
                self._play(fault)

    def _due(self, point: str) -> list[_Fault]:
        self._seen[point] += 1
        count = self._seen[point]
        return [f for f in self._faults if f.point == point and f.nth in (None, count)]

    def _play(self, fault: _Fault) -> None:
        match fault.action:
            case "raise":
                raise FaultError(f"fault on order at {fault.point}")
            case "oom":
                raise MemoryError(f"out of memory on order at {fault.point}")
            case "sleep":
                time.sleep(fault.seconds)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)

    def received(self, sender: int, message: Message) -> bool:
        """A message has arrived; ``False`` when it is dropped or comes later."""
        keep = True
        for fault in self._due(type(message).__name__):
            if fault.action == "drop":
                keep = False
            elif fault.action == "delay":
                self._delayed.append((time.monotonic() + fault.seconds, sender, message))
                keep = False
            else:
                self._play(fault)
        return keep

    def late(self) -> Iterator[tuple[int, Message]]:
        """Delayed messages whose time has come; whoever stops early gets the rest the next time."""
        now = time.monotonic()
        for entry in [entry for entry in self._delayed if entry[0] <= now]:
            self._delayed.remove(entry)
            yield entry[1:]
