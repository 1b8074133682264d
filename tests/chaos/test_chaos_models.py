"""Two models under load: whatever part of one is killed, its streams end with their text, and those
of the other do not notice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.chaos.streams import Crowd, Followed, requests, undisturbed
from support.chaos.victims import children, find, nothing_held, whole_again
from support.pipeline.reference_models import VOCABULARY, write_model
from support.pipeline.served import Served, served

pytestmark = pytest.mark.chaos
MODELS = ("alpha", "beta")
UNNOTICED = 2.0
"""Seconds: on this machine the replacement's start takes a core from the others."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    place = tmp_path_factory.mktemp("models")
    folders = [
        str(write_model(kind, place / name))
        for name, kind in zip(MODELS, ("qwen3", "llama"), strict=True)
    ]
    flags = ["--device", "cpu", "--dtype", "float32", "--threads", "1", "--max-num-seqs", "16"]
    slow = ["--fault", "worker:sleep=0.01@step", "--restart-wait-s", "120"]
    with served(*folders, *flags, *slow) as running:
        yield running


def asked(model: str, seed: int) -> list[dict[str, Any]]:
    bodies = requests(
        8, seed=seed, prompt_tokens=20, max_tokens=800, vocabulary=VOCABULARY, streamed=True
    )
    return [{**body, "model": model} for body in bodies]


@pytest.mark.parametrize("number", [0, 1], ids=MODELS)
@pytest.mark.parametrize("role", ["tokenizer", "scheduler", "worker"])
def test_what_kills_a_part_of_one_model_is_nothing_to_the_other(
    server: Served, role: str, number: int, report: Callable[..., None]
) -> None:
    theirs, others = asked(MODELS[number], 20 + number), asked(MODELS[1 - number], 30 + number)
    count, victim = len(children(server)), find(server, role, number)

    async def strike() -> tuple[list[Followed], list[Followed], float]:
        async with Crowd(server.url, theirs) as hit, Crowd(server.url, others) as spared:
            await hit.until(5)
            await spared.until(5)
            struck = time.monotonic()
            victim.kill()
            return await hit.ends(), await spared.ends(), struck

    hit, spared, struck = asyncio.run(strike())
    pause = max(one.longest_pause(struck) for one in spared)
    recovery = whole_again(server, [victim], count, struck)
    report(pause=pause, recovery=recovery)
    expected = asyncio.run(undisturbed(server.url, theirs + others))
    assert [one.verdict() for one in hit + spared] == [one.verdict() for one in expected]
    assert pause < UNNOTICED
    nothing_held(server)


def test_a_killed_router_is_nothing_to_either(server: Served) -> None:
    bodies = asked("alpha", 40) + asked("beta", 41)
    count, victim = len(children(server)), find(server, "router")

    async def strike() -> tuple[list[Followed], float]:
        async with Crowd(server.url, bodies) as crowd:
            await crowd.until(5)
            struck = time.monotonic()
            victim.kill()
            return await crowd.ends(), struck

    followed, struck = asyncio.run(strike())
    whole_again(server, [victim], count, struck)
    expected = asyncio.run(undisturbed(server.url, bodies))
    assert [one.verdict() for one in followed] == [one.verdict() for one in expected]
    nothing_held(server)
