"""Sends the requests at their times, within the concurrency limit, and records what came back."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from penstock.loadtest.answer_stream import AnswerStream, Failure
from penstock.loadtest.connection import ConnectFailed, ConnectionGone, ConnectionPool
from penstock.loadtest.http_response import BadResponse


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One finished request. Times are seconds from the start of the run."""

    index: int
    scheduled: float
    """When it should have been sent: its arrival or, in a closed loop, the end of another."""
    started: float
    """When it was sent, or began to connect."""
    stamps: array[float]
    """When each chunk with content came."""
    last: float
    """When the last chunk came."""
    ended: float
    """When the response was over."""
    prompt_tokens: int | None
    """From ``usage``; ``None``: the server sent none."""
    completion_tokens: int | None
    failure: Failure | None
    text: str

    @property
    def first(self) -> float:
        """When the first content came.

        An answer without any visible text (one token that is half a character) has only its end.
        """
        return self.stamps[0] if self.stamps else self.last

    @property
    def output_len(self) -> int:
        """Tokens of the answer; without ``usage``, its chunks."""
        return len(self.stamps) if self.completion_tokens is None else self.completion_tokens


class Slots:
    """The places of a closed loop. Knows since when the place that it hands out was free."""

    def __init__(self, count: int, now: float) -> None:
        self._free = deque([now] * count)
        self._waiter: asyncio.Future[None] | None = None

    async def take(self) -> float:
        """Wait for a place (one waiter at a time); returns the time when it became free."""
        if not self._free:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._free.popleft()

    def give_back(self, now: float) -> None:
        self._free.append(now)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Load:
    """One run. ``outcomes``, ``failed`` and ``running`` may be read while it goes on."""

    def __init__(
        self,
        pool: ConnectionPool,
        make_request: Callable[[int], bytes],
        arrivals: Sequence[float],
        *,
        max_concurrency: int | None,
        timeout: float,
        keep_text: bool = False,
    ) -> None:
        """``make_request(i)`` gives the bytes of request i, sent ``arrivals[i]`` s after the start.

        With arrivals that are all 0 and ``max_concurrency`` it is a closed loop: each end lets the
        next one start. ``timeout`` is in seconds, for each request.
        """
        self._pool = pool
        self._make_request = make_request
        self._arrivals = arrivals
        self._limit = min(max_concurrency or len(arrivals), len(arrivals))
        self._timeout = timeout
        self._keep_text = keep_text
        self._began = 0.0
        self.outcomes: list[Outcome] = []
        self.failed = 0
        self.running: dict[int, AnswerStream] = {}
        self.duration = 0.0
        """Seconds from the start to the end of the last response."""

    @property
    def planned(self) -> int:
        return len(self._arrivals)

    def elapsed(self) -> float:
        return time.perf_counter() - self._began

    async def run(self) -> None:
        """Send all; returns when all have ended. Cancelled, it ends the open ones uncounted."""
        self._began = time.perf_counter()
        slots = Slots(self._limit, 0.0)
        try:
            async with asyncio.TaskGroup() as group:
                for index, arrival in enumerate(self._arrivals):
                    while (wait := arrival - self.elapsed()) > 0:
                        await asyncio.sleep(wait)  # uvloop rounds to 1 ms, up or down
                    free_since = await slots.take()
                    group.create_task(self._one(index, arrival or free_since, slots))
        finally:
            self.duration = max((o.ended for o in self.outcomes), default=self.elapsed())
            self._pool.close()

    async def _one(self, index: int, scheduled: float, slots: Slots) -> None:
        stream = AnswerStream(keep_text=self._keep_text)
        request = self._make_request(index)
        self.running[index] = stream
        started = self.elapsed()
        failure: Failure | None = None
        try:
            async with asyncio.timeout(self._timeout):
                await self._pool.request(request, stream)
            failure = stream.close()
        except TimeoutError:
            failure = Failure("timeout", f"not over within {self._timeout:g} s (--request-timeout)")
        except ConnectFailed as error:
            failure = Failure("connect", str(error))
        except ConnectionGone as error:
            failure = stream.failure or Failure("connection lost", str(error))
        except BadResponse as error:
            failure = Failure("malformed", str(error))
        finally:
            del self.running[index]
        ended = self.elapsed()
        self.failed += failure is not None
        self.outcomes.append(self._outcome(index, scheduled, started, ended, stream, failure))
        slots.give_back(ended)

    def _outcome(
        self,
        index: int,
        scheduled: float,
        started: float,
        ended: float,
        stream: AnswerStream,
        failure: Failure | None,
    ) -> Outcome:
        usage = stream.usage
        return Outcome(
            index=index,
            scheduled=scheduled,
            started=started,
            stamps=array("d", [stamp - self._began for stamp in stream.stamps]),
            last=stream.last - self._began if stream.last else ended,
            ended=ended,
            prompt_tokens=usage.prompt_tokens if usage else None,
            completion_tokens=usage.completion_tokens if usage else None,
            failure=failure,
            text="".join(stream.text),
        )
