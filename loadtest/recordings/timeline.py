"""The recordings of all processes as one timeline: decoded, written for Perfetto, summed up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import msgspec

from penstock.protocol.process.trace import DEVICE, EVENT, MAIN, THREADS
from penstock.protocol.wire.messages.membership import Peer

IDLE_NS = 50_000_000
"""A pause between steps that is longer counts as idle: nobody asked for anything."""
STEP_NAME = "step"


class Span(NamedTuple):
    """What a process did; nanoseconds of its host's monotonic clock."""

    start: int
    end: int
    name: str
    lane: int
    number: int


class Recording(msgspec.Struct):
    """What one process has sent so far."""

    peer: Peer
    spans: list[Span] = []
    dropped: int = 0
    whole: bool = False
    refused: str = ""

    @property
    def label(self) -> str:
        """``worker 0`` for engine 0, else the service; with the process id."""
        identity = self.peer.identity
        engine = f" {identity.engine}" if identity.engine else ""
        return f"{self.peer.service}{engine} (pid {identity.pid})"


def decoded(names: Sequence[str], events: bytes) -> Iterator[Span]:
    """Raises ``ValueError`` for bytes that are no events of these names."""
    if len(events) % EVENT.size:
        raise ValueError(f"{len(events)} bytes are no whole number of events")
    for start, end, name, lane, number in EVENT.iter_unpack(events):
        if not 0 <= name < len(names):
            raise ValueError(f"an event has the name {name} of {len(names)}")
        yield Span(start, end, names[name], lane, number)


def lane_name(lane: int) -> str:
    return {MAIN: "loop", DEVICE: "device"}.get(lane, f"thread {lane - THREADS}")


def chrome_trace(recordings: Sequence[Recording]) -> dict[str, Any]:
    """The Trace Event Format that Perfetto and chrome://tracing read; times in µs from the first
    event on."""
    began = min((span.start for each in recordings for span in each.spans), default=0)
    events: list[dict[str, Any]] = []
    for number, recording in enumerate(recordings, 1):
        events.append(_name("process_name", number, 0, recording.label))
        for lane in sorted({span.lane for span in recording.spans}):
            events.append(_name("thread_name", number, lane, lane_name(lane)))
        events += [
            {
                "ph": "X",
                "name": span.name,
                "pid": number,
                "tid": span.lane,
                "ts": (span.start - began) / 1000,
                "dur": (span.end - span.start) / 1000,
                "args": {"number": span.number if abs(span.number) < 2**53 else str(span.number)},
            }
            for span in sorted(recording.spans, key=lambda span: (span.start, -span.end))
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _name(kind: str, process: int, lane: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": lane, "args": {"name": text}}


def step_shares(recordings: Sequence[Recording]) -> list[dict[str, Any]]:
    """For each worker with steps: how long they and the pauses between them took."""
    rows = []
    for recording in recordings:
        steps = sorted(span for span in recording.spans if span.lane == DEVICE)
        if len(steps) < 2:
            continue
        pauses = [later.start - step.end for step, later in pairwise(steps)]
        short = sorted(pause for pause in pauses if pause <= IDLE_NS)
        busy = sum(step.end - step.start for step in steps)
        rows.append(
            {
                "process": recording.label,
                "steps": len(steps),
                "step_us": median(step.end - step.start for step in steps) / 1e3,
                "pause_us": median(short) / 1e3 if short else None,
                "pause_p99_us": short[len(short) * 99 // 100] / 1e3 if short else None,
                "between_percent": 100 * sum(short) / max(1, busy + sum(short)),
                "idle_s": (sum(pauses) - sum(short)) / 1e9,
            }
        )
    return rows


def span_shares(recordings: Sequence[Recording], seconds: float) -> list[dict[str, Any]]:
    """For each process and name: how many, and which share of the time; parts count in their
    whole as well. seconds: that were asked for; a recording ends a moment later."""
    rows = []
    for recording in recordings:
        if not recording.spans:
            continue
        first = min(span.start for span in recording.spans)
        whole = max(seconds * 1e9, max(span.end for span in recording.spans) - first)
        lengths: dict[tuple[int, str], list[int]] = defaultdict(list)
        for span in recording.spans:
            lengths[span.lane, span.name].append(span.end - span.start)
        for (lane, name), found in sorted(lengths.items()):
            rows.append(
                {
                    "process": recording.label,
                    "lane": lane_name(lane),
                    "name": name,
                    "count": len(found),
                    "median_us": median(found) / 1e3,
                    "percent": 100 * sum(found) / whole,
                }
            )
    return rows
