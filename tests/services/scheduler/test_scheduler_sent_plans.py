"""Plans on their way to the worker: when they are sent again, and what a refusal says."""

from __future__ import annotations

from penstock.protocol.messages.steps import StepPlan
from penstock.services.scheduler.sent_plans import RESEND_SECONDS, SentPlans


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
