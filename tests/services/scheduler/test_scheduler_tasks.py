"""Requests whose task makes something of their prompt: no token, and what the worker sent."""

from __future__ import annotations

from array import array
from itertools import chain
from typing import Any

import msgspec
import pytest
from support.scheduler.scheduler_harness import prompt, small, token_work
from support.scheduler.simulated_worker import token_bytes

from penstock.protocol.prefix_digest import DIGEST_BYTES, chain_root, extended
from penstock.protocol.wire.messages.requests import ChoiceState, TokenWork
from penstock.protocol.wire.messages.steps import StepPlan, StepResult
from penstock.protocol.wire.messages.tokens import EndReason, RowPooled, TokenBatch
from penstock.services.scheduler.admission import Offers
from penstock.services.scheduler.core import SchedulerCore
from penstock.services.scheduler.limits import Limits
from penstock.services.scheduler.policy_choice import make_policy
from penstock.services.scheduler.shortest_job import ShortestJobFirst


def pooling(length: int, n: int = 1) -> TokenWork:
    work = token_work(prompt(length), max_tokens=0, n=n, stop_ids=[3])
    head = msgspec.structs.replace(work.head, task="embed")
    return msgspec.structs.replace(work, head=head)


def batch(*lengths: int, **changes: Any) -> TokenWork:
    """Prompts of these lengths, each of a choice; they begin with different tokens."""
    prompts = [prompt(length, 7 * number) for number, length in enumerate(lengths)]
    work = token_work([*chain(*prompts)], max_tokens=0, n=len(lengths), stop_ids=[3])
    head = msgspec.structs.replace(work.head, task="embed")
    changes = {"head": head, "lengths": list(lengths), "prefix": b"", **changes}
    return msgspec.structs.replace(work, **changes)


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
    core = SchedulerCore(small(), 1, make_policy("fcfs"), True, 10, offers=Offers(["embed"]))
    refused = core.add(1, 0, "t", token_work(prompt(5)), 0.0)
    assert refused is not None and (refused.status, refused.retry_elsewhere) == (503, True)
    assert "does not do the task 'generate'; it does: embed" in refused.message
    assert core.add(2, 0, "t", pooling(5), 0.0) is None
    core.restart(2, offers=Offers(["generate"]))  # the next worker does something else
    assert core.add(3, 0, "t", token_work(prompt(5)), 0.0) is None
    assert core.add(4, 0, "t", pooling(5), 0.0) is not None


# --- a batch: choices with prompts of their own


def computed(plan: StepPlan) -> list[tuple[int, list[int], int]]:
    """Choice, prompt and beginning of the second text of each slot that a plan fills."""
    return [(new.choice, array("i", new.tokens).tolist(), new.second) for new in plan.added]


def test_each_choice_of_a_batch_computes_its_own_prompt(core: SchedulerCore) -> None:
    assert core.add(1, 0, "t", batch(3, 9, 5, seconds=[0, 4, 0]), 0.0) is None
    core.check()
    plan = core.plan(0.0)
    assert plan is not None
    assert computed(plan) == [(0, prompt(3), 0), (1, prompt(9, 7), 4), (2, prompt(5, 14), 0)]
    found = answer(core, plan, [RowPooled(row, b"%d" % row) for row in range(3)])
    assert found is not None
    assert (found.ids, found.choices) == ([1, 1, 1], [0, 1, 2])
    assert [one.values for one in found.pooled] == [b"0", b"1", b"2"]
    assert core.counters.prompt_tokens == 17
    assert core.idle


def test_a_batch_of_more_prompts_than_there_are_slots_takes_turns_beside_others(
    core: SchedulerCore,
) -> None:
    assert core.add(1, 0, "t", batch(*[5] * 9), 0.0) is None
    assert core.add(2, 0, "t", pooling(6), 1.0) is None
    core.check()
    plans = plan_all(core)
    assert [rows_of(plan) for plan in plans] == [4, 4, 2]  # four slots
    assert core.idle


def test_a_batch_goes_on_with_the_choices_that_are_left(core: SchedulerCore) -> None:
    head = msgspec.structs.replace(batch(4).head, accepted=True)
    left = batch(4, 6, choices=[ChoiceState(2), ChoiceState(5)], head=head)
    assert core.add(1, 3, "t", left, 0.0) is None
    plan = core.plan(0.0)
    assert plan is not None
    assert computed(plan) == [(2, prompt(4), 0), (5, prompt(6, 7), 0)]
    assert core.cancel(1, 3, "t", choice=5)
    found = answer(core, plan, [RowPooled(0, b"two"), RowPooled(1, b"five")])
    assert found is not None and found.choices == [2]
    assert core.idle


def test_prompts_that_are_preempted_are_computed_again() -> None:
    core = SchedulerCore(small(num_blocks=15), 1, make_policy("fcfs"), False, 10)
    work = token_work(prompt(20), max_tokens=30)
    assert core.add(1, 0, "t", work, 0.0) is None
    assert core.add(2, 0, "t", batch(9, 30, 9), 1.0) is None
    found: dict[int, bytes] = {}
    for _ in range(200):
        core.check()
        plan = core.plan(2.0)
        if plan is None:
            break
        rows = len(core._in_flight.steps[-1].rows)
        pooled = [
            RowPooled(row, b"x")
            for row, one in enumerate(core._in_flight.steps[-1].rows)
            if one is not None and one.request.has_task
        ]
        result = StepResult(plan.epoch, plan.step, token_bytes([5] * rows), [], 0.1, pooled=pooled)
        for _, rows_back in core.apply(result, 2.0):
            found |= {rows_back.choices[one.row]: one.values for one in rows_back.pooled}
    assert core.idle and sorted(found) == [0, 1, 2]


def test_each_prompt_of_a_batch_counts_in_the_queue(core: SchedulerCore) -> None:
    assert core.add(1, 0, "t", batch(*[2] * 12), 0.0) is None  # whole, where nothing waits
    assert core.stats().waiting_requests == 12
    refused = core.add(2, 0, "t", pooling(5), 0.0)
    assert refused is not None and "12 requests are waiting already" in refused.message
    plan = core.plan(0.0)
    assert plan is not None and core.stats().waiting_requests == 8
    assert core.add(3, 0, "t", batch(2, 2, 2), 0.0) is not None  # 11 would wait
    assert core.add(4, 0, "t", batch(2, 2), 0.0) is None
    core.check()
    assert core.cancel(1, 0) and core.cancel(4, 0)
    core.check()
    assert core.stats().waiting_requests == 0


@pytest.mark.parametrize(
    "wrong", [{"lengths": [5, 6]}, {"lengths": [12]}, {"lengths": [-1, 13]}, {"seconds": [1]}]
)
def test_prompts_that_are_not_those_of_the_choices_are_refused(
    core: SchedulerCore, wrong: dict[str, Any]
) -> None:
    refused = core.add(1, 0, "t", batch(5, 7, **wrong), 0.0)
    assert refused is not None and refused.status == 400
    assert core.idle


def test_the_router_hears_what_all_prompts_of_a_batch_begin_with() -> None:
    limits = small(num_blocks=200, max_model_len=400, max_num_batched_tokens=400, block_size=16)
    core = SchedulerCore(limits, 1, make_policy("fcfs"), True, 10)
    common = prompt(70)
    ids = [[*common, *prompt(80, 5 * number)] for number in range(3)]
    work = batch(150, 150, 150)
    digests = extended(b"", chain_root(work.head), token_bytes(common))
    assert len(digests) == DIGEST_BYTES
    work = msgspec.structs.replace(work, prompt=token_bytes([*chain(*ids)]), prefix=digests)
    assert core.add(1, 0, "t", work, 0.0) is None
    plan_all(core)
    assert core.prefixes is not None
    report = core.prefixes.report(0)
    assert report is not None and report.held == digests


def test_sjf_reckons_with_the_prompts_of_a_batch_one_by_one() -> None:
    policy = ShortestJobFirst()
    core = SchedulerCore(small(), 1, policy, True, 100)
    assert core.add(1, 0, "t", batch(*[10] * 8), 0.0) is None
    assert core.add(2, 0, "t", pooling(20), 0.0) is None
    whole, alone = core._requests.get(1), core._requests.get(2)
    assert whole is not None and alone is not None
    assert policy.work(whole) == 10 and policy.work(alone) == 20
