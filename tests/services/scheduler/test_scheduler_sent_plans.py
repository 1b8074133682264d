"""Plans on their way to the worker: when they are sent again, and what a refusal says."""

from __future__ import annotations

import logging

import pytest
from support.scheduler.scheduler_harness import Engine, prompt
from support.scheduler.simulated_worker import token_bytes, token_list

from penstock.protocol.process.faults import Faults
from penstock.protocol.process.metrics import Registry
from penstock.protocol.process.participant import Status
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.steps import StepFailed, StepPlan, StepResult
from penstock.services.scheduler.adapter_messages import AdapterMessages
from penstock.services.scheduler.core import Batches
from penstock.services.scheduler.failures import MAX_STRIKES
from penstock.services.scheduler.meters import EngineMeters
from penstock.services.scheduler.sent_plans import RESEND_SECONDS, SentPlans
from penstock.services.scheduler.service import SchedulerService


class Outbox:
    def __init__(self) -> None:
        self.takes = True
        self.sent: list[int] = []

    def send(self, plan: StepPlan) -> bool:
        if self.takes:
            self.sent.append(plan.step)
        return self.takes


def plan(step: int) -> StepPlan:
    return StepPlan(1, step, False, [], [], [], [])


def test_plans_without_an_answer_are_sent_again_after_longer_and_longer_pauses() -> None:
    outbox = Outbox()
    plans = SentPlans(outbox.send)
    assert plans.send(plan(1), 10.0) and plans.send(plan(2), 10.1)
    times = []
    for tenth in range(300):
        before = len(outbox.sent)
        plans.resend(10.0 + tenth / 10)
        if len(outbox.sent) > before:
            assert outbox.sent[before:] == [1, 2]
            times.append(tenth / 10)
    pauses = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    assert [round(pause) for pause in pauses] == [2, 4, 8]
    assert RESEND_SECONDS == 2.0


def test_an_answer_ends_the_wait_for_its_plan_and_begins_the_pauses_anew() -> None:
    outbox = Outbox()
    plans = SentPlans(outbox.send)
    for step in (1, 2, 3):
        plans.send(plan(step), 0.0)
    plans.resend(2.1)
    plans.answered(2, 3.0)
    assert len(plans) == 1
    outbox.sent.clear()
    plans.resend(4.9)
    assert not outbox.sent
    plans.resend(5.1)
    assert outbox.sent == [3]
    plans.clear()
    plans.resend(100.0)
    assert outbox.sent == [3] and not len(plans)


def test_a_plan_that_is_refused_is_not_kept_to_be_sent_again() -> None:
    outbox = Outbox()
    plans = SentPlans(outbox.send)
    outbox.takes = False
    assert not plans.send(plan(1), 0.0)
    outbox.takes = True
    plans.resend(100.0)
    assert not outbox.sent


class Group:
    """Attached workers that nobody speaks to."""

    def __init__(self, epoch: int) -> None:
        self.epoch, self.attached = epoch, True

    def send(self, message: Message) -> bool:
        return False


class Loop(SchedulerService):
    """The process's step loop over a core and an outbox that the test holds; nothing else of it."""

    def __init__(self, engine: Engine, outbox: Outbox) -> None:
        self.core = engine.core
        self._meters = EngineMeters(Registry(), "m")
        self.status = Status()
        self.log = logging.getLogger("test")  # type: ignore[assignment]
        self.group = Group(engine.core.epoch)  # type: ignore[assignment]
        self.faults = Faults([], "scheduler")
        self.batches: Batches = []
        self._answers = []
        self._keeping = self._hand_overs = None
        self._failed_beside = []
        self._plan_at = 0.0
        self._adapters = AdapterMessages(self, 1)
        self._plans = SentPlans(outbox.send)

    def _hand_out(self, batches: Batches) -> None:
        self.batches += batches


def test_a_plan_that_cannot_be_sent_has_failed_and_its_request_is_given_up_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("test"), "error", lambda event, **facts: None)
    engine, outbox = Engine(), Outbox()
    engine.submit(1, prompt(5))
    loop = Loop(engine, outbox)
    outbox.takes = False
    for quarter in range(40):
        loop.work(quarter / 4)
        engine.core.check()
    assert engine.core.stats().counters.failed_steps == MAX_STRIKES
    ((owner, batch),) = loop.batches
    assert owner == "tokenizer"
    assert "could not be sent to the worker" in batch.ends[0].message
    assert engine.core.idle and not len(loop._plans)
    outbox.takes = True
    engine.submit(2, prompt(5))
    loop.work(20.0)
    assert outbox.sent and engine.core.stats().running == 1


def test_a_rank_that_fails_a_step_waits_for_the_results_of_older_ones_and_is_believed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("test"), "warning", lambda event, **facts: None)
    engine, outbox = Engine(), Outbox()
    engine.submit(1, prompt(5))
    loop = Loop(engine, outbox)
    loop.metrics = Registry()
    loop.work(0.0)
    assert outbox.sent == [1, 2]
    loop._failed_beside += [StepFailed(1, 2, "rank 1"), StepFailed(1, 2, "rank 2")]
    loop.work(0.1)
    assert engine.core.stats().counters.failed_steps == 0, "step 1 is unanswered"
    loop._answers.append(StepResult(1, 1, token_bytes([5]), [], 0.001))
    loop.work(0.2)
    ((_, batch),) = loop.batches
    assert token_list(batch.tokens) == [5]
    assert engine.core.stats().counters.failed_steps == 1
    assert engine.core.failures(1) == 1, "it was in the step that failed"
    assert outbox.sent == [1, 2, 3, 4], "a full plan and the next one"
