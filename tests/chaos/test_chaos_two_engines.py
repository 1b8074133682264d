"""With a second engine a lost one costs its clients a short pause; a lost frontend only its own."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import psutil
import pytest
from support.chaos.streams import Crowd, Followed, requests, undisturbed
from support.chaos.victims import children, find, nothing_held, whole_again
from support.pipeline.reference_models import VOCABULARY
from support.pipeline.served import Served

KILLED_PAUSE = 2.0
SILENCE = 3.0
"""Seconds without a beat after which a process is lost."""
STOPPED_PAUSE = SILENCE + 2.0
BEATS = 0.75
"""Seconds that a figure takes to a metrics page: a beat and a tick."""


def asked(seed: int) -> list[dict[str, Any]]:
    return requests(
        16, seed=seed, prompt_tokens=20, max_tokens=600, vocabulary=VOCABULARY, streamed=True
    )


async def with_a_signal(
    server: Served, victim: psutil.Process, number: int, bodies: list[dict[str, Any]]
) -> tuple[list[Followed], float]:
    async with Crowd(server.url, bodies) as crowd:
        await crowd.until(5)
        struck = time.monotonic()
        victim.send_signal(number)
        return await crowd.ends(), struck


@pytest.mark.chaos
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("role", ["scheduler", "worker", "tokenizer"])
def test_the_other_one_goes_on_with_the_streams(
    server: Served, role: str, number: int, report: Callable[..., None]
) -> None:
    bodies = asked(10 + 2 * len(role) + (number == signal.SIGKILL))
    count = len(children(server))
    victim = find(server, role)
    followed, struck = asyncio.run(with_a_signal(server, victim, number, bodies))
    pause = max(one.longest_pause(struck) for one in followed)
    recovery = whole_again(server, [victim], count, struck)
    report(pause=pause, recovery=recovery)
    expected = asyncio.run(undisturbed(server.url, bodies))
    assert [one.verdict() for one in followed] == [one.verdict() for one in expected]
    assert pause < (KILLED_PAUSE if number == signal.SIGKILL else STOPPED_PAUSE)
    nothing_held(server)


def has_clients(frontend: psutil.Process) -> bool:
    connections = frontend.net_connections("tcp")
    return any(one.status == psutil.CONN_ESTABLISHED for one in connections)


@contextlib.asynccontextmanager
async def crowd_of_both(server: Served, bodies: list[dict[str, Any]]) -> AsyncIterator[Crowd]:
    """Clients of both frontends, each with three pieces of text. Whoever accepts first has a
    client: chance, so it is tried again."""
    frontends = [find(server, "frontend", number) for number in range(2)]
    for _ in range(20):
        async with Crowd(server.url, bodies) as crowd:
            await crowd.until(3)
            if all(has_clients(frontend) for frontend in frontends):
                yield crowd
                return
    raise AssertionError("one of them never had a client")


@pytest.mark.chaos
def test_a_killed_frontend_costs_its_own_clients_their_streams_and_nobody_else(
    server: Served,
) -> None:
    bodies = [{**body, "max_tokens": 900} for body in asked(1)]
    count = len(children(server))
    victim = find(server, "frontend", 1)

    async def strike() -> tuple[list[Followed], float]:
        async with crowd_of_both(server, bodies) as crowd:
            victim.kill()
            struck = time.monotonic()
            while not any(one.cut for one in crowd.followed):
                assert time.monotonic() < struck + 30, "its clients hear nothing"
                await asyncio.sleep(0.005)
            return await crowd.ends(), struck

    followed, struck = asyncio.run(strike())
    whole_again(server, [victim], count, struck)
    expected = asyncio.run(undisturbed(server.url, bodies))
    cut = [one for one in followed if one.cut]
    assert 0 < len(cut) < len(followed)
    for one, other in zip(followed, expected, strict=True):
        if one.cut:
            assert not one.done
            assert other.text.startswith(one.text)
        else:
            assert one.verdict() == other.verdict()
    nothing_held(server)


@pytest.mark.chaos
def test_the_blocks_of_a_killed_frontend_are_free_within_a_second(
    server: Served, report: Callable[..., None]
) -> None:
    """A metrics page is as old as the newest beats: half a second and a tick."""
    bodies = [{**body, "max_tokens": 900} for body in asked(2)]
    count = len(children(server))
    victim = find(server, "frontend", 1)

    async def strike() -> float:
        async with crowd_of_both(server, bodies) as crowd:
            victim.kill()
            struck = time.monotonic()
            while True:
                running = (await asyncio.to_thread(server.metrics))["penstock_requests_running"]
                left = [one for one in crowd.followed if not one.cut]
                assert not any(one.done for one in left), "they ended too soon to tell"
                if len(left) < len(bodies) and running <= len(left):
                    return time.monotonic() - struck
                assert time.monotonic() < struck + 10, f"{running} run, {len(left)} are wanted"
                await asyncio.sleep(0.02)

    struck = time.monotonic()
    free = asyncio.run(strike())
    report(free=free)
    assert free < 1.0 + BEATS
    whole_again(server, [victim], count, struck)
    nothing_held(server)
