"""Plans are bounded in bytes while they are made, and what sequences share is not sent twice."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scheduler.scheduler_harness import Engine, small, token_work
from support.scheduler.simulated_worker import token_bytes

from penstock.protocol.sampling import SamplingParams, resolve
from penstock.protocol.wire import codec
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.requests import ChoiceState, TokenWork
from penstock.protocol.wire.messages.steps import StepPlan
from penstock.protocol.wire.messages.tokens import End, EndReason
from penstock.services.scheduler import planner
from penstock.services.scheduler.core import SchedulerCore
from penstock.services.scheduler.limits import MAX_SEQUENCE_TOKENS, Limits
from penstock.services.scheduler.policy_choice import make_policy
from penstock.services.tokenizer.slot_sampling import slot_sampling
from penstock.services.worker.null_engine import NullExecutor

MIB = 1024 * 1024
BESIDE = MIB
"""Bytes of a plan that are not of the sequences it takes in."""
LONG = Limits(
    num_blocks=20_000,
    block_size=16,
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    max_model_len=131_072,
    vocab_size=150_000,
)


class NullEngine:
    """A core, and the null device's executor, which refuses what contradicts its slots."""

    def __init__(self, limits: Limits = LONG) -> None:
        self.core = SchedulerCore(
            limits, 1, make_policy("fcfs"), True, 10_000, max_waiting_tokens=2**40
        )
        capacity = EngineSizes(*msgspec.structs.astuple(limits))
        self.worker = NullExecutor(capacity, [])
        self.plans: list[StepPlan] = []
        self.sizes: list[int] = []
        self.ends: dict[tuple[int, int], End] = {}

    def step(self) -> StepPlan | None:
        plan = self.core.plan(0.0)
        if plan is None:
            return None
        frame = codec.Encoder(1)(plan)
        self.sizes.append(len(frame))
        self.plans.append(plan)
        message = codec.decode(frame)[1]
        assert isinstance(message, StepPlan)
        for _, batch in self.core.apply(self.worker.execute(message), 0.0):
            for end in batch.ends:
                self.ends[batch.ids[end.row], batch.choices[end.row]] = end
        return plan

    def run(self) -> None:
        while self.step() is not None:
            pass


def asking(prompt: list[int], n: int = 1, max_tokens: int = 2, **params: object) -> TokenWork:
    """A request whose sampling parameters are ``params``."""
    return sampled(token_work(prompt, max_tokens, n=n), SamplingParams(**params))


def sampled(
    work: TokenWork, params: SamplingParams, bad_words: Sequence[bytes] = (), breakers: bytes = b""
) -> TokenWork:
    """As a tokenizer sends it that was asked for this."""
    resolved = resolve(params, {}, 1)
    sampling = slot_sampling(resolved, work.stop_ids, list(bad_words), breakers)
    adjustments = sampling.adjustments
    return msgspec.structs.replace(
        work,
        sampling=sampling.packed(),
        reads_output=adjustments is not None,
        reads_prompt=adjustments is not None and adjustments.reads_prompt,
        reads_logits=adjustments is not None and adjustments.steers,
    )


def test_the_choices_of_a_request_with_the_longest_prompt_repeat_none_of_it() -> None:
    engine = NullEngine()
    assert engine.core.add(1, 0, "t", asking([7] * 131_071, n=128, max_tokens=1), 0.0) is None
    engine.run()
    assert {end.reason for end in engine.ends.values()} == {EndReason.LENGTH}
    assert len(engine.ends) == 128
    # The prompt once, and the block table of each choice.
    assert sum(engine.sizes) < 4 * 131_071 + 128 * (3 * 131_071 // 16 + 1000)
    engine.core.check()


def test_chats_that_share_a_long_cached_prefix_start_in_one_small_plan() -> None:
    engine = NullEngine()
    prefix = list(range(100_000))
    engine.core.add(0, 0, "t", asking(prefix), 0.0)
    engine.run()
    done = len(engine.plans)
    for request_id in range(1, 101):
        assert engine.core.add(request_id, 0, "t", asking([*prefix, request_id]), 0.0) is None
    engine.run()
    assert len(engine.plans[done].added) == 100
    assert engine.sizes[done] < 100 * (3 * 100_000 // 16 + 500)
    assert len(engine.ends) == 101


def test_choices_whose_penalties_read_the_prompt_share_one_copy_of_it() -> None:
    engine = NullEngine()
    work = asking([7] * 50_000, n=64, repetition_penalty=1.5)
    assert engine.core.add(1, 0, "t", work, 0.0) is None
    engine.run()
    sharing = [plan for plan in engine.plans if len(plan.added) > 1]
    assert sharing and all(len(plan.prompts) == 1 for plan in sharing)
    assert max(engine.sizes) < 3 * 4 * 50_000 + 64 * (3 * 50_000 // 16 + 1000)
    assert len(engine.ends) == 64


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({"repetition_penalty": 1.5}, id="long prompts"),
        pytest.param(
            {"allowed_token_ids": list(range(150_000))},
            marks=pytest.mark.slow,
            id="many allowed ids",
        ),
    ],
)
def test_a_plan_takes_nothing_in_past_its_bound(params: dict[str, object]) -> None:
    engine = NullEngine()
    prefix = list(range(100_000))
    engine.core.add(0, 0, "t", asking(prefix), 0.0)
    engine.run()
    for request_id in range(1, 61):
        work = asking([*prefix, request_id], max_tokens=40, **params)
        assert engine.core.add(request_id, 0, "t", work, 0.0) is None
    engine.run()
    assert planner.PLAN_BYTES / 2 < max(engine.sizes) < planner.PLAN_BYTES + BESIDE
    assert {end.reason for end in engine.ends.values()} == {EndReason.LENGTH}
    assert len(engine.ends) == 61


def test_a_sequence_that_is_longer_than_a_plan_takes_in_starts_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planner, "PLAN_BYTES", 700)
    engine = Engine(small(num_blocks=60, max_num_batched_tokens=60, max_num_seqs=8))
    for request_id in range(3):
        engine.submit(request_id, [request_id, *range(49)], max_tokens=5)
    engine.submit(3, [1, 2, 3], max_tokens=5)
    engine.submit(4, [2, 2, 3], max_tokens=5)
    engine.run()
    assert [len(plan.added) for plan in engine.plans if plan.added] == [1, 1, 1, 2]
    for request_id in range(5):
        engine.assert_finished(request_id)
    engine.assert_idle()


def test_the_longest_sequence_with_all_that_it_may_ask_for_fits_a_frame() -> None:
    limits = Limits(
        num_blocks=MAX_SEQUENCE_TOKENS // 8 + 10,
        block_size=8,
        max_num_seqs=2,
        max_num_batched_tokens=2**20,
        max_model_len=2 * MAX_SEQUENCE_TOKENS,
        vocab_size=2**18,
    )
    engine = NullEngine(limits)
    prompt = [7] * (MAX_SEQUENCE_TOKENS - 1)
    params = SamplingParams(
        temperature=1.0, top_p=1.0, top_k=0, seed=1, max_tokens=1, repetition_penalty=2.0,
        allowed_token_ids=list(range(2**18)), logit_bias=dict.fromkeys(range(1024), 1.0),
        dry_multiplier=1.0, typical_p=0.5,
    )  # fmt: skip
    bad_words = [token_bytes([1] * 16)] * 128
    plain = token_work(prompt, 1, n=2, stop_ids=list(range(64)))
    work = sampled(plain, params, bad_words, token_bytes(list(range(2**18))))
    assert engine.core.add(1, 0, "t", work, 0.0) is None
    engine.run()
    assert len(engine.ends) == 2
    assert max(engine.sizes) < codec.MAX_FRAME_BYTES * 3 // 4


def test_a_prompt_that_no_plan_could_carry_is_refused() -> None:
    limits = Limits(
        num_blocks=MAX_SEQUENCE_TOKENS // 8 + 10,
        block_size=8,
        max_num_seqs=2,
        max_num_batched_tokens=8192,
        max_model_len=2 * MAX_SEQUENCE_TOKENS,
        vocab_size=100,
    )
    core = SchedulerCore(limits, 1, make_policy("fcfs"), True, 10)
    rejected = core.add(1, 0, "t", token_work([7] * MAX_SEQUENCE_TOKENS), 0.0)
    assert rejected is not None and rejected.status == 400
    assert f"the {MAX_SEQUENCE_TOKENS} tokens that the message of one step carries" in (
        rejected.message
    )


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 99), min_size=1, max_size=40),
    n=st.integers(1, 4),
    penalty=st.sampled_from([None, 1.5]),
    biases=st.dictionaries(st.integers(0, 99), st.floats(-9, 9), max_size=9),
    min_tokens=st.integers(0, 3),
)
def test_a_plan_is_never_longer_than_was_reckoned(
    prompt: list[int], n: int, penalty: float | None, biases: dict[int, float], min_tokens: int
) -> None:
    core = SchedulerCore(small(), 1, make_policy("fcfs"), True, 10)
    work = asking(
        prompt,
        n,
        repetition_penalty=penalty,
        logit_bias=biases,
        min_tokens=min_tokens,
        seed=2**63 - 1,
    )
    assert core.add(1, 0, "t", work, 0.0) is None
    plan = core.plan(0.0)
    assert plan is not None
    parts = msgspec.msgpack.encode((plan.added, plan.chunks, plan.prompts))
    assert len(parts) <= core._in_flight.steps[-1].added_bytes + 30


def test_a_sequence_that_mirostat_steers_begins_anew_once_it_has_output() -> None:
    engine = NullEngine()
    prompt = list(range(64))
    for request_id, params in enumerate(({}, {"mirostat_mode": 2}), 1):
        work = asking(prompt, max_tokens=8, **params)
        assert engine.core.add(request_id, 0, "t", work, 0.0) is None
        engine.run()
    fresh = [new for plan in engine.plans for new in plan.added][-1]
    assert fresh.num_computed == 48  # the prompt's blocks are cached
    for request_id, params in enumerate(({}, {"mirostat_mode": 2}), 3):
        work = asking(prompt, max_tokens=40, **params)
        state = ChoiceState(0, array("i", [5] * 20).tobytes())
        continued = msgspec.structs.replace(work, choices=[state])
        assert engine.core.add(request_id, 0, "t", continued, 0.0) is None
        engine.run()
        new = [new for plan in engine.plans for new in plan.added][-1]
        assert new.num_computed == (0 if params else 64)
        assert (new.start, new.length) == (new.num_computed, 84)
