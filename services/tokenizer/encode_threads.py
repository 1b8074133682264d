"""The threads in which prompts are rendered and encoded."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

from penstock.protocol.trace import ENCODE, THREADS, TRACE

_P = ParamSpec("_P")
_T = TypeVar("_T")


class EncodeThreads:
    """A pool that knows how long each thread has been at its job.

    A thread cannot be ended from outside: a call into a library that does not come back keeps it
    for ever. ``oldest`` tells, so that the process can make room for another. The threads are
    daemons, because the interpreter waits for the threads of ``ThreadPoolExecutor`` at its end.
    """

    def __init__(self, count: int, first: int = 0) -> None:
        """``first``: the number of the first thread, where a process has several pools."""
        self._jobs: queue.SimpleQueue[Callable[[int], None]] = queue.SimpleQueue()
        self._began: dict[int, float] = {}
        """Thread number → monotonic time at which its job began."""
        for number in range(first, first + count):
            threading.Thread(
                target=self._run, args=(number,), name=f"encode {number}", daemon=True
            ).start()

    def submit(self, job: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Run a job as soon as a thread is free. A job that has not begun can be cancelled."""
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

        self._jobs.put(play)
        return future

    def _run(self, number: int) -> None:
        while True:
            play = self._jobs.get()
            play(number)
            del play  # the job's data is not kept until the next one

    def oldest(self, now: float) -> float:
        """Seconds that the longest running job has taken so far; 0 when all are idle."""
        return max((now - began for began in list(self._began.values())), default=0.0)
