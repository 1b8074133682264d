"""The life of a request in the scheduler's core: taken, planned, ended."""

from __future__ import annotations

import msgspec
import pytest
from support.scheduler.scheduler_harness import Engine, prompt, small, token_work

from penstock.protocol.process.service import TICK_SECONDS
from penstock.protocol.wire.messages.tokens import EndReason
from penstock.services.scheduler.service import SchedulerService


def test_a_request_gets_the_tokens_of_a_run_alone_and_ends_by_length() -> None:
    engine = Engine()
    assert engine.submit(1, prompt(10), max_tokens=5) is None
    engine.run()
    engine.assert_finished(1)
    assert len(engine.tokens(1)) == 5
    assert engine.end(1).reason is EndReason.LENGTH
    engine.assert_idle()


def test_a_stop_token_ends_a_request_and_rides_in_its_last_row() -> None:
    free = Engine()
    free.submit(1, prompt(10), max_tokens=8)
    free.run()
    stop = free.tokens(1)[4]
    engine = Engine()
    engine.submit(1, prompt(10), max_tokens=8, stop_ids=[stop])
    engine.run()
    assert engine.tokens(1) == free.tokens(1)[: free.tokens(1).index(stop) + 1]
    assert (engine.end(1).reason, engine.end(1).stop) == (EndReason.STOP, stop)
    engine.assert_idle()


def test_a_request_without_max_tokens_ends_at_the_models_limit() -> None:
    engine = Engine(small())
    engine.submit(1, prompt(50), max_tokens=None)
    engine.run()
    assert len(engine.tokens(1)) == 10
    assert engine.end(1).reason is EndReason.LENGTH


def test_the_next_step_is_planned_before_a_result_is_back() -> None:
    engine = Engine()
    engine.submit(1, prompt(10))
    first, second = engine.plan(), engine.plan()
    assert first is not None and second is not None
    assert (first.step, first.full, second.step, second.full) == (1, True, 2, False)
    assert engine.plan() is None  # two plans are unanswered
    engine.deliver()
    assert engine.plan() is not None


def run_long_prefill(engine: Engine) -> None:
    """A step that computes a prompt for some 60 ms is under way."""
    engine.submit(1, prompt(64), max_tokens=1)
    engine.plan()
    engine.answers[0] = msgspec.structs.replace(engine.answers[0], seconds=0.064)
    engine.deliver()
    engine.submit(2, prompt(60, start=7))
    assert engine.plan() is not None


def test_who_comes_while_long_prefill_runs_is_in_the_next_step() -> None:
    engine = Engine()
    run_long_prefill(engine)
    assert engine.plan() is None
    held = engine.core.held_for(engine.now)
    assert 0.01 < held < 0.06
    engine.submit(3, prompt(20, start=30))
    engine.now += held
    step = engine.plan()
    assert step is not None
    assert [new.prompt_len for new in step.added] == [20]
    assert not engine.core.held_for(engine.now)
    engine.run()
    engine.assert_finished(3)


def test_the_loop_wakes_when_a_plan_that_is_held_back_is_due() -> None:
    engine = Engine()
    service = object.__new__(SchedulerService)  # its loop alone: no sockets
    service.core = engine.core
    assert service.patience(engine.now) == TICK_SECONDS
    run_long_prefill(engine)
    held = engine.core.held_for(engine.now)
    assert service.patience(engine.now) == held < TICK_SECONDS
    assert service.patience(engine.now + held - 1e-5) == 0.001
    assert service.patience(engine.now + held) == TICK_SECONDS


def test_a_sequence_is_not_planned_past_its_length() -> None:
    engine = Engine()
    engine.submit(1, prompt(10), max_tokens=2)
    assert engine.plan() is not None and engine.plan() is not None
    engine.deliver()
    assert engine.plan() is None
    engine.deliver()
    engine.assert_finished(1)
    assert len(engine.plans) == 2


def test_a_prompt_whose_logprobs_alone_are_wanted_is_computed_once_and_brings_no_token() -> None:
    engine = Engine(small(max_num_batched_tokens=8))
    everything = list(range(engine.limits.vocab_size))
    engine.submit(1, prompt(20), max_tokens=0, prompt_logprobs=2, stop_ids=everything)
    engine.run()
    engine.assert_finished(1)
    assert engine.end(1).reason is EndReason.LENGTH
    assert [chunk.count for plan in engine.plans for chunk in plan.chunks] == [8, 8, 4]
    assert engine.core.stats().counters.generated_tokens == 0
    engine.assert_idle()


def test_where_nothing_is_to_be_computed_a_request_ends_without_a_step() -> None:
    engine = Engine()
    engine.submit(1, prompt(20), max_tokens=0)
    engine.take(engine.core.drain())
    engine.assert_finished(1)
    assert engine.plan() is None


def test_a_decode_step_that_changes_nothing_is_empty() -> None:
    engine = Engine()
    engine.submit(1, prompt(9), max_tokens=8)
    engine.plan()
    plan = engine.plan()
    assert plan is not None
    assert not (plan.gone or plan.added or plan.grown or plan.chunks)


def test_a_finished_slot_is_gone_in_the_next_plan_and_can_be_taken_in_it() -> None:
    engine = Engine(small(max_num_seqs=1))
    engine.submit(1, prompt(5), max_tokens=1)
    engine.submit(2, prompt(5, 40), max_tokens=1)
    assert engine.plan() is not None
    second = engine.plan()
    assert second is not None
    assert second.gone == [0] and second.added[0].slot == 0
    engine.run()
    engine.assert_finished(1)
    engine.assert_finished(2)


def test_sampling_that_only_a_worker_could_read_is_planned_all_the_same() -> None:
    engine = Engine()
    unread = msgspec.structs.replace(token_work(prompt(5), n=2), sampling=b"\xc1 no msgpack")
    assert engine.core.add(1, 0, "tokenizer", unread, 0.0) is None
    plan = engine.core.plan(0.0)
    assert plan is not None
    assert [(new.sampling, new.choice) for new in plan.added] == [
        (unread.sampling, 0), (unread.sampling, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([], "empty"),
        (prompt(60), "60 tokens"),
        ([5, 100], "token id 100"),
        ([-1], "token id -1"),
    ],
)
def test_a_prompt_that_can_never_run_is_a_400_that_says_why(tokens: list[int], words: str) -> None:
    engine = Engine(small())
    rejected = engine.submit(7, tokens, attempt=256)
    assert rejected is not None
    assert (rejected.id, rejected.attempt, rejected.status) == (7, 256, 400)
    assert words in rejected.message
    engine.assert_idle()


def test_a_prompt_too_long_for_kv_memory_is_a_400_that_names_the_flag() -> None:
    engine = Engine(small(num_blocks=3))
    assert engine.submit(1, prompt(11)) is None
    rejected = engine.submit(2, prompt(12))
    assert rejected is not None and rejected.status == 400
    assert "12 tokens" in rejected.message and "--num-kv-blocks" in rejected.message
    engine.run()
    engine.assert_finished(1)


def test_bytes_that_are_no_whole_tokens_are_a_400() -> None:
    engine = Engine()
    work = token_work([1, 2])
    broken = msgspec.structs.replace(work, prompt=b"12345")
    rejected = engine.core.add(1, 0, "tokenizer", broken, 0.0)
    assert rejected is not None and rejected.status == 400


def test_a_full_queue_answers_503_but_takes_continuations() -> None:
    engine = Engine(small(), max_waiting=2)
    assert engine.submit(1, prompt(5)) is None
    assert engine.submit(2, prompt(5), n=3) is None
    rejected = engine.submit(3, prompt(5))
    assert rejected is not None
    assert rejected.status == 503 and rejected.retry_after and rejected.retry_elsewhere
    assert engine.core.plan(0.0) is not None
    assert engine.core.stats().waiting == 0
    assert engine.submit(3, prompt(5)) is None
    assert engine.submit(4, prompt(5)) is None
    assert engine.submit(5, prompt(5)) is not None
    alone = Engine()
    alone.submit(6, prompt(5))
    alone.run()
    assert engine.submit(6, prompt(5), outputs={0: []}) is not None
    assert engine.core.add(6, 1, "t", token_work(prompt(5), outputs={0: [3]}), 0.0) is None
    assert engine.submit(7, prompt(5), accepted=True) is None


def test_what_waits_here_keeps_its_place_when_another_owner_asks_for_it() -> None:
    """Its tokenizer may have been lost before anybody heard that it was accepted."""
    engine = Engine(small(), max_waiting=2)
    for request_id in (1, 2):
        assert engine.submit(request_id, prompt(5)) is None
    assert engine.submit(3, prompt(5), accepted=True) is None
    assert engine.core.add(1, 1 << 8, "another", token_work(prompt(5)), 0.0) is None
    assert engine.core.holder(1) == (1 << 8, "another")
    assert engine.core.add(4, 1 << 8, "another", token_work(prompt(5)), 0.0) is not None


def test_the_slots_that_count_are_those_that_kv_memory_lets_run() -> None:
    engine = Engine(small())
    slots = engine.limits.max_num_seqs
    assert engine.core.usable_slots(0.0) == slots
    for request_id in range(1, 2 * slots + 1):
        engine.submit(request_id, prompt(20, request_id), max_tokens=8)
    for _ in range(4):
        assert engine.plan() is not None
        engine.deliver()
    running = engine.core.stats().running
    assert 1 < running < slots
    assert engine.core.usable_slots(0.25) == running
    engine.run()
    assert engine.core.usable_slots(1.0) < slots, "it may soon be full again"
    assert engine.core.usable_slots(100.0) == slots


def test_a_queue_full_of_prompt_tokens_answers_503_but_takes_one_prompt_of_any_length() -> None:
    engine = Engine(small(), max_waiting_tokens=40)
    assert engine.submit(1, prompt(50)) is None
    rejected = engine.submit(2, prompt(1))
    assert rejected is not None and rejected.status == 503 and rejected.retry_elsewhere
    assert "50 prompt tokens" in rejected.message and "limit of 40" in rejected.message
    engine.run()
    assert engine.submit(3, prompt(30), n=2) is None
    assert engine.submit(4, prompt(10)) is None
    assert engine.submit(5, prompt(1)) is not None
    engine.run()
    engine.assert_finished(4)
    engine.assert_idle()


def test_limits_that_cannot_work_are_refused_with_the_flags_named() -> None:
    with pytest.raises(ValueError, match="--max-num-batched-tokens"):
        small(max_num_seqs=64, max_num_batched_tokens=63)
    with pytest.raises(ValueError, match="num_blocks"):
        small(num_blocks=0)


def test_a_continuation_goes_on_with_the_next_index() -> None:
    whole = Engine()
    whole.submit(1, prompt(10), max_tokens=8)
    whole.run()
    engine = Engine()
    engine.submit(1, prompt(10), max_tokens=8, outputs={0: whole.tokens(1)[:3]}, attempt=1)
    engine.run()
    assert engine.tokens(1) == whole.tokens(1)
    engine.assert_finished(1)


def test_continuations_start_before_new_requests() -> None:
    engine = Engine(small(max_num_seqs=1))
    engine.submit(1, prompt(5))
    engine.core.add(2, 0, "t", token_work(prompt(6), outputs={0: [3]}), 0.0)
    plan = engine.plan()
    assert plan is not None
    assert len(plan.added[0].tokens) == 4 * 7


def test_a_continuation_that_is_complete_ends_at_once() -> None:
    engine = Engine()
    for request_id, output, max_tokens in ((1, [7, 9], 8), (2, [7, 8], 2)):
        work = token_work(prompt(4), max_tokens, {0: output}, stop_ids=[9])
        assert engine.core.add(request_id, 0, "t", work, 0.0) is None
    assert engine.core.plan(0.0) is None
    ((owner, batch),) = engine.core.expire(0.0)
    assert (owner, batch.ids, batch.indices, batch.counts) == ("t", [1, 2], [2, 2], [0, 0])
    assert [(end.row, end.reason) for end in batch.ends] == [
        (0, EndReason.STOP),
        (1, EndReason.LENGTH),
    ]
    engine.assert_idle()


def test_the_same_attempt_again_changes_nothing() -> None:
    engine = Engine()
    engine.submit(1, prompt(5))
    engine.plan()
    assert engine.core.add(1, 0, "tokenizer", token_work(prompt(9)), 0.0) is None
    assert engine.core.stats().open_requests == 1
    engine.run()
    engine.assert_finished(1)


def test_a_higher_attempt_replaces_a_lower_one_and_its_tokens() -> None:
    engine = Engine()
    engine.submit(1, prompt(5), owner="a")
    engine.plan()
    engine.plan()
    engine.submit(1, prompt(5), owner="b", attempt=1)
    assert engine.core.holder(1) == (1, "b")
    assert engine.core.holding("a") == []
    engine.run()
    engine.assert_finished(1)
    engine.assert_idle()


def test_cancel_needs_the_owner_and_an_attempt_high_enough() -> None:
    engine = Engine()
    engine.submit(1, prompt(5), owner="a", attempt=2)
    assert not engine.core.cancel(1, 1, "a")
    assert not engine.core.cancel(1, 2, "b")
    assert not engine.core.cancel(9, 2, "a")
    assert engine.core.cancel(1, 3, "a")
    engine.assert_idle()


def test_a_cancelled_running_request_leaves_its_slot_and_its_results_are_ignored() -> None:
    engine = Engine()
    engine.submit(1, prompt(5))
    engine.submit(2, prompt(6, 50))
    engine.plan()
    engine.plan()
    assert engine.cancel(1)
    engine.deliver()
    third = engine.plan()
    assert third is not None and third.gone == [0]
    engine.run()
    assert engine.tokens(1) == []
    engine.assert_finished(2)
    engine.assert_idle()


def test_one_choice_can_be_cancelled_alone() -> None:
    engine = Engine()
    engine.submit(1, prompt(5), n=3)
    engine.plan()
    assert engine.cancel(1, choice=1)
    assert not engine.cancel(1, choice=1)
    engine.run()
    engine.assert_finished(1, 0)
    engine.assert_finished(1, 2)
    engine.assert_idle()


def test_a_lost_owner_takes_all_its_requests_with_it() -> None:
    engine = Engine(small(max_num_seqs=2))
    for request_id in range(6):
        engine.submit(request_id, prompt(5, request_id), owner="ab"[request_id % 2])
    engine.plan()
    assert engine.core.holding("a") == [(0, 0), (2, 0), (4, 0)]
    for request_id in (0, 2, 4):
        assert engine.cancel(request_id)
    assert engine.core.owners() == ["b"]
    engine.run()
    for request_id in (1, 3, 5):
        engine.assert_finished(request_id)
    engine.assert_idle()


def test_one_choice_with_output_makes_the_whole_request_a_continuation() -> None:
    engine = Engine(small(), max_waiting=1)
    assert engine.submit(1, prompt(5)) is None
    work = token_work(prompt(4), outputs={0: [3], 1: []})
    assert engine.core.add(2, 0, "t", work, 0.0) is None
    plan = engine.plan()
    assert plan is not None
    assert [new.length for new in plan.added] == [5, 4, 5]


def test_requests_past_their_deadline_end_whether_they_wait_or_run() -> None:
    engine = Engine(small(max_num_seqs=1))
    engine.submit(1, prompt(5), time_left=2.0, max_tokens=30)
    engine.submit(2, prompt(5), time_left=1.0)
    engine.submit(3, prompt(5), time_left=100.0)
    engine.step()
    engine.now = 1.5
    engine.expire()
    assert (engine.end(2).reason, engine.end(2).status) == (EndReason.ERROR, 504)
    assert "waiting" in engine.end(2).message
    assert engine.streams[1, 0].open
    engine.now = 2.5
    engine.run()
    assert engine.end(1).status == 504
    assert "running" in engine.end(1).message
    engine.assert_finished(3)
    engine.assert_idle()


def test_counters_add_up() -> None:
    engine = Engine()
    engine.submit(1, prompt(5), n=2, max_tokens=3)
    engine.submit(2, prompt(7), max_tokens=4)
    engine.run()
    stats = engine.core.stats()
    assert stats.counters.prompt_tokens == 12
    assert stats.counters.generated_tokens == 10
    assert stats.counters.steps == len(engine.plans)
    assert stats.blocks_used + stats.blocks_free + stats.blocks_cached == stats.blocks_total
