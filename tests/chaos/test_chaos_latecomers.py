"""A process that was stopped, replaced, and goes on after all: it changes nothing and ends."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from by_hand import ByHand, OneProcess
from reference_models import VOCABULARY, write_model
from streams import Crowd, requests, undisturbed

FENCED = 5
"""Exit code of a process that was declared lost."""
ADDRESS_IN_USE = 4
LOST_SECONDS = 3.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ByHand]:
    folder = write_model("qwen3", tmp_path / "tiny")
    running = ByHand(
        model=str(folder), device="cpu", dtype="float32", threads="1", max_num_seqs="40"
    )
    try:
        yield running
    finally:
        running.close()


ASKED = requests(16, seed=1, prompt_tokens=20, max_tokens=400, vocabulary=VOCABULARY, streamed=True)


async def with_a_signal(cluster: ByHand, target: OneProcess, number: int) -> list[Any]:
    """What clients see when a process gets a signal in the midst of their streams."""
    async with Crowd(cluster.url, ASKED) as crowd:
        await crowd.until(5)
        target.send(number)
        if number == signal.SIGSTOP:
            cluster.start(target.service)
        return [one.verdict() for one in await crowd.ends()]


def plainly(cluster: ByHand) -> list[Any]:
    return [one.verdict() for one in asyncio.run(undisturbed(cluster.url, ASKED))]


@pytest.mark.parametrize("role", ["tokenizer", "scheduler", "worker"])
def test_a_process_that_comes_back_late_changes_nothing(cluster: ByHand, role: str) -> None:
    late = cluster.start_all()[role]
    expected = plainly(cluster)
    assert asyncio.run(with_a_signal(cluster, late, signal.SIGSTOP)) == expected
    cluster.wait_ready()
    time.sleep(LOST_SECONDS + 1.0)  # by now the router has missed it, whatever it owned
    assert asyncio.run(with_a_signal(cluster, late, signal.SIGCONT)) == expected
    assert late.ends() == FENCED, cluster.output
    assert plainly(cluster) == expected
    assert [one.service for one in cluster.ended()] == [role]


def test_a_router_that_comes_back_late_goes_on_as_if_nothing_had_been(cluster: ByHand) -> None:
    late = cluster.start_all()["router"]
    expected = plainly(cluster)
    assert asyncio.run(with_a_signal(cluster, late, signal.SIGSTOP)) == expected
    second = cluster.processes[-1]
    assert second.ends() == ADDRESS_IN_USE, cluster.output
    assert "is in use by another process" in second.output
    time.sleep(LOST_SECONDS + 1.0)
    late.send(signal.SIGCONT)
    cluster.wait_ready()
    assert plainly(cluster) == expected
    assert cluster.ended() == [second], cluster.output
