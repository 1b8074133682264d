"""Every process of a server is replaced, one after another, under load: no request fails."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from support.chaos.streams import Crowd, Followed, requests, undisturbed
from support.chaos.victims import children, find, nothing_held, whole_again
from support.pipeline.reference_models import VOCABULARY
from support.pipeline.served import Served
from support.polling import async_until

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

CLIENTS = 8
ROLLED = [
    (role, number)
    for role in ("tokenizer", "frontend", "scheduler", "worker")
    for number in range(2)
] + [("router", 0)]


class Clients:
    """They ask without a pause until they are told to stop."""

    def __init__(self, url: str, bodies: list[dict[str, Any]], expected: list[Followed]) -> None:
        self.answers = 0
        self.failures: list[str] = []
        """What was not as it should be."""
        self._url, self._bodies, self._expected = url, bodies, expected
        self._stopping = False
        self._tasks = [asyncio.create_task(self._ask(offset)) for offset in range(CLIENTS)]

    async def _ask(self, number: int) -> None:
        while not self._stopping:
            number = (number + 1) % len(self._bodies)
            async with Crowd(self._url, [self._bodies[number]]) as crowd:
                (followed,) = await crowd.ends()
            self.answers += 1
            if followed.verdict() != self._expected[number].verdict():
                self.failures.append(f"{followed.verdict()}")

    async def go_on(self) -> None:
        """Until each has had another answer or two."""
        enough = self.answers + 2 * CLIENTS
        await async_until(lambda: self.answers >= enough)

    async def stop(self) -> None:
        self._stopping = True
        await asyncio.gather(*self._tasks)


async def roll(server: Served, report: Callable[..., None]) -> Counter[str]:
    bodies = requests(
        16, seed=5, prompt_tokens=20, max_tokens=200, vocabulary=VOCABULARY, streamed=True
    )
    expected = await undisturbed(server.url, bodies)
    count = len(children(server))
    failed: Counter[str] = Counter()
    for role, number in ROLLED:
        clients = Clients(server.url, bodies, expected)
        await clients.go_on()
        victim: psutil.Process = find(server, role, number)
        began = time.monotonic()
        victim.send_signal(signal.SIGTERM)
        seconds = await asyncio.to_thread(whole_again, server, [victim], count, began)
        await clients.go_on()
        await clients.stop()
        report(role=f"{role} {number}", replaced_after=seconds, failures=clients.failures)
        failed[f"{role} {number}"] += len(clients.failures)
    return failed


def test_a_rolling_replacement_fails_no_request(
    server: Served, report: Callable[..., None]
) -> None:
    failed = asyncio.run(roll(server, report))
    assert {name: count for name, count in failed.items() if count} == {}
    nothing_held(server)
