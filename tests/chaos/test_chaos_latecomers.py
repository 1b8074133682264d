"""A process that was stopped, replaced, and goes on after all: it changes nothing and ends."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from by_hand import PATIENCE, ByHand
from reference_models import VOCABULARY, write_model
from streams import Crowd, requests, undisturbed

SILENCE = 3.0
FENCED = 5
"""Exit code of a process that was declared lost."""
ADDRESS_IN_USE = 4
ASKED = requests(16, seed=1, prompt_tokens=20, max_tokens=400, vocabulary=VOCABULARY, streamed=True)
Verdicts = list[tuple[int, str, str | None, int | None, str, bool]]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ByHand]:
    folder = write_model("qwen3", tmp_path_factory.mktemp("models") / "tiny")
    running = ByHand(
        model=str(folder), device="cpu", dtype="float32", threads="1", max_num_seqs="40"
    )
    try:
        running.start_all()
        yield running
    finally:
        running.close()


@pytest.fixture(scope="module")
def expected(cluster: ByHand) -> Verdicts:
    return plainly(cluster)


def plainly(cluster: ByHand) -> Verdicts:
    return [one.verdict() for one in asyncio.run(undisturbed(cluster.url, ASKED))]


async def when_streaming(cluster: ByHand, act: Callable[[], None]) -> Verdicts:
    """What clients see when something happens in the midst of their streams."""
    async with Crowd(cluster.url, ASKED) as crowd:
        await crowd.until(5)
        act()
        return [one.verdict() for one in await crowd.ends()]


def wait(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


@pytest.mark.parametrize("role", ["tokenizer", "scheduler", "worker"])
def test_a_process_that_comes_back_late_changes_nothing(
    cluster: ByHand, expected: Verdicts, role: str
) -> None:
    late = cluster.members[role]

    def stop_and_replace() -> None:
        late.send(signal.SIGSTOP)
        cluster.members[role] = cluster.start(role)

    assert asyncio.run(when_streaming(cluster, stop_and_replace)) == expected
    wait(lambda: cluster.known() == {one.process.pid for one in cluster.members.values()})
    assert asyncio.run(when_streaming(cluster, lambda: late.send(signal.SIGCONT))) == expected
    assert late.ends() == FENCED, cluster.output
    assert plainly(cluster) == expected
    assert cluster.lost() == [], cluster.output


def test_a_router_that_comes_back_late_goes_on_as_if_nothing_had_been(
    cluster: ByHand, expected: Verdicts
) -> None:
    late = cluster.members["router"]
    assert asyncio.run(when_streaming(cluster, lambda: late.send(signal.SIGSTOP))) == expected
    second = cluster.start("router")
    assert second.ends() == ADDRESS_IN_USE, cluster.output
    assert "is in use by another process" in second.output
    time.sleep(SILENCE + 0.5)  # by now it has missed six beats of everybody
    late.send(signal.SIGCONT)
    cluster.wait_ready()
    assert plainly(cluster) == expected
    assert cluster.lost() == [], cluster.output
