"""The prefill of a step is bounded by time while somebody reads what others decode."""

from __future__ import annotations

import msgspec
import pytest
from support.scheduler.scheduler_harness import Engine, prompt, small

from penstock.protocol.wire.messages.engine import StepShape
from penstock.protocol.wire.messages.steps import StepResult
from penstock.services.scheduler.limits import Limits
from penstock.services.scheduler.prefill_budget import LEAST_TOKENS, STEP_SECONDS, PrefillBudget


def learnt(decode_seconds: float, token_seconds: float) -> PrefillBudget:
    budget = PrefillBudget(StepShape())
    for _ in range(100):
        budget.observe(8, 0, decode_seconds)
        budget.observe(8, 1000, decode_seconds + 1000 * token_seconds)
    return budget


def test_nothing_is_bounded_before_steps_of_both_kinds_were_seen() -> None:
    budget = PrefillBudget(StepShape())
    assert budget.most_tokens(8, 0) is None
    budget.observe(0, 500, 0.1)
    assert budget.most_tokens(8, 0) is None
    budget.observe(1, 0, 0.01)
    assert budget.most_tokens(8, 0) is not None


@pytest.mark.parametrize(
    ("decode_seconds", "token_seconds", "seconds"),
    [
        (0.002, 3e-6, 0.0065),  # of a fast device: what a step of 8.5 ms has left
        (0.006, 3e-6, 0.003072),  # ... but a chunk worth computing
        (0.005, 25e-6, 0.00625),  # of a slower one: 1.25 decode steps, which are less than that
        (0.060, 1e-3, 0.075),
        (0.030, 25e-6, 0.0256),
    ],
)
def test_prefill_beside_decode_fits_into_a_short_step_or_is_a_chunk_worth_computing(
    decode_seconds: float, token_seconds: float, seconds: float
) -> None:
    tokens = learnt(decode_seconds, token_seconds).most_tokens(8, 0)
    assert tokens is not None
    assert tokens * token_seconds == pytest.approx(seconds, rel=0.02)


@pytest.mark.parametrize(
    ("decoding", "waiting", "seconds"),
    [
        (100, 1, 0.00505), (100, 2, 0.00673), (100, 4, 0.01019), (100, 9, 0.01918),
        (8, 4, 0.0147), (8, 8, 0.0324), (8, 24, 0.0704), (8, 250, 0.1), (200, 50, 0.022),
    ],
)  # fmt: skip
def test_the_pause_grows_with_those_who_wait_and_their_share_up_to_a_tenth_of_a_second(
    decoding: int, waiting: int, seconds: float
) -> None:
    tokens = learnt(0.004, 25e-6).most_tokens(decoding, waiting)
    assert tokens is not None
    assert tokens * 25e-6 == pytest.approx(seconds, rel=0.02)


def test_patience_does_not_lengthen_the_pause_of_a_slow_device() -> None:
    budget = learnt(0.060, 1e-3)
    assert budget.most_tokens(1, 100) == budget.most_tokens(1, 9)


def test_chunks_are_never_cut_below_a_useful_size() -> None:
    assert learnt(0.001, 0.01).most_tokens(8, 0) == LEAST_TOKENS


@pytest.mark.parametrize("first_seconds", [0.012, 0.02, 0.2])
def test_a_slow_first_prompt_does_not_keep_chunks_small_for_ever(first_seconds: float) -> None:
    budget = PrefillBudget(StepShape())
    budget.observe(0, 128, first_seconds)
    for _ in range(10):
        budget.observe(14, 0, 0.0047)
    for _ in range(300):
        tokens = budget.most_tokens(14, 1)
        assert tokens is not None
        budget.observe(14, tokens, 0.0047 + 16e-6 * tokens)
        budget.observe(14, 0, 0.0047)
    assert tokens * 16e-6 > 0.9 * 1.25 * 0.0047


def test_a_prefill_of_a_few_tokens_does_not_count_as_slow_prefill() -> None:
    budget = learnt(0.002, 3e-6)
    before = budget.most_tokens(8, 0)
    for _ in range(100):
        budget.observe(8, 1, 0.003)
    assert budget.most_tokens(8, 0) == before


def test_the_prediction_stays_true_where_every_step_has_prefill() -> None:
    budget = learnt(0.001, 4e-6)
    for step in range(300):  # rows that decode have become many: 4 ms in place of 1
        budget.observe(200, 1000 + step % 7 * 200, 0.004 + (1000 + step % 7 * 200) * 4e-6)
    tokens = budget.most_tokens(200, 0)
    assert tokens is not None
    assert 0.75 < tokens * 4e-6 / (STEP_SECONDS - 0.004) < 1.25


def test_tokens_that_become_dearer_with_their_context_do_not_lengthen_the_pause() -> None:
    """Every step has prefill, cut as the bound says, and a token's cost grows fivefold."""
    budget = learnt(0.005, 20e-6)
    for step in range(400):
        token_seconds = 20e-6 * (1 + step / 100)
        tokens = budget.most_tokens(1, 3)
        assert tokens is not None
        assert tokens * token_seconds < 0.12, step
        budget.observe(1, tokens, 0.005 + tokens * token_seconds)


def test_a_step_that_was_held_up_once_changes_the_bound_little() -> None:
    budget = learnt(0.002, 3e-6)
    before = budget.most_tokens(8, 0)
    budget.observe(8, 1000, 30.0)
    after = budget.most_tokens(8, 0)
    assert before is not None and after is not None
    assert after > before * 0.7


class TimedEngine(Engine):
    """Steps take 2 ms, and more for each token of prefill."""

    def __init__(self, limits: Limits, token_seconds: float = 20e-6) -> None:
        super().__init__(limits, shape=StepShape(row_units=[4096, 512, 1024, 256, 256, 128]))
        self.token_seconds = token_seconds
        self.sizes: list[tuple[int, int]] = []
        """Decode rows and prefill tokens of each step."""

    def deliver(self) -> None:
        answer = self.answers[0]
        assert isinstance(answer, StepResult)
        plan = next(plan for plan in self.plans if plan.step == answer.step)
        prefill = sum(chunk.count for chunk in plan.chunks)
        begun = sum(chunk.sample for chunk in plan.chunks)
        self.sizes.append((len(answer.tokens) // 4 - begun, prefill))
        seconds = 0.002 + self.token_seconds * prefill
        self.answers[0] = msgspec.structs.replace(answer, seconds=seconds)
        super().deliver()


def test_a_long_prompt_makes_no_step_of_a_running_stream_much_longer() -> None:
    limits = small(num_blocks=1024, block_size=16, max_num_batched_tokens=4096, max_model_len=8192)
    engine = TimedEngine(limits)
    engine.submit(1, prompt(200, 10), max_tokens=400)
    for _ in range(20):
        engine.step()
    engine.submit(2, prompt(4000, 30), max_tokens=5)
    engine.submit(3, prompt(3000, 50), max_tokens=5)
    engine.run()
    sizes = [sum(chunk.count for chunk in plan.chunks) for plan in engine.plans]
    assert sizes[0] == 200
    beside_decode = [size for size in sizes[1:] if size]
    assert sum(beside_decode) == 7000
    assert max(beside_decode) * 20e-6 <= 3 * (STEP_SECONDS - 0.002) + 256 / 2 * 20e-6
    assert len(engine.tokens(1)) == 400
    engine.assert_idle()


def test_answers_that_nobody_reads_along_bound_no_prefill() -> None:
    limits = small(num_blocks=1024, block_size=16, max_num_batched_tokens=4096, max_model_len=8192)
    engine = TimedEngine(limits)
    engine.submit(1, prompt(200, 10), max_tokens=400, streamed=False)
    for _ in range(20):
        engine.step()
    engine.submit(2, prompt(4000, 30), max_tokens=5)
    for _ in range(3):
        engine.step()
    engine.submit(3, prompt(3000, 50), max_tokens=5)
    engine.run()
    prefills = [size for _, size in engine.sizes if size]
    assert prefills[:2] == [200, 4000]
    assert max(prefills[2:]) < 3000, "a stream decodes by now"
    engine.assert_idle()


@pytest.mark.parametrize(
    ("prompts", "unit"), [pytest.param(10, 256, marks=pytest.mark.slow), (1, 128)]
)
def test_large_steps_that_time_bounds_have_a_whole_number_of_row_units(
    prompts: int, unit: int
) -> None:
    limits = small(
        num_blocks=8192, block_size=16, max_num_seqs=64, max_num_batched_tokens=8192,
        max_model_len=8192,
    )  # fmt: skip
    engine = TimedEngine(limits)
    engine.submit(0, prompt(200, 10), max_tokens=100)
    for _ in range(20):
        engine.step()
    for request_id in range(1, 1 + prompts):
        engine.submit(request_id, prompt(4000, request_id), max_tokens=20)
    engine.run()
    bounded = [sum(step) for step in engine.sizes if step[0] and step[1] > 100][:-1]
    large = [rows for rows in bounded if (rows > 1024) == (unit == 256)]
    assert len(large) > 4
    assert not any(rows % unit for rows in large), large


@pytest.mark.parametrize("rows", [pytest.param(255, marks=pytest.mark.slow), 256])
def test_a_prompt_goes_on_beside_as_many_streams_as_fill_the_row_units(rows: int) -> None:
    limits = small(
        num_blocks=2048, block_size=16, max_num_seqs=512, max_num_batched_tokens=4096,
        max_model_len=4096,
    )  # fmt: skip
    engine = TimedEngine(limits, token_seconds=1e-3)
    engine.submit(0, prompt(200, 0), max_tokens=100)
    for _ in range(3):
        engine.step()
    for request_id in range(1, rows):
        engine.submit(request_id, prompt(1, request_id), max_tokens=100)
    for _ in range(10):
        engine.step()
    engine.submit(rows, prompt(1000, 1), max_tokens=5)
    for _ in range(1000 // LEAST_TOKENS + 5):
        engine.step()
    assert engine.sizes[-1][0] >= rows, "the streams have ended"
    assert engine.tokens(rows)
