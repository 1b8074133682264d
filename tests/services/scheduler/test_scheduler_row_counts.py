"""Rows of a step that bring none to several tokens."""

from __future__ import annotations

from array import array

import msgspec
import pytest
from support.scheduler.scheduler_harness import Engine, prompt, small, token_work
from support.scheduler.simulated_worker import token_bytes, token_list

from penstock.protocol.logprobs import PackedLogprobs, entry_bytes
from penstock.protocol.wire.messages.steps import SampledLogprobs, StepPlan, StepResult
from penstock.protocol.wire.messages.tokens import EndReason, TokenBatch
from penstock.services.scheduler.core import SchedulerCore
from penstock.services.scheduler.limits import Limits
from penstock.services.scheduler.policy_choice import make_policy

LIMITS = small(max_row_tokens=4)


def begun(max_tokens: int = 20, stop_ids: list[int] | None = None, n: int = 1) -> SchedulerCore:
    """A core with one request of three tokens whose first step is planned."""
    core = SchedulerCore(LIMITS, 1, make_policy("fcfs"), True, 10, max_in_flight=1)
    work = token_work(prompt(3), max_tokens=max_tokens, stop_ids=stop_ids, n=n)
    assert core.add(1, 0, "t", work, 0.0) is None
    assert isinstance(core.plan(0.0), StepPlan)
    return core


def answer(core: SchedulerCore, step: int, *rows: list[int], **more: object) -> list[TokenBatch]:
    tokens = token_bytes([token for row in rows for token in row])
    result = StepResult(1, step, tokens, [], 0.001, counts=bytes(map(len, rows)))
    batches = core.apply(msgspec.structs.replace(result, **more), 0.0)
    core.check()
    return [batch for _, batch in batches]


def test_a_row_of_several_tokens_is_one_row_at_the_index_of_its_first() -> None:
    core = begun()
    (first,) = answer(core, 1, [5, 6, 7])
    assert (first.indices, first.counts, token_list(first.tokens)) == ([0], [3], [5, 6, 7])
    assert [start.row for start in first.starts] == [0]
    core.plan(0.0)
    (second,) = answer(core, 2, [8])
    assert (second.indices, second.counts, token_list(second.tokens)) == ([3], [1], [8])
    assert core.stats().counters.generated_tokens == 4


def test_a_row_without_tokens_sends_nothing_and_is_planned_again() -> None:
    core = begun()
    assert answer(core, 1, []) == []
    for step in (2, 3):
        plan = core.plan(0.0)
        assert plan is not None
        assert not (plan.gone or plan.added or plan.chunks)
        assert answer(core, step, []) == []
    core.plan(0.0)
    (batch,) = answer(core, 4, [5])
    assert (batch.indices, token_list(batch.tokens)) == ([0], [5])
    assert [start.row for start in batch.starts] == [0]


def test_what_comes_after_a_stop_token_in_its_row_is_dropped_and_counts_nowhere() -> None:
    core = begun(stop_ids=[9, 8])
    (batch,) = answer(core, 1, [5, 9, 8, 7])
    assert (batch.counts, token_list(batch.tokens)) == ([2], [5, 9])
    assert [(end.row, end.reason, end.stop) for end in batch.ends] == [(0, EndReason.STOP, 9)]
    assert core.stats().counters.generated_tokens == 2
    assert core.idle


@pytest.mark.parametrize(
    ("row", "reason", "kept"),
    [([5, 6, 7], EndReason.LENGTH, 2), ([5, 9, 7], EndReason.STOP, 2),
     ([5, 6, 9], EndReason.LENGTH, 2)],
)  # fmt: skip
def test_the_first_end_in_the_order_of_tokens_wins(
    row: list[int], reason: EndReason, kept: int
) -> None:
    core = begun(max_tokens=2, stop_ids=[9])
    (batch,) = answer(core, 1, row)
    assert token_list(batch.tokens) == row[:kept]
    assert [end.reason for end in batch.ends] == [reason]
    assert core.idle


def test_logprobs_of_a_row_are_one_entry_for_each_token_that_is_kept() -> None:
    core = begun(stop_ids=[9])
    size = entry_bytes(1) // 4
    entries = array("i", [value for token in (5, 9, 7) for value in [token] * size])
    packed = SampledLogprobs(0, PackedLogprobs(1, entries.tobytes()))
    (batch,) = answer(core, 1, [5, 9, 7], logprobs=[packed])
    (found,) = batch.logprobs
    assert found.tokens is not None
    assert token_list(found.tokens.entries) == [5] * size + [9] * size


@pytest.mark.parametrize("counts", [b"\x02", b"\x05\x00", b"\x01\x01\x01", b"\x03\x00"])
def test_a_result_whose_counts_do_not_fit_is_a_failed_step(counts: bytes) -> None:
    core = begun(n=2)
    assert core.apply(StepResult(1, 1, token_bytes([1, 2]), [], 0.001, counts=counts), 0.0) == []
    core.check()
    assert core.stats().counters.failed_steps == 1
    plan = core.plan(0.0)
    assert plan is not None
    assert plan.full


def test_an_engine_that_brings_one_token_a_row_sends_no_counts() -> None:
    limits = small()
    core = SchedulerCore(limits, 1, make_policy("fcfs"), True, 10)
    core.add(1, 0, "t", token_work(prompt(3)), 0.0)
    core.plan(0.0)
    core.apply(StepResult(1, 1, token_bytes([1]), [], 0.001, counts=b"\x01"), 0.0)
    assert core.stats().counters.failed_steps == 1


def test_every_decode_row_has_blocks_for_the_most_that_it_may_bring() -> None:
    engine = Engine(small(max_row_tokens=4, num_blocks=40, block_size=2), row_count=lambda: 4)
    for request_id in range(4):
        engine.submit(request_id, prompt(5, request_id), max_tokens=13)
    engine.run()  # the harness compares tables and positions at each step
    for request_id in range(4):
        engine.assert_finished(request_id)
    assert engine.worker.executed <= 7, "four tokens a step"
    engine.assert_idle()


def test_slots_that_could_not_all_have_a_full_row_are_refused() -> None:
    with pytest.raises(ValueError, match=r"max_num_seqs 4 is too large .* 4 tokens of every"):
        small(max_row_tokens=4, max_num_batched_tokens=15)
    with pytest.raises(ValueError, match="max_row_tokens is 256"):
        Limits(100, 4, 1, 1000, 100, 100, 256)


def test_a_result_without_counts_brings_one_token_for_each_row() -> None:
    plain, counted = begun(max_tokens=30, n=2), begun(max_tokens=30, n=2)
    for step in range(1, 20):
        tokens = token_bytes([step, step])
        results = [StepResult(1, step, tokens, [], 0.001, counts=c) for c in (b"", b"\x01\x01")]
        assert plain.apply(results[0], 0.0) == counted.apply(results[1], 0.0)
        plain.check()
        assert plain.stats() == counted.stats()
        assert plain.plan(0.0) == counted.plan(0.0), "as many blocks are reserved"
