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

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

CLIENTS = 8
ROLLED = [
    (role, number)
    for role in ("tokenizer", "frontend", "scheduler", "worker")
    for number in range(2)
] + [("router", 0)]


async def clients_until(
    stop: asyncio.Event, url: str, bodies: list[dict[str, Any]], expected: list[Followed]
) -> list[str]:
    """Ask without a pause; returns what was not as it should be."""
    failures: list[str] = []

    async def client(offset: int) -> None:
        number = offset
        while not stop.is_set():
            number = (number + 1) % len(bodies)
            async with Crowd(url, [bodies[number]]) as crowd:
                (followed,) = await crowd.ends()
            if followed.verdict() != expected[number].verdict():
                failures.append(f"{followed.verdict()}")

    await asyncio.gather(*(client(offset) for offset in range(CLIENTS)))
    return failures


async def roll(server: Served, report: Callable[..., None]) -> Counter[str]:
    bodies = requests(
        16, seed=5, prompt_tokens=20, max_tokens=200, vocabulary=VOCABULARY, streamed=True
    )
    expected = await undisturbed(server.url, bodies)
    count = len(children(server))
    failed: Counter[str] = Counter()
    for role, number in ROLLED:
        stop = asyncio.Event()
        load = asyncio.create_task(clients_until(stop, server.url, bodies, expected))
        await asyncio.sleep(1.0)
        victim: psutil.Process = find(server, role, number)
        began = time.monotonic()
        victim.send_signal(signal.SIGTERM)
        seconds = await asyncio.to_thread(whole_again, server, [victim], count, began)
        await asyncio.sleep(1.0)
        stop.set()
        failures = await load
        report(role=f"{role} {number}", replaced_after=seconds, failures=failures)
        failed[f"{role} {number}"] += len(failures)
    return failed


def test_a_rolling_replacement_fails_no_request(
    server: Served, report: Callable[..., None]
) -> None:
    failed = asyncio.run(roll(server, report))
    assert {name: count for name, count in failed.items() if count} == {}
    nothing_held(server)
