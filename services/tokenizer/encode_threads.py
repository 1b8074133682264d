"""The threads in which prompts are rendered and encoded."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

from penstock.protocol.process.trace import ENCODE, THREADS, TRACE

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Play = Callable[[int], None]


class EncodeThreads:
    """A pool that serves tenants in turn and knows how long each thread has been at its job.

    A job cannot be interrupted, so a tenant whose jobs are slow would hold every thread at some
    time. It gets fewer than there are: whoever else comes finds a thread.

    Nor can a thread be ended from outside: a call into a library that does not come back keeps it
    for ever. ``oldest`` tells, so that the process can make room for another. The threads are
    daemons, because the interpreter waits for the threads of ``ThreadPoolExecutor`` at its end.
    """

    def __init__(self, count: int, most: int | None = None, first: int = 0) -> None:
        """
        Args:
            count: threads.
            most: how many of them one tenant may hold at a time; ``None``: all.
            first: the number of the first thread, where a process has several pools.
        """
        self._most = count if most is None else most
        self._waiting: OrderedDict[str, deque[_Play]] = OrderedDict()
        """Jobs by tenant; the tenant whose turn it is comes first."""
        self._running: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._began: dict[int, float] = {}
        """Thread number → monotonic time at which its job began."""
        for number in range(first, first + count):
            threading.Thread(
                target=self._run, args=(number,), name=f"encode {number}", daemon=True
            ).start()

    def submit(
        self, tenant: str, job: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> Future[_T]:
        """Run a job as soon as a thread is free for its tenant. A job that has not begun can be
        cancelled."""
        future: Future[_T] = Future()

        def play(number: int) -> None:
            if not future.set_running_or_notify_cancel():
                return
            self._began[number] = time.monotonic()
            began = time.monotonic_ns() if TRACE.on else 0
            try:
                result = job(*args, **kwargs)
            except BaseException as error:
                del self._began[number]
                future.set_exception(error)
            else:
                del self._began[number]
                if began:
                    TRACE.add(ENCODE, began, lane=THREADS + number)
                future.set_result(result)

        with self._changed:
            self._waiting.setdefault(tenant, deque()).append(play)
            self._changed.notify()
        return future

    def _run(self, number: int) -> None:
        while True:
            tenant, play = self._take()
            play(number)
            del play  # the job's data is not kept until the next one
            with self._changed:
                self._running[tenant] -= 1
                if not self._running[tenant]:
                    del self._running[tenant]
                if self._waiting:  # perhaps for what this tenant may hold again
                    self._changed.notify()

    def _take(self) -> tuple[str, _Play]:
        """The next job: of the first tenant in turn that holds fewer threads than it may."""
        with self._changed:
            while (tenant := self._next_tenant()) is None:
                self._changed.wait()
            jobs = self._waiting.pop(tenant)
            play = jobs.popleft()
            if jobs:
                self._waiting[tenant] = jobs
            self._running[tenant] += 1
            return tenant, play

    def _next_tenant(self) -> str | None:
        held = self._running
        return next((name for name in self._waiting if held[name] < self._most), None)

    def oldest(self, now: float) -> float:
        """Seconds that the longest running job has taken so far; 0 when all are idle."""
        return max((now - began for began in list(self._began.values())), default=0.0)
