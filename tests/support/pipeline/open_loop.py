"""Clients that come at random and wait for nobody: an offered load, and what becomes of it."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import msgspec

from penstock.loadtest.client.answer_stream import AnswerStream
from penstock.loadtest.client.arrivals import arrival_times
from penstock.loadtest.client.target import Target

_T = TypeVar("_T")
PATIENCE = 60.0
"""Seconds that a client waits for its answer."""


class Receiver(AnswerStream):
    """An answer together with its headers."""

    def __init__(self) -> None:
        super().__init__()
        self.headers: dict[str, str] = {}
        self.answered = 0.0
        """When the status line came."""

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.answered = time.perf_counter()
        self.headers = headers
        super().head(status, headers)


@dataclass
class Visit:
    """One request and its fate. Times are seconds after the start of its load."""

    tenant: str
    began: float
    status: int = 0
    """0: no answer came."""
    failure: str = ""
    retry_after: str | None = None
    answer_s: float = 0.0
    """From sending to the status line."""
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    ended: float = 0.0

    @property
    def finished(self) -> bool:
        return self.status == 200 and not self.failure

    @property
    def shed(self) -> bool:
        return self.status in (429, 503)


@dataclass
class Offered:
    """All that came of an offered load."""

    seconds: float
    visits: list[Visit] = field(default_factory=list)

    def of(self, tenant: str) -> Offered:
        return Offered(self.seconds, [v for v in self.visits if v.tenant == tenant])

    @property
    def shed(self) -> list[Visit]:
        return [v for v in self.visits if v.shed]

    @property
    def finished(self) -> list[Visit]:
        return [v for v in self.visits if v.finished]

    @property
    def failed(self) -> list[Visit]:
        """Neither answered nor refused as an overload is."""
        return [v for v in self.visits if not v.finished and not v.shed]

    def goodput(self, ttft_s: float, e2e_s: float) -> float:
        """Requests a second that finished while the load lasted, within both limits."""
        good = [v for v in self.finished if v.ttft_s <= ttft_s and v.e2e_s <= e2e_s]
        return sum(v.ended <= self.seconds for v in good) / self.seconds

    def shed_p99_s(self) -> float:
        return percentile([v.answer_s for v in self.shed], 0.99)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that so large a share of the values does not exceed; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def median_ttft(visits: Sequence[Visit]) -> float:
    return statistics.median(v.ttft_s for v in visits)


class Visitors:
    """Sends requests to one server."""

    def __init__(self, url: str, **body: Any) -> None:
        self._target = Target(url, "/v1/completions", {})
        self._body = {"stream": True, "ignore_eos": True, **body}

    async def visit(self, tenant: str = "", since: float | None = None) -> Visit:
        """One request, to its end. ``since``: the ``perf_counter`` at which its load began."""
        body = {**self._body, "user": tenant} if tenant else self._body
        began = time.perf_counter()
        since = began if since is None else since
        visit = Visit(tenant, began - since)
        answer = Receiver()
        request = self._target.post(msgspec.json.encode(body))
        try:
            async with asyncio.timeout(PATIENCE):
                await self._target.pool.request(request, answer)
        except (OSError, ValueError) as error:  # TimeoutError is an OSError
            visit.failure = repr(error)
        now = time.perf_counter()
        failure = answer.close()
        visit.failure = visit.failure or (str(failure) if failure else "")
        visit.status = answer.status
        visit.retry_after = answer.headers.get("retry-after")
        visit.answer_s = (answer.answered or now) - began
        visit.ttft_s = (answer.stamps[0] if answer.stamps else now) - began
        visit.e2e_s = now - began
        visit.ended = now - since
        return visit

    async def load(
        self, rate: float, seconds: float, *, seed: int, tenant: str = "", burstiness: float = 1.0
    ) -> Offered:
        """``rate`` requests a second at random; returns when all of them have ended."""
        offered = Offered(seconds)
        began = time.perf_counter()

        async def one(at: float) -> None:
            await asyncio.sleep(began + at - time.perf_counter())
            offered.visits.append(await self.visit(tenant, began))

        times = arrival_times(round(rate * seconds), rate, burstiness, seed)
        await asyncio.gather(*(one(at) for at in times))
        return offered

    async def alive(self) -> None:
        """Ask /live, which needs nothing but the frontend's process."""
        status, _ = await self._target.get("/live")
        assert status == 200

    async def normal_after(self, ttft_s: float, *, limit_s: float, in_a_row: int = 4) -> float:
        """Seconds until so many requests in a row are answered within ``ttft_s``."""
        began = time.perf_counter()
        good_since, good = began, 0
        while good < in_a_row:
            assert time.perf_counter() - began < limit_s, f"not normal within {limit_s} s"
            asked = time.perf_counter()
            visit = await self.visit()
            if visit.finished and visit.ttft_s <= ttft_s:
                good_since = asked if good == 0 else good_since
                good += 1
            else:
                good = 0
                await asyncio.sleep(0.1)
        return good_since - began

    def close(self) -> None:
        self._target.pool.close()


@contextmanager
def visitors(url: str, **body: Any) -> Iterator[Visitors]:
    clients = Visitors(url, **body)
    try:
        yield clients
    finally:
        clients.close()


def go(main: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """Run on uvloop: the clients must leave the machine to the server."""
    import uvloop

    return cast(_T, uvloop.run(main()))
