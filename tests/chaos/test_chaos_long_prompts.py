"""Long prompts on a real engine share its steps with those who decode: no stream stands still.

With CHAOS_REPORT=FILE the figures are added to the file.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.chaos.streams import Crowd, Followed, requests, undisturbed
from support.chaos.victims import nothing_held
from support.pipeline.open_loop import percentile
from support.pipeline.served import Served, served

from penstock.loadtest.models.make_model import make_model
from penstock.loadtest.models.model_sizes import SIZES

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

MAX_MODEL_LEN = 4096
LONG_TOKENS = 4000
LONG_PROMPTS = 4
STREAM_TOKENS = 800
VOCABULARY = SIZES["tiny"]["vocab_size"]
P99_SHARE, MOST_SHARE = 1 / 5, 2 / 5
"""Gaps may be these shares of the time that one long prompt takes alone. In one piece it makes a
gap of all of that time, and with nothing but the limit on a step's tokens one of half of it."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = make_model(
        tmp_path_factory.mktemp("models") / "long",
        **{**SIZES["tiny"], "max_position_embeddings": MAX_MODEL_LEN},
    )
    flags = ["--device", "cpu", "--dtype", "float32", "--threads", "1", str(folder)]
    with served(*flags) as running:
        yield running


def long_prompts(count: int, seed: int) -> list[dict[str, Any]]:
    bodies = requests(
        count,
        seed=seed,
        prompt_tokens=LONG_TOKENS,
        max_tokens=2,
        vocabulary=VOCABULARY,
        streamed=True,
    )
    return [{**body, "temperature": 0} for body in bodies]


def gaps(times: list[float], since: float, until: float) -> list[float]:
    """Between pieces of which the second came within the time."""
    return [b - a for a, b in itertools.pairwise(times) if since <= b <= until]


def figures(name: str, found: list[float]) -> dict[str, float]:
    return {
        f"{name}_pieces": len(found),
        f"{name}_median_ms": round(1e3 * statistics.median(found), 2),
        f"{name}_p99_ms": round(1e3 * percentile(found, 0.99), 2),
        f"{name}_max_ms": round(1e3 * max(found), 2),
    }


async def beside(url: str, stream: dict[str, Any]) -> tuple[Followed, list[Followed], float, float]:
    """A stream, and long prompts that come in its midst; when they came and had their tokens."""
    async with Crowd(url, [stream]) as reader:
        await reader.until(200)
        began = time.monotonic()
        async with Crowd(url, long_prompts(LONG_PROMPTS, seed=2)) as crowd:
            late = await crowd.ends()
        ended = time.monotonic()
        return (await reader.ends())[0], late, began, ended


def test_a_stream_beside_long_prompts_waits_a_small_part_of_what_one_of_them_takes(
    server: Served, report: Callable[..., None]
) -> None:
    (stream,) = requests(
        1, seed=1, prompt_tokens=16, max_tokens=STREAM_TOKENS, vocabulary=VOCABULARY, streamed=True
    )

    async def alone() -> float:
        began = time.monotonic()
        (first,) = await undisturbed(server.url, long_prompts(1, seed=3))
        return first.arrivals[0] - began

    prefill = asyncio.run(alone())
    followed, late, began, ended = asyncio.run(beside(server.url, stream))
    (expected,) = asyncio.run(undisturbed(server.url, [stream]))
    assert all(one.done and one.completion_tokens == 2 for one in late), late
    assert followed.verdict() == expected.verdict()
    assert followed.arrivals[-1] > ended, "the stream was too short"
    quiet = gaps(expected.arrivals, expected.arrivals[0], expected.arrivals[-1])
    pressed = gaps(followed.arrivals, began, ended)
    report(
        prefill_alone_ms=round(1e3 * prefill),
        prefills_beside_ms=round(1e3 * (ended - began)),
        **figures("quiet", quiet),
        **figures("pressed", pressed),
    )
    assert percentile(pressed, 0.99) < P99_SHARE * prefill
    assert max(pressed) < MOST_SHARE * prefill
    nothing_held(server)
