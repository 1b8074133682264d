"""Requests whose task makes something of their prompt: no token, and what the worker sent."""

from __future__ import annotations

import msgspec
import pytest
from scheduler_harness import prompt, small, token_work
from simulated_worker import token_bytes

from penstock.protocol.wire.messages.requests import TokenWork
from penstock.protocol.wire.messages.steps import StepPlan, StepResult
from penstock.protocol.wire.messages.tokens import EndReason, RowPooled, TokenBatch
from penstock.services.scheduler.core import SchedulerCore
from penstock.services.scheduler.limits import Limits
from penstock.services.scheduler.policy_choice import make_policy


def pooling(length: int, n: int = 1) -> TokenWork:
    work = token_work(prompt(length), max_tokens=0, n=n, stop_ids=[3])
    head = msgspec.structs.replace(work.head, task="embed")
    return msgspec.structs.replace(work, head=head)


def rows_of(plan: StepPlan) -> int:
    return sum(chunk.sample for chunk in plan.chunks)


def answer(core: SchedulerCore, plan: StepPlan, pooled: list[RowPooled]) -> TokenBatch | None:
    tokens = token_bytes([3] * rows_of(plan))
    result = StepResult(plan.epoch, plan.step, tokens, [], 0.001, pooled=pooled)
    batches = core.apply(result, 0.0)
    return batches[0][1] if batches else None


@pytest.fixture
def core() -> SchedulerCore:
    return SchedulerCore(small(), 1, make_policy("fcfs"), True, 10)


def test_a_task_ends_with_its_payload_and_no_token(core: SchedulerCore) -> None:
    assert core.add(1, 0, "t", pooling(9, n=2), 0.0) is None
    plan = core.plan(0.0)
    assert plan is not None and rows_of(plan) == 2
    assert [new.task for new in plan.added] == ["embed", "embed"]
    batch = answer(core, plan, [RowPooled(1, b"two"), RowPooled(0, b"one")])
    assert batch is not None
    assert (batch.tokens, batch.counts) == (b"", [0, 0])
    assert batch.pooled == [RowPooled(0, b"one"), RowPooled(1, b"two")]
    assert [end.reason for end in batch.ends] == [EndReason.LENGTH] * 2
    assert core.idle
    core.check()
    assert core.plan(0.0) is None


def test_what_was_computed_before_serves_a_task_too(core: SchedulerCore) -> None:
    for number in (1, 2):
        assert core.add(number, 0, "t", pooling(17), 0.0) is None
        plan = core.plan(0.0)
        assert plan is not None
        batch = answer(core, plan, [RowPooled(0, b"one")])
        assert batch is not None and batch.pooled
    assert batch.starts[0].cached == 16


def test_a_worker_that_made_nothing_of_a_prompt_costs_its_request_alone(
    core: SchedulerCore,
) -> None:
    for number in (1, 2):
        assert core.add(number, 0, "t", pooling(5 + number), 0.0) is None
    plan = core.plan(0.0)
    assert plan is not None and rows_of(plan) == 2
    batch = answer(core, plan, [RowPooled(1, b"two"), RowPooled(7, b"nobody's")])
    assert batch is not None and batch.pooled == [RowPooled(1, b"two")]
    assert [(end.reason, end.status) for end in batch.ends] == [
        (EndReason.ERROR, 500), (EndReason.LENGTH, 0),
    ]  # fmt: skip


def test_requests_that_generate_have_no_task_in_their_plans(core: SchedulerCore) -> None:
    assert core.add(1, 0, "t", token_work(prompt(5)), 0.0) is None
    plan = core.plan(0.0)
    assert plan is not None and [new.task for new in plan.added] == [""]


def plan_all(core: SchedulerCore) -> list[StepPlan]:
    """Every plan that the open requests need, answered with their payloads."""
    plans = []
    while (plan := core.plan(0.0)) is not None:
        plans.append(plan)
        answer(core, plan, [RowPooled(row, b"x") for row in range(rows_of(plan))])
        core.check()
    return plans


def test_a_task_that_needs_every_position_takes_nothing_from_the_cache() -> None:
    for task_prompts, computed in (("chunks", 8), ("all", 0)):
        limits = msgspec.structs.replace(small(), task_prompts=task_prompts)
        core = SchedulerCore(limits, 1, make_policy("fcfs"), True, 10)
        for request in (1, 2):
            assert core.add(request, 0, "t", pooling(9), 0.0) is None
            plans = plan_all(core)
        assert plans[0].added[0].num_computed == computed


def test_an_engine_without_chunks_computes_each_prompt_in_one_step() -> None:
    limits = Limits(8, 65, 4, 64, 64, 1000, task_prompts="whole")
    core = SchedulerCore(limits, 1, make_policy("fcfs"), True, 10)
    assert core.add(0, 0, "t", pooling(65), 0.0) is not None
    for request, length in enumerate((64, 40, 30, 20, 10, 10), 1):
        assert core.add(request, 0, "t", pooling(length), 0.0) is None
    plans = plan_all(core)
    assert [[chunk.count for chunk in plan.chunks] for plan in plans] == [
        [64], [40], [30, 20, 10], [10],
    ]  # fmt: skip
    assert core.idle


def test_an_engine_without_chunks_must_hold_its_longest_prompt_in_a_step() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens 32 is too small"):
        Limits(4, 65, 4, 32, 64, 1000, task_prompts="whole")


def test_an_engine_refuses_by_name_what_it_does_not_do() -> None:
    core = SchedulerCore(small(), 1, make_policy("fcfs"), True, 10, tasks=["embed"])
    refused = core.add(1, 0, "t", token_work(prompt(5)), 0.0)
    assert refused is not None and (refused.status, refused.retry_elsewhere) == (503, True)
    assert "does not do the task 'generate'; it does: embed" in refused.message
    assert core.add(2, 0, "t", pooling(5), 0.0) is None
    core.restart(2, tasks=["generate"])  # the next worker does something else
    assert core.add(3, 0, "t", token_work(prompt(5)), 0.0) is None
    assert core.add(4, 0, "t", pooling(5), 0.0) is not None
