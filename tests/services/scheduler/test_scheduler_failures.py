"""Failed steps, bad rows, lost results and new epochs."""

from __future__ import annotations

import msgspec
import pytest
from support.scheduler.scheduler_harness import ROOMY, Engine, prompt, small, token_work
from support.scheduler.simulated_worker import token_bytes

from penstock.protocol.wire.messages.steps import StepFailed, StepResult
from penstock.protocol.wire.messages.tokens import EndReason
from penstock.services.scheduler.core import SchedulerCore
from penstock.services.scheduler.policy_choice import make_policy


def test_after_a_failed_step_everything_is_computed_again() -> None:
    engine = Engine()
    engine.worker.fail_steps[3] = "device lost"
    for request_id in range(3):
        engine.submit(request_id, prompt(9, 30 * request_id), max_tokens=8)
    engine.run()
    for request_id in range(3):
        engine.assert_finished(request_id)
    assert [plan.step for plan in engine.plans] == list(range(1, len(engine.plans) + 1))
    assert [plan.step for plan in engine.plans if plan.full] == [1, 5]
    engine.assert_idle()


def test_a_failure_after_the_answer_also_brings_a_full_plan() -> None:
    engine = Engine(max_in_flight=1)
    engine.submit(1, prompt(9), max_tokens=8)
    for _ in range(3):
        assert engine.plan() is not None
        engine.deliver()
    engine.worker.slots.clear()  # the worker refused plan 3 when it came a second time
    engine.worker._needs_full = True
    engine.take(engine.core.fail(StepFailed(1, 3, "plan 3 came, plan 4 was due"), 0.0))
    plan = engine.plan()
    assert plan is not None and plan.full
    assert engine.core.fail(StepFailed(1, 3, "plan 3 came, plan 4 was due"), 0.0) == []
    engine.deliver()
    plan = engine.plan()
    assert plan is not None and not plan.full
    engine.run()
    engine.assert_finished(1)


@pytest.mark.parametrize("lost", ["plan", "result", "a rank's plan"])
def test_no_request_is_blamed_for_messages_that_get_lost(lost: str) -> None:
    engine = Engine()
    engine.submit(1, prompt(9), max_tokens=8)
    for _ in range(5):
        first, second = engine.plan(), engine.plan()
        assert first is not None and second is not None
        if lost == "plan":
            engine.answers.clear()
            gap = f"plan {second.step} came, plan {first.step} was due"
            engine.answers.append(StepFailed(1, second.step, gap))
        elif lost == "a rank's plan":  # the first rank has answered what this one missed
            engine.answers.clear()
            engine.answers.append(StepFailed(1, first.step, "an older plan was due", missed=True))
        else:
            engine.answers.popleft()
        engine.worker.drop_slots()
        engine.deliver()
    engine.run()
    engine.assert_finished(1)


def test_blocks_of_a_failed_step_leave_the_prefix_cache() -> None:
    engine = Engine()
    engine.worker.fail_steps[1] = "device lost"
    engine.submit(1, prompt(16), max_tokens=1)
    engine.submit(2, prompt(16), max_tokens=1, seed=1)
    engine.run()
    engine.assert_finished(1)  # the worker checks every read
    engine.assert_finished(2)


def test_a_poisonous_request_takes_nobody_along() -> None:
    engine = Engine(poison=99)
    engine.submit(1, prompt(9), max_tokens=8)
    engine.plan()
    engine.deliver()
    for request_id in range(2, 6):
        engine.submit(request_id, prompt(7, 10 * request_id), max_tokens=4)
    engine.submit(6, [*prompt(5), 99], max_tokens=4)
    engine.submit(7, [99], max_tokens=4)
    engine.run()
    for request_id in range(1, 6):
        engine.assert_finished(request_id)
    for request_id in (6, 7):
        end = engine.end(request_id)
        assert (end.reason, end.status) == (EndReason.ERROR, 500)
        assert "token 99 is poison" in end.message
    assert engine.core.stats().counters.failed_steps == 5  # once together, twice each alone
    engine.assert_idle()


def test_the_log_hears_which_request_failed_and_why() -> None:
    engine = Engine(poison=99)
    heard: list[tuple[str, int]] = []
    engine.core.follow_faults(
        lambda request, ending: heard.append((request.head.request_id, ending.status))
    )
    for number, last in ((1, 98), (2, 99)):
        work = token_work([5, 6, last], max_tokens=2)
        head = msgspec.structs.replace(work.head, request_id=f"req-{number}")
        engine.run_alone(msgspec.structs.replace(work, head=head), number)
    assert heard == [("req-2", 500)]


def test_a_request_that_turns_poisonous_late_takes_nobody_along() -> None:
    engine = Engine(small(vocab_size=40, max_num_seqs=4))
    engine.submit(1, prompt(5), max_tokens=12)
    engine.run()
    late = engine.tokens(1)[6]
    engine = Engine(small(vocab_size=40, max_num_seqs=4), poison=late)
    engine.submit(1, prompt(5), max_tokens=12)
    for request_id in (2, 3):
        engine.submit(request_id, prompt(5, request_id), max_tokens=12)
    engine.run()
    for request_id in (1, 2, 3):
        if late in engine.streams[request_id, 0].expected[:-1]:
            assert engine.end(request_id).reason is EndReason.ERROR
        else:
            engine.assert_finished(request_id)


def test_suspects_run_alone_until_they_have_produced_a_token() -> None:
    engine = Engine()
    engine.worker.fail_steps[1] = "once"
    for request_id in range(3):
        engine.submit(request_id, prompt(6, 30 * request_id), max_tokens=6)
    engine.plan()
    engine.deliver()
    engine.submit(9, prompt(3), max_tokens=2)
    alone = 0
    while engine.core.stats().counters.generated_tokens == 0:
        engine.plan()
        assert len(engine.worker.slots) <= 1
        alone += len(engine.worker.slots)
        if engine.answers:
            engine.deliver()
    assert alone
    engine.run()
    for request_id in (0, 1, 2, 9):
        engine.assert_finished(request_id)


def test_what_was_lost_twice_without_a_token_runs_alone_here() -> None:
    """It may be what ended two engines; what was lost once runs with the others."""
    engine = Engine()
    engine.submit(0, prompt(6), max_tokens=6, accepted=True, stalls=2)
    engine.submit(1, prompt(6, 30), max_tokens=6, accepted=True, stalls=1)
    engine.submit(2, prompt(6, 60), max_tokens=6)
    engine.plan()
    assert len(engine.worker.slots) == 1
    while not engine.streams[0, 0].received:
        assert len(engine.worker.slots) <= 1
        engine.step()
    engine.step()
    engine.step()
    assert len(engine.worker.slots) == 3
    engine.run()
    for request_id in range(3):
        engine.assert_finished(request_id)


def test_the_next_suspect_does_not_wait_for_the_end_of_the_one_before() -> None:
    engine = Engine()
    engine.worker.fail_steps[1] = "once"
    for request_id in range(3):
        engine.submit(request_id, prompt(6, 30 * request_id), max_tokens=100)
    while not all(engine.streams[request_id, 0].received for request_id in range(3)):
        engine.step()
    assert len(engine.tokens(0)) < 10
    engine.run()
    for request_id in range(3):
        engine.assert_finished(request_id)


def test_failures_with_new_tokens_in_between_cost_no_request() -> None:
    engine = Engine()
    for request_id in range(3):
        engine.submit(request_id, prompt(6, 30 * request_id), max_tokens=100)
    for _ in range(6):
        before = engine.core.stats().counters.generated_tokens
        while engine.core.stats().counters.generated_tokens < before + 12:
            engine.step()
        engine.worker.fail_steps[engine.core._in_flight.last + 1] = "now and then"
    engine.run()
    assert engine.core.stats().counters.failed_steps == 6
    for request_id in range(3):
        engine.assert_finished(request_id)


def test_rows_that_are_not_finite_end_their_request_only() -> None:
    engine = Engine(not_a_number=99)
    engine.submit(1, [*prompt(5), 99, 1, 2], max_tokens=4)
    engine.submit(2, prompt(9), max_tokens=4)
    engine.run()
    end = engine.end(1)
    assert (end.reason, end.status) == (EndReason.ERROR, 500)
    assert "NaN" in end.message
    engine.assert_finished(2)
    engine.submit(3, [*prompt(5), 99, 1, 2], max_tokens=4)
    engine.run()
    assert engine.streams[3, 0].end is not None
    assert engine.end(3).reason is EndReason.ERROR


@pytest.mark.parametrize("max_in_flight", [1, 2, 4])
def test_a_request_that_bans_every_token_ends_alone_and_the_cache_keeps_its_prompt(
    max_in_flight: int,
) -> None:
    engine = Engine(max_in_flight=max_in_flight)
    engine.worker.banned_seed = 7
    engine.submit(1, prompt(41), max_tokens=8)
    engine.run()
    cached = engine.core.stats().blocks_cached
    engine.submit(2, [*prompt(41), 1, 2], max_tokens=8, seed=7)
    engine.submit(3, prompt(41), max_tokens=8)
    engine.run()
    end = engine.end(2)
    assert (end.reason, end.status) == (EndReason.ERROR, 400)
    assert "its own parameters" in end.message
    assert engine.tokens(2) == []
    engine.assert_finished(3)
    assert engine.core.stats().blocks_cached >= cached
    engine.submit(4, prompt(41), max_tokens=8)
    engine.run()
    engine.assert_finished(4)
    assert engine.streams[4, 0].cached == 40
    engine.assert_idle()


@pytest.mark.parametrize("max_in_flight", [1, 2, 4])
def test_a_sequence_that_used_a_bad_block_of_another_is_computed_again(max_in_flight: int) -> None:
    engine = Engine(not_a_number=999_999, max_in_flight=max_in_flight)
    engine.submit(1, prompt(9), max_tokens=8)
    engine.submit(2, prompt(9), max_tokens=8, seed=1)
    engine.plan()
    engine.deliver()
    shared = engine.worker.slots[0].blocks[0]
    assert shared == engine.worker.slots[1].blocks[0]
    engine.worker._memory[shared][1] = -1  # a glitch of the device
    engine.run()
    assert engine.end(1).reason is EndReason.ERROR  # it computed the block
    engine.assert_finished(2)
    engine.submit(3, prompt(9), max_tokens=8)
    engine.run()
    engine.assert_finished(3)


def test_results_nobody_waits_for_are_ignored_and_counted() -> None:
    engine = Engine()
    engine.submit(1, prompt(5))
    engine.plan()
    for stray in (
        StepResult(0, 1, token_bytes([1]), [], 0.0),
        StepResult(1, 2, token_bytes([1]), [], 0.0),
        StepResult(1, 0, b"", [], 0.0),
    ):
        assert engine.core.apply(stray, 0.0) == []
    assert engine.core.fail(StepFailed(1, 7, "no such step"), 0.0) == []
    assert engine.core.stats().counters.ignored_results == 4
    engine.run()
    engine.assert_finished(1)


@pytest.mark.parametrize("lost", ["whole", "cut"])
def test_a_lost_result_is_made_good_by_a_full_plan(lost: str) -> None:
    core = SchedulerCore(ROOMY, 1, make_policy("fcfs"), True, 10)
    core.add(1, 0, "t", token_work(prompt(5), max_tokens=4), 0.0)
    assert core.plan(0.0) is not None and core.plan(0.0) is not None
    if lost == "whole":
        assert core.apply(StepResult(1, 2, token_bytes([7]), [], 0.0), 0.0) == []
    else:
        assert core.apply(StepResult(1, 1, b"123", [], 0.0), 0.0) == []
    core.check()
    plan = core.plan(0.0)
    assert plan is not None and plan.full and plan.step == 3
    assert plan.added[0].tokens == token_bytes(prompt(5))


def test_a_new_epoch_begins_with_an_empty_cache_and_loses_no_request() -> None:
    engine = Engine()
    for request_id in range(3):
        engine.submit(request_id, prompt(17, 30 * request_id), max_tokens=9)
    for _ in range(4):
        engine.step()
    engine.plan()
    engine.restart()
    assert engine.core.stats().blocks_cached == 0
    plan = engine.plan()
    assert plan is not None and (plan.epoch, plan.step, plan.full) == (2, 1, True)
    engine.run()
    for request_id in range(3):
        engine.assert_finished(request_id)
    engine.assert_idle()


def test_a_prompt_that_is_only_to_be_scored_outlives_its_worker() -> None:
    engine = Engine()
    engine.submit(1, prompt(17), max_tokens=0, prompt_logprobs=1)
    engine.plan()
    engine.restart()
    engine.run()
    engine.assert_finished(1)
    engine.assert_idle()


@pytest.mark.parametrize("row_tokens", [1, 3])
def test_what_outgrows_a_smaller_engine_ends_with_an_error_that_names_its_limit(
    row_tokens: int,
) -> None:
    """Not as if it had all the tokens that were asked for."""
    row_count = (lambda: row_tokens) if row_tokens > 1 else None
    engine = Engine(small(max_row_tokens=row_tokens), row_count=row_count)
    engine.submit(1, prompt(10), max_tokens=20)
    engine.submit(2, prompt(10, 40), max_tokens=5)
    engine.step()
    engine.restart(small(num_blocks=5, max_row_tokens=row_tokens))
    assert engine.core.limits.max_sequence_len == 20
    engine.run()
    end = engine.end(1)
    assert (end.reason, end.status) == (EndReason.ERROR, 503)
    assert "20 tokens of 30 at most" in end.message and "holds 20 for one request" in end.message
    assert len(engine.tokens(1)) == 10, "all that the engine could hold"
    engine.assert_finished(2)
    engine.assert_idle()


def test_a_request_that_a_larger_engine_had_taken_is_continued_as_far_as_it_goes() -> None:
    engine = Engine(small(num_blocks=5))
    work = token_work(prompt(10), max_tokens=20, outputs={0: [3, 4]}, accepted=True)
    assert engine.core.add(1, 1, "t", work, 0.0) is None
    assert engine.core.max_output(1) == 20, "what it was promised"
    batches = []
    while (plan := engine.core.plan(0.0)) is not None:
        batches += engine.core.apply(engine.worker.execute(plan), 0.0)
    (end,) = [end for _, batch in batches for end in batch.ends]
    assert (end.reason, end.status) == (EndReason.ERROR, 503)
    assert "holds 20 for one request" in end.message


def test_a_request_that_is_too_large_to_be_continued_here_is_sent_elsewhere() -> None:
    """A larger engine may come back: no answer that has begun is refused for good."""
    engine = Engine(small(num_blocks=5))
    work = token_work(prompt(10), max_tokens=20, outputs={0: [3] * 12, 1: [4]}, accepted=True)
    rejected = engine.core.add(1, 1, "t", work, 0.0)
    assert rejected is not None and (rejected.status, rejected.retry_elsewhere) == (503, True)
    assert "22 tokens of 30 at most" in rejected.message
    new = engine.core.add(2, 1, "t", token_work(prompt(10), max_tokens=20), 0.0)
    assert new is None and engine.core.max_output(2) == 10, "a new one gets what there is"
    engine.core.check()


def test_a_smaller_worker_after_a_restart_gets_only_what_it_can_hold() -> None:
    engine = Engine(small())
    engine.submit(1, prompt(30), max_tokens=5)
    engine.submit(2, prompt(6), max_tokens=5)
    engine.plan()
    engine.restart(small(num_blocks=4))
    engine.run()
    end = engine.end(1)
    assert (end.reason, end.status) == (EndReason.ERROR, 503)
    engine.assert_finished(2)


def test_only_what_was_in_a_step_when_the_worker_ended_may_have_ended_it() -> None:
    engine = Engine(small(max_num_seqs=2))
    engine.submit(1, prompt(5), max_tokens=5)
    engine.step()
    while engine.answers:
        engine.deliver()
    for request_id in (2, 3):
        engine.submit(request_id, prompt(5, 30 * request_id), n=request_id - 1, max_tokens=5)
    engine.plan()
    engine.take(engine.core.worker_gone())
    engine.core.check()
    assert [engine.core.failures(request_id) for request_id in (1, 2, 3, 4)] == [1, 1, 0, 0]
    engine.restart()
    assert [engine.core.failures(request_id) for request_id in (1, 2, 3)] == [1, 1, 0]
    engine.run()
    for request_id in (1, 2, 3):
        engine.assert_finished(request_id)


def test_proven_sequences_come_back_together_after_one_failure() -> None:
    engine = Engine()
    for request_id in range(3):
        engine.submit(request_id, prompt(6, 30 * request_id))
    engine.step()
    engine.worker.fail_steps[engine.core._in_flight.last + 1] = "once"
    while engine.core.stats().counters.failed_steps == 0:
        engine.step()
    plan = engine.plan()
    assert plan is not None and len(plan.added) == 3
    engine.run()
    for request_id in range(3):
        engine.assert_finished(request_id)


@pytest.mark.parametrize("max_in_flight", [1, 2, 4])
def test_a_row_whose_grammar_is_not_compiled_yet_is_tried_again_and_holds_up_no_other(
    max_in_flight: int,
) -> None:
    engine = Engine(max_in_flight=max_in_flight)
    compiled = False
    engine.worker.is_early = lambda sampling: sampling.seed == 7 and not compiled
    engine.submit(1, prompt(41), max_tokens=40)
    engine.submit(2, [*prompt(41), 1, 2], max_tokens=6, seed=7, n=2)
    for _ in range(20):
        engine.step()
        engine.now += 0.001
    assert len(engine.tokens(1)) >= 20 - max_in_flight
    assert engine.tokens(2) == engine.tokens(2, 1) == []
    starts = engine.started.count(2)
    assert 4 <= starts <= 8, "it is tried again, and not at every step"
    compiled = True
    engine.run()
    for request_id, choice in ((1, 0), (2, 0), (2, 1)):
        engine.assert_finished(request_id, choice)
    assert engine.streams[2, 0].cached == 40
    engine.assert_idle()


def test_a_grammar_that_is_never_compiled_ends_its_request_alone_after_five_seconds() -> None:
    engine = Engine()
    engine.worker.is_early = lambda sampling: sampling.seed == 7
    engine.submit(1, prompt(9), max_tokens=8, seed=7)
    engine.submit(2, prompt(9), max_tokens=8)
    engine.run()
    engine.assert_finished(2)
    end = engine.end(1)
    assert (end.reason, end.status) == (EndReason.ERROR, 503)
    assert "not compiled within 5 s" in end.message
    assert 4.5 < engine.now < 6.0
    assert engine.started.count(1) < 40
    engine.assert_idle()


def test_who_waits_for_a_grammar_can_be_cancelled_and_survives_a_restart() -> None:
    engine = Engine()
    compiled = False
    engine.worker.is_early = lambda _: not compiled
    for request_id in (1, 2):
        engine.submit(request_id, prompt(9), max_tokens=8)
    engine.step()
    assert engine.core.stats().waiting == 2
    assert engine.core.held_for(engine.now) > 0 or engine.answers
    assert engine.cancel(1)
    engine.restart()
    compiled = True
    engine.run()
    engine.assert_finished(2)
    engine.assert_idle()


def test_a_step_that_several_ranks_fail_is_rolled_back_once() -> None:
    engine = Engine()
    engine.submit(1, prompt(5))
    engine.plan()
    engine.plan()
    for reason in ("rank 1: out of memory", "rank 0: out of memory"):
        engine.take(engine.core.fail(StepFailed(1, 1, reason), engine.now))
    assert engine.core.stats().counters.failed_steps == 1
    full = engine.core.plan(engine.now)
    assert full is not None and full.full
    engine.take(engine.core.fail(StepFailed(1, 2, "rank 2: plan 2 came, 1 was due"), engine.now))
    assert engine.core.stats().counters.failed_steps == 1, "the full plan is under way"


def test_a_rank_that_repeats_its_failure_rolls_back_once_for_each_time_that_it_is_lost() -> None:
    engine = Engine()
    engine.submit(1, prompt(5), max_tokens=20)
    engine.plan()
    engine.deliver()
    first, second = engine.plan(), engine.plan()
    assert first is not None and second is not None
    engine.worker.drop_slots()
    engine.answers.clear()
    for step in (second.step, second.step, first.step):  # the failure of the first was lost
        engine.take(engine.core.fail(StepFailed(1, step, "rank 1: out of memory"), engine.now))
    assert engine.core.stats().counters.failed_steps == 1
    full = engine.plan()
    assert full is not None and full.full
    for step in (first.step, second.step):
        engine.take(engine.core.fail(StepFailed(1, step, "rank 1: out of memory"), engine.now))
    assert engine.core.stats().counters.failed_steps == 1, "the full plan is under way"
    engine.deliver()
    behind = engine.plan()
    assert behind is not None and not behind.full
    engine.worker.drop_slots()  # the full plan has not come to rank 1
    engine.answers.clear()
    engine.take(engine.core.fail(StepFailed(1, behind.step, "rank 1"), engine.now))
    assert engine.core.stats().counters.failed_steps == 2
    engine.run()
    engine.assert_finished(1)
