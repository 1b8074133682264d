"""What is told of one request counts each loss that it went through, whoever is lost next."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from support.chaos.streams import Crowd, requests
from support.chaos.victims import WHOLE_SECONDS, children, find, nothing_held, whole_again
from support.pipeline.served import Served, served

from penstock.loadtest.models.make_model import make_model
from penstock.loadtest.models.model_sizes import SIZES

NAME = "goes-on"
SURVIVED = ("worker", "scheduler", "tokenizer", "worker", "router", "scheduler")
"""Killed one after another below a stream, which does not need the router."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One of everything, with room for a stream that outlasts all that happens to it."""
    folder = make_model(
        tmp_path_factory.mktemp("models") / "long",
        **{**SIZES["tiny"], "max_position_embeddings": 16384},
    )
    flags = ["--device", "cpu", "--dtype", "float32", "--threads", "1"]
    flags += ["--frontends", "1", "--tokenizers", "1"]
    with served(*flags, str(folder)) as running:
        yield running


def told(server: Served) -> dict[str, Any]:
    with urllib.request.urlopen(f"{server.url}/v1/requests/{NAME}", timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def line_of(server: Served) -> dict[str, Any]:
    """The log line of the request, once it is there."""
    deadline = time.monotonic() + WHOLE_SECONDS
    while time.monotonic() < deadline:
        for line in list(server.lines):
            if '"event":"request"' in line and f'"id":"{NAME}"' in line:
                found: dict[str, Any] = json.loads(line)
                return found
        time.sleep(0.02)
    raise AssertionError(f"no line of {NAME}:\n{server.output[-4000:]}")


@pytest.mark.chaos
def test_the_route_and_the_log_line_count_the_losses_of_every_role(server: Served) -> None:
    (body,) = requests(
        1, seed=3, prompt_tokens=8, max_tokens=12000, vocabulary=SIZES["tiny"]["vocab_size"],
        streamed=True,
    )  # fmt: skip
    count = len(children(server))

    async def go_on(crowd: Crowd, expected: int) -> None:
        await crowd.until(len(crowd.followed[0].arrivals) + 20)
        life = await asyncio.to_thread(told, server)
        assert (life["continuations"], life["finish"]) == (expected, None)

    async def strike() -> int:
        losses = 0
        async with Crowd(server.url, [body], headers={"x-request-id": NAME}) as crowd:
            await go_on(crowd, losses)
            for role in SURVIVED:
                victim, began = find(server, role), time.monotonic()
                victim.kill()
                await asyncio.to_thread(whole_again, server, [victim], count, began)
                losses += role != "router"
                await go_on(crowd, losses)
        return losses

    losses = asyncio.run(strike())
    assert told(server)["continuations"] == losses
    line = line_of(server)
    assert (line["continuations"], line["finish"]) == (losses, "abort")
    nothing_held(server)
