"""What a worker does while it has nothing to compute."""

from __future__ import annotations

from penstock.protocol.process.large_blocks import give_back_freed
from penstock.protocol.process.participant import Status
from penstock.protocol.process.plain_structlog import Logger
from penstock.services.worker.executor import Executor
from penstock.services.worker.executor_report import say_summary
from penstock.services.worker.step_limit import IMPROVE_LIMIT_SECONDS

IDLE_SECONDS = 0.5


class Pauses:
    """Between two plans. ``due`` is the number of the next one in all calls: a pause lasts while it
    stays the same."""

    def __init__(self, status: Status, log: Logger) -> None:
        self._status, self._log = status, log
        self._tidied_at = 0
        """The step that was due when a pause began, and …"""
        self._idle_since = 0.0
        """… when that was; 0: it was used already."""
        self._paused_since = 0.0
        self.improving = False
        """Whether the executor has more to do in this pause."""

    def begin(self, now: float) -> None:
        """There is an executor from now on."""
        self._idle_since = self._paused_since = now

    def tidy(self, executor: Executor | None, due: int, now: float, *, copying: bool) -> None:
        """Once in each pause, prepare for what comes seldom, and give back what steps have left
        behind: batches of all sizes cut the heap up, and it would stay as large as it ever was.

        ``copying``: KV blocks are copied, which is no pause: some of this holds the interpreter up
        for a second, and with it the threads that copy.
        """
        if due != self._tidied_at or (copying and self._idle_since):
            self._tidied_at, self._idle_since, self._paused_since = due, now, now
        elif self._idle_since and now - self._idle_since > IDLE_SECONDS:
            self._idle_since = 0.0
            if executor is not None:
                executor.prepare()
            give_back_freed()

    def improve(self, executor: Executor | None, due: int, now: float) -> None:
        """In a pause, a step's time for what may make later steps faster; between two such the
        inbox is looked at."""
        self.improving = False
        if executor is None or executor.in_flight or due != self._tidied_at:
            return
        summary = executor.summary
        self._status.begin(IMPROVE_LIMIT_SECONDS)
        self.improving = executor.improve(now, now - self._paused_since)
        self._status.done()
        if executor.summary != summary:
            say_summary(executor, self._log)
