"""``/metrics`` while the router is new: totals of some processes are no totals."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from support.client.remembered_wire import Wire

from penstock.client.pipeline_metrics import PipelineMetrics
from penstock.protocol.process.metrics import Registry, collect
from penstock.protocol.process.participant import Participant
from penstock.protocol.wire.messages.membership import (
    Capacity,
    Identity,
    Members,
    MetricsAnswer,
    MetricsReport,
    Peer,
    Phase,
    ProcessMetrics,
)

ROUTER = "ipc:///run/router.sock"
SERVICES = {1: "router", 2: "tokenizer", 3: "scheduler", 4: "scheduler", 5: "launcher"}


def report(amount: float) -> MetricsReport:
    registry = Registry()
    registry.inc("generation_tokens_total", amount=amount)
    return registry.report()


def answer(amounts: dict[int, float]) -> MetricsAnswer:
    """Of the processes by number, those of 0 have not reported yet."""
    return MetricsAnswer(
        [
            ProcessMetrics(SERVICES.get(n, "frontend"), n, report(a) if a else MetricsReport([]))
            for n, a in amounts.items()
        ]
    )


class Server:
    """Members, and a router that answers each question with the next of its answers."""

    def __init__(self, answers: Sequence[MetricsAnswer]) -> None:
        wire: Any = Wire()
        self._answers = iter(answers)
        self.participant = Participant("frontend", wire, ROUTER, Identity(1, "host"))
        self.participant.status.phase = Phase.READY
        self.metrics = PipelineMetrics(self.participant, self.ask)
        self.questions = 0

    def members(self, router: int, phases: dict[int, str]) -> None:
        peers = [
            Peer(SERVICES[n], f"ipc:///run/{n}", n, Identity(n, "host"), phase, "",
                 Capacity(1, 1, 1, 1, 1, 1), 0)
            for n, phase in phases.items()
        ]  # fmt: skip
        self.participant.handle(router, Members(router, 1, peers, []), 0.0)

    def ask(self) -> None:
        self.questions += 1
        if (found := next(self._answers, None)) is not None:
            asyncio.get_running_loop().call_soon(self.metrics.arrived, found)

    def tokens(self) -> float:
        """As ``/metrics`` says."""
        found = asyncio.run(self.metrics.newest())
        return collect(found)["generation_tokens_total"][()].values[0]


READY = dict.fromkeys(SERVICES, Phase.READY)
BEFORE = {1000: 1.0, 1: 0.0, 2: 2.0, 3: 100.0, 4: 200.0, 5: 0.0}


def test_while_a_new_router_lacks_reports_no_counter_falls() -> None:
    server = Server(
        [
            answer(BEFORE),
            answer({7: 1.0, 1000: 1.0}),
            answer({**BEFORE, 1: 0.0, 3: 0.0}),
            answer({**BEFORE, 3: 150.0}),
        ]
    )
    server.members(1, READY)
    assert server.tokens() == 303
    server.members(7, {2: Phase.READY})  # a new router, which knows one of them so far
    assert server.tokens() == 353, "it was asked until all had reported to it"
    assert server.questions == 4


def test_what_is_no_longer_there_or_not_at_work_is_not_waited_for() -> None:
    server = Server([answer(BEFORE), answer({1000: 1.0, 2: 2.0, 3: 100.0, 4: 0.0})])
    server.members(1, READY)
    assert server.tokens() == 303
    server.members(1, {2: Phase.READY, 3: Phase.READY, 4: Phase.LOADING})
    assert server.tokens() == 103


def test_a_router_that_lacks_reports_for_long_leaves_the_last_whole_answer() -> None:
    server = Server([answer(BEFORE), *[answer({1000: 1.0})] * 100])
    server.members(1, READY)
    assert server.tokens() == server.tokens() == 303


def test_where_no_whole_answer_was_ever_there_none_is_made_up() -> None:
    server = Server([])
    server.members(1, READY)
    with pytest.raises(TimeoutError):
        server.tokens()
