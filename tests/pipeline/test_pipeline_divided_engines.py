"""Engines whose model is divided among several workers: the tokens of one worker, also when a rank
is lost while streams run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import psutil
import pytest
from support.pipeline.clients import Answer, ask
from support.pipeline.served import Served, served
from support.polling import until

from penstock.loadtest.models.make_model import make_model

FLAGS = (
    *("--device", "cpu", "--dtype", "float32", "--max-num-seqs", "6", "--block-size", "8"),
    *("--num-kv-blocks", "40", "--max-num-batched-tokens", "64", "--max-model-len", "256"),
)
"""KV memory for two or three of the sequences below: others are preempted, and begin again."""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 130}},
    "required": ["age"],
    "additionalProperties": False,
}
LAYOUTS = [
    {"tensor": 2},
    {"tensor": 4},
    {"pipeline": 2},
    {"pipeline": 3},
    {"tensor": 2, "pipeline": 2},
    {"data": 2, "tensor": 2},
]
ONE_OF_THEM = LAYOUTS[0]
"""With the fewest processes that import torch, and begin again after a loss. Tests of workers have
ranks of all layouts in one process."""
SCHEDULER = -1


class Divided(NamedTuple):
    server: Served
    ranks: int
    """Of each engine."""
    engines: int


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, of which three stages have 2, 1 and 1; four ranks share two KV heads."""
    path = tmp_path_factory.mktemp("models") / "divided"
    made: Path = make_model(path, hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=2)
    return made


def bodies() -> list[dict[str, Any]]:
    """Beginnings that several share; greedy, drawn, penalised, by a grammar, with logprobs."""
    rng = random.Random(3)
    common = [rng.randrange(256) for _ in range(70)]
    schema = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}
    asked: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "logprobs": 2},
        {"temperature": 0.9, "seed": 4, "top_p": 0.9, "logprobs": 1},
        {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.2, "presence_penalty": 0.2},
        {"temperature": 0.9, "seed": 6, "n": 2, "min_p": 0.05},
        {"temperature": 0.7, "seed": 7, "response_format": schema, "ignore_eos": False},
    ]
    return [
        {
            "prompt": [*common[: 30 + 8 * number], number, number + 1],
            "max_tokens": 48,
            "ignore_eos": True,
            "stream": True,
            **one,
        }
        for number, one in enumerate(asked)
    ]


def answers(
    server: Served, kill: int | None = None, by: signal.Signals = signal.SIGKILL
) -> list[Answer]:
    """Of all at once; the worker of rank ``kill`` gets a signal when tokens have come."""

    async def run() -> list[Answer]:
        timeout = aiohttp.ClientTimeout(total=150)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            asked = [asyncio.ensure_future(ask(session, server.url, one)) for one in bodies()]
            if kill is not None:
                await asyncio.to_thread(kill_rank, server, kill, by)
            return await asyncio.gather(*asked)

    return asyncio.run(run())


def kill_rank(server: Served, rank: int, by: signal.Signals) -> None:
    """rank: ``SCHEDULER`` for that of the first engine."""
    first = server.metrics().get("penstock_generation_tokens_total", 0.0)
    until(
        lambda: server.metrics().get("penstock_generation_tokens_total", 0.0) >= first + 40,
        told="no tokens came",
    )
    os.kill(schedulers(server)[0] if rank == SCHEDULER else workers(server)[rank], by)


def pids(server: Served, role: str) -> dict[int, int]:
    """By number, of those that have not ended."""
    found = {}
    for process in server.processes().values():
        with contextlib.suppress(psutil.NoSuchProcess):
            if server.role_of(process) == role:
                number = re.search(rf"{role}.*? (\d+)", " ".join(process.cmdline()))
                assert number is not None
                found[int(number[1])] = process.pid
    return found


def workers(server: Served) -> dict[int, int]:
    return pids(server, "worker")


def schedulers(server: Served) -> dict[int, int]:
    return pids(server, "scheduler")


def ready(server: Served) -> int:
    """Engines that take requests."""
    with urllib.request.urlopen(server.url + "/playground/status", timeout=10) as answer:
        processes = json.load(answer)["processes"]
    return sum(one["service"] == "scheduler" and one["phase"] == "ready" for one in processes)


def replaced(before: dict[int, int], after: dict[int, int]) -> list[int]:
    return sorted(number for number in after if before.get(number) != after[number])


def check(got: list[Answer], expected: list[Answer]) -> None:
    for number, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        assert (ours.error, ours.done) == (None, True), number
        assert (ours.text, ours.finish) == (theirs.text, theirs.finish), number
        for choice, columns in theirs.logprobs.items():
            ours_of = ours.logprobs[choice]
            assert ours_of["tokens"] == columns["tokens"]
            assert ours_of["token_logprobs"] == pytest.approx(columns["token_logprobs"], abs=1e-3)
    if got[5].finish[0] == "stop":
        assert 0 <= json.loads(got[5].text[0])["age"] <= 130


@pytest.fixture(scope="module")
def of_one(folder: Path) -> list[Answer]:
    """What one worker answers, with all KV memory that it wants."""
    with served(str(folder), *FLAGS[:6], "--num-kv-blocks", "500", *FLAGS[-4:]) as server:
        return answers(server)


def flags_of(layout: dict[str, int]) -> list[str]:
    return [
        word for name, size in layout.items() for word in (f"--{name}-parallel-size", str(size))
    ]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(one, marks=[] if one is ONE_OF_THEM else pytest.mark.slow) for one in LAYOUTS
    ],
    ids=str,
)
def divided(request: pytest.FixtureRequest, folder: Path) -> Iterator[Divided]:
    layout = request.param
    with served(str(folder), *FLAGS, *flags_of(layout)) as running:
        ranks = layout.get("tensor", 1) * layout.get("pipeline", 1)
        engines = layout.get("data", 1)
        assert len(workers(running)) == ranks * engines
        yield Divided(running, ranks, engines)


@pytest.mark.timeout(600)
def test_a_divided_engine_answers_as_one_worker_does(
    divided: Divided, of_one: list[Answer]
) -> None:
    check(answers(divided.server), of_one)
    metrics = divided.server.settled()
    assert metrics["penstock_preemptions_total"] > 0 or divided.engines > 1
    assert metrics["penstock_prefix_cache_hit_tokens_total"] > 0


@pytest.mark.slow  # in the quick run ranks without a model are lost, and ranks of one process meet
@pytest.mark.timeout(600)
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP])
def test_the_loss_of_a_rank_changes_no_answer(
    by: signal.Signals, divided: Divided, of_one: list[Answer]
) -> None:
    server, ranks, engines = divided
    until(lambda: len(workers(server)) == ranks * engines, 120, told="ranks are missing")
    before = workers(server)
    check(answers(server, kill=ranks - 1, by=by), of_one)
    until(
        lambda: replaced(before, workers(server)) == list(range(ranks)),
        120,
        told=lambda: (
            f"{replaced(before, workers(server))} have begun anew, not all of the engine's"
        ),
    )
    until(lambda: ready(server) >= engines, 120, told="the ranks have not met again")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_go_on_for_another_scheduler(divided: Divided, of_one: list[Answer]) -> None:
    before = workers(divided.server)
    check(answers(divided.server, kill=SCHEDULER), of_one)
    same = replaced(before, workers(divided.server))
    assert same in ([], list(range(divided.ranks))), "all, where some had begun a step, or none"
    check(answers(divided.server), of_one)
