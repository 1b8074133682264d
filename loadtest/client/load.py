"""Sends the requests at their times, within the concurrency limit, and records what came back."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.loadtest.client.answer_stream import AnswerStream, Failure
from penstock.loadtest.client.connection import ConnectFailed, ConnectionGone, ConnectionPool
from penstock.loadtest.client.http_response import BadResponse
from penstock.loadtest.client.sessions import Answer

if TYPE_CHECKING:
    Times = array[float]
else:  # before Python 3.12 it has no items where the program runs
    Times = array


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One finished request. Times are seconds from the start of the run."""

    index: int
    scheduled: float
    """When it should have been sent: its arrival; in a closed loop, the end of another; in a
    conversation, the end of the turn before and the pause behind it."""
    started: float
    """When it was sent, or began to connect."""
    stamps: Times
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
    cached_tokens: int | None = None
    """Of the prompt, found in the server's prefix cache; ``None``: it does not tell."""
    turn: int = 0
    """Of its conversation."""

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


class SessionPlan(NamedTuple):
    """Requests that follow each other; most are alone."""

    arrival: float
    """Seconds after the start."""
    first: int
    """The index of its first request; the others have the next ones."""
    turns: int = 1


def plans(arrivals: Sequence[float], turns: Sequence[int] | None = None) -> list[SessionPlan]:
    """A session at each of ``arrivals``. turns: how many requests each has; otherwise one."""
    found, first = [], 0
    for arrival, count in zip(arrivals, turns or [1] * len(arrivals), strict=True):
        found.append(SessionPlan(arrival, first, count))
        first += count
    return found


class Load:
    """One run. ``outcomes``, ``failed`` and ``running`` may be read while it goes on."""

    def __init__(
        self,
        pool: ConnectionPool,
        make_request: Callable[[int, Sequence[Answer]], bytes],
        sessions: Sequence[SessionPlan],
        *,
        max_concurrency: int | None,
        timeout: float,
        open_loop: bool = False,
        pause: float = 0.0,
        max_seconds: float | None = None,
        keep_text: bool = False,
    ) -> None:
        """``make_request(i, answers)`` gives the bytes of request i behind the answers of its
        session's earlier ones.

        At most ``max_concurrency`` sessions run at the same time. ``open_loop``: they are to begin
        at their arrivals, whatever the limit; otherwise each end lets the next one begin, and that
        is when it was to. ``timeout``: seconds for each request; ``pause``: seconds between an
        answer and the next turn; ``max_seconds``: after that nothing new is sent.
        """
        self._pool = pool
        self._make_request = make_request
        self._sessions = sessions
        self._limit = min(max_concurrency or len(sessions), len(sessions))
        self._timeout = timeout
        self._open_loop = open_loop
        self._pause = pause
        self._max_seconds = float("inf") if max_seconds is None else max_seconds
        self._keep_text = keep_text
        self._began = 0.0
        self.outcomes: list[Outcome] = []
        self.failed = 0
        self.running: dict[int, AnswerStream] = {}
        self.duration = 0.0
        """Seconds from the start to the end of the last response."""

    @property
    def planned(self) -> int:
        return sum(session.turns for session in self._sessions)

    def elapsed(self) -> float:
        return time.perf_counter() - self._began

    async def run(self, began: float | None = None) -> None:
        """Send all; returns when all have ended. Cancelled, it ends the open ones uncounted.

        began: the ``time.perf_counter`` at which the run starts; otherwise now.
        """
        self._began = time.perf_counter() if began is None else began
        slots = Slots(self._limit, 0.0)
        try:
            async with asyncio.TaskGroup() as group:
                for session in self._sessions:
                    if session.arrival >= self._max_seconds:
                        break
                    await self._until(session.arrival)
                    free_since = await slots.take()
                    if self.elapsed() >= self._max_seconds:
                        break
                    scheduled = session.arrival if self._open_loop else free_since
                    group.create_task(self._session(session, scheduled, slots))
        finally:
            self.duration = max((o.ended for o in self.outcomes), default=self.elapsed())
            self._pool.close()

    async def _until(self, at: float) -> None:
        while (wait := at - self.elapsed()) > 0:
            await asyncio.sleep(wait)  # uvloop rounds to 1 ms, up or down

    async def _session(self, session: SessionPlan, scheduled: float, slots: Slots) -> None:
        """One turn after the other, as far as they are answered."""
        answers: list[Answer] = []
        try:
            for turn in range(session.turns):
                if turn:
                    if scheduled >= self._max_seconds:
                        return
                    await self._until(scheduled)
                stream, outcome = await self._one(session.first + turn, turn, scheduled, answers)
                if outcome.failure is not None:
                    return
                answers.append(Answer("".join(stream.text), stream.token_ids))
                scheduled = outcome.ended + self._pause
        finally:
            slots.give_back(self.elapsed())

    async def _one(
        self, index: int, turn: int, scheduled: float, answers: Sequence[Answer]
    ) -> tuple[AnswerStream, Outcome]:
        stream = AnswerStream(keep_text=self._keep_text)
        request = self._make_request(index, answers)
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
        outcome = self._outcome(index, turn, scheduled, started, ended, stream, failure)
        self.outcomes.append(outcome)
        return stream, outcome

    def _outcome(
        self,
        index: int,
        turn: int,
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
            cached_tokens=usage.cached_tokens if usage else None,
            turn=turn,
        )
