"""A request that kills every worker that computes it takes no neighbour along, at any engine."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.chaos.streams import Crowd, Followed, requests, undisturbed
from support.chaos.victims import children, nothing_held, whole_again
from support.pipeline.reference_models import VOCABULARY, write_model
from support.pipeline.served import Served, served

from penstock.protocol.ownership.tombstones import MAX_STALLS
from penstock.services.scheduler.failures import MAX_STRIKES

pytestmark = pytest.mark.timeout(300)

POISON = 7
ENGINES = 4
SLOTS = 4
NEIGHBOURS = 40
"""Some run, some wait: at each engine more than it has slots for."""


@pytest.fixture(scope="module", params=["null", pytest.param("tiny", marks=pytest.mark.chaos)])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    flags = ["--data-parallel-size", str(ENGINES), "--max-num-seqs", str(SLOTS)]
    flags += ["--fault", f"worker:kill@token={POISON}"]
    if request.param == "null":
        flags += ["--device", "null", "--null-step-ms", "10"]
    else:
        folder = write_model("qwen3", tmp_path_factory.mktemp("models") / "tiny")
        flags += ["--device", "cpu", "--dtype", "float32", "--threads", "1", str(folder)]
    with served(*flags) as running:
        yield running


def neighbours(seed: int, max_tokens: int) -> list[dict[str, Any]]:
    """None has the poison in its prompt. All have a seed: the null engine draws by it alone."""
    bodies = requests(
        NEIGHBOURS,
        seed=seed,
        prompt_tokens=20,
        max_tokens=max_tokens,
        vocabulary=VOCABULARY - 70,
        streamed=True,
    )
    for number, body in enumerate(bodies):
        body["prompt"] = [token + 1 if token >= POISON else token for token in body["prompt"]]
        body["seed"] = number
    return bodies


def poisonous(seed: int) -> dict[str, Any]:
    (body,) = requests(
        1, seed=seed, prompt_tokens=20, max_tokens=5, vocabulary=VOCABULARY - 70, streamed=True
    )
    return {**body, "prompt": [*body["prompt"], POISON]}


def deaths(server: Served) -> int:
    return len(re.findall(r"worker \d+ .*starting it again", server.output))


async def poisoned(
    url: str, bodies: list[dict[str, Any]], poison: dict[str, Any], running: int
) -> tuple[list[Followed], Followed]:
    """The poison comes when so many of the others have had text, and before the rest comes."""
    async with Crowd(url, bodies[:running]) as early:
        await early.until_some(running // 2)
        async with Crowd(url, [poison]) as culprit, Crowd(url, bodies[running:]) as late:
            followed = [*await early.ends(), *await late.ends()]
            return followed, (await culprit.ends())[0]


@pytest.mark.parametrize(
    "running",
    [
        pytest.param(0, id="as they come", marks=pytest.mark.chaos),
        pytest.param(NEIGHBOURS, id="as they stream", marks=pytest.mark.chaos),
    ],
)
def test_a_request_that_kills_its_workers_ends_alone(
    server: Served, running: int, report: Callable[..., None]
) -> None:
    bodies = neighbours(seed=running, max_tokens=60)
    count, before = len(children(server)), deaths(server)
    began = time.monotonic()
    followed, culprit = asyncio.run(poisoned(server.url, bodies, poisonous(running), running))
    recovery = whole_again(server, [], count, began)
    died = deaths(server) - before
    pause = max(one.longest_pause(began) for one in followed)
    report(deaths=died, pause=pause, recovery=recovery, error=culprit.error)
    expected = asyncio.run(undisturbed(server.url, bodies))
    assert all(one.done for one in expected), expected
    assert [one.verdict() for one in followed] == [one.verdict() for one in expected]
    assert not culprit.text and not culprit.done
    assert "without a new token" in culprit.error, culprit
    # One at each engine that it is sent to; where no other is ready, as many as one engine bears.
    assert 0 < died <= MAX_STALLS + MAX_STRIKES
    nothing_held(server)
