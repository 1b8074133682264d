"""Stages that wait for the thread that exports them.

In place of the SDK's batch processor, whose queue takes ten times as long for a span. What it reads
of ``OTEL_BSP_…`` holds here too.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from penstock.protocol.process import logs
from penstock.protocol.process.stage import Stage


class Exporter(Protocol):
    """Sends stages."""

    def export(self, stages: Sequence[Stage]) -> None: ...

    def shutdown(self) -> None: ...


class StageQueue:
    """Holds ``most`` stages; where one more comes, the oldest is dropped, which a log line tells.

    They are exported ``batch`` at a time, as soon as there are so many, and every ``delay_s``
    seconds those that there are.
    """

    def __init__(self, exporter: Exporter, most: int, batch: int, delay_s: float) -> None:
        self._exporter, self._batch, self._delay_s = exporter, batch, delay_s
        self._waiting, self._most, self._dropped = deque[Stage](maxlen=most), most, 0
        self._wake, self._exporting = threading.Event(), threading.Lock()
        self._ends_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def add(self, stage: Stage) -> None:
        """Any thread may. It does not wait."""
        waiting = self._waiting
        if len(waiting) == self._most:
            self._dropped += 1
        waiting.append(stage)
        if len(waiting) >= self._batch and not self._wake.is_set():
            self._wake.set()

    def flush(self) -> None:
        """Export all that there is, in this thread, once what another thread sends is sent."""
        self._export()
        while self._waiting:
            self._export()

    def end(self, seconds: float) -> None:
        """Export what there is, and wait for it so long at most."""
        self._ends_at = time.monotonic() + seconds
        self._wake.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        while self._ends_at is None:
            is_due = not self._wake.wait(self._delay_s)
            self._wake.clear()  # before the look at what there is: what comes later sets it again
            while self._ends_at is None and (is_due or len(self._waiting) >= self._batch):
                is_due = False
                self._export()
        while self._waiting and time.monotonic() < self._ends_at:
            self._export()
        self._exporter.shutdown()

    def _export(self) -> None:
        with self._exporting:
            waiting, dropped, self._dropped = self._waiting, self._dropped, 0
            if dropped:
                logs.record("warning", "spans dropped", {"count": dropped, "queue": self._most})
            stages = [waiting.popleft() for _ in range(min(self._batch, len(waiting)))]
            if not stages:  # another thread was faster
                return
            try:
                self._exporter.export(stages)
            except Exception as error:
                logs.record("warning", "spans not exported", {"error": repr(error)})
