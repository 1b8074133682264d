"""A process that was stopped, replaced, and goes on after all: it changes nothing and ends."""

from __future__ import annotations

import asyncio
import itertools
import signal
import threading
from collections.abc import Callable, Iterator

import pytest
from support.chaos.by_hand import FENCED, ByHand
from support.chaos.states import BUDGET, STATES, act_in, bodies
from support.chaos.streams import undisturbed
from support.pipeline.reference_models import write_model
from support.polling import until

pytestmark = pytest.mark.timeout(400)

SEEDS = itertools.count(1000)
"""No prompt of one check is in the cache of another."""
SILENCE = 3.0
ADDRESS_IN_USE = 4
ENGINE = ("scheduler", "worker")
in_every_state = pytest.mark.parametrize(
    "state",
    [
        pytest.param(state, marks=() if state == "streaming" else pytest.mark.chaos)
        for state in STATES
    ],
)


@pytest.fixture(scope="module", params=["tiny", pytest.param("demo", marks=pytest.mark.chaos)])
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ByHand]:
    settings = {"device": "cpu", "dtype": "float32", "threads": "1", "max_num_seqs": "40"}
    if request.param == "tiny":
        folder = write_model("qwen3", tmp_path_factory.mktemp("models") / "tiny")
        settings["model"] = str(folder)
    running = ByHand(**settings, max_num_batched_tokens=str(BUDGET))
    try:
        running.start_all()
        yield running
    finally:
        running.close()


def check(cluster: ByHand, state: str, act: Callable[[], None]) -> None:
    """Clients see the same with and without what happens."""
    asked = bodies(state, seed=next(SEEDS))
    followed = asyncio.run(act_in(cluster.url, state, asked, act))
    # Ready is not enough: it may still be that of a process which was stopped a moment ago.
    until(lambda: replaced(cluster))
    cluster.wait_ready()
    expected = asyncio.run(undisturbed(cluster.url, asked))
    assert all(one.done for one in expected), expected
    if state != "idle":
        assert [one.verdict() for one in followed] == [one.verdict() for one in expected]


def replaced(cluster: ByHand) -> bool:
    """Whether the members are just those that should be at work."""
    return cluster.known() == {one.process.pid for one in cluster.members.values()}


@in_every_state
@pytest.mark.parametrize(
    "roles",
    [
        pytest.param(("tokenizer",), marks=pytest.mark.chaos),
        pytest.param(("scheduler",), marks=pytest.mark.chaos),
        pytest.param(("worker",), marks=pytest.mark.chaos),
        pytest.param(ENGINE, marks=pytest.mark.chaos),
    ],
    ids="-".join,
)
def test_processes_that_come_back_late_change_nothing(
    cluster: ByHand, roles: tuple[str, ...], state: str
) -> None:
    late = [cluster.members[role] for role in roles]

    def stop_and_replace() -> None:
        for one in late:
            one.send(signal.SIGSTOP)
            cluster.members[one.service] = cluster.start(one.service)

    def go_on() -> None:
        for one in late:
            one.send(signal.SIGCONT)

    check(cluster, state, stop_and_replace)
    check(cluster, state, go_on)
    assert [one.ends() for one in late] == [FENCED] * len(late), cluster.output
    check(cluster, "idle", lambda: None)
    assert cluster.lost() == [], cluster.output


@in_every_state
@pytest.mark.chaos
def test_a_router_that_comes_back_late_goes_on_as_if_nothing_had_been(
    cluster: ByHand, state: str
) -> None:
    late = cluster.members["router"]
    check_after = threading.Timer(SILENCE + 2.0, late.send, [signal.SIGCONT])

    def stop_for_a_while() -> None:
        late.send(signal.SIGSTOP)
        second = cluster.start("router")
        assert second.ends() == ADDRESS_IN_USE, cluster.output
        assert "is in use by another process" in second.output
        check_after.start()  # by then it has missed six beats of everybody

    check(cluster, state, stop_for_a_while)
    check_after.join()
    until(lambda: replaced(cluster))
    check(cluster, "idle", lambda: None)
    assert cluster.lost() == [], cluster.output


@pytest.mark.chaos
@in_every_state
def test_a_router_and_an_engine_that_come_back_late_change_nothing(
    cluster: ByHand, state: str
) -> None:
    router, *engine = (cluster.members[role] for role in ("router", *ENGINE))

    def stop_and_replace_the_engine() -> None:
        for one in (router, *engine):
            one.send(signal.SIGSTOP)
        for one in engine:
            cluster.members[one.service] = cluster.start(one.service)
        threading.Timer(2.0, router.send, [signal.SIGCONT]).start()

    check(cluster, state, stop_and_replace_the_engine)
    for one in engine:
        one.send(signal.SIGCONT)
    assert [one.ends() for one in engine] == [FENCED, FENCED], cluster.output
    check(cluster, "idle", lambda: None)
    assert cluster.lost() == [], cluster.output
