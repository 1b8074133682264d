"""Shortest job first: what counts as short, and that nothing starves."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scheduler.scheduler_harness import Engine, prompt, small

from penstock.services.scheduler import shortest_job
from penstock.services.scheduler.limits import Limits
from penstock.services.scheduler.sequence import Request
from penstock.services.scheduler.shortest_job import FEWEST, ShortestJobFirst

ROOM = Limits(
    num_blocks=400,
    block_size=4,
    max_num_seqs=1,
    max_num_batched_tokens=64,
    max_model_len=200,
    vocab_size=100,
)


def engine_with(policy: ShortestJobFirst, limits: Limits = ROOM, caching: bool = True) -> Engine:
    return Engine(limits, policy=policy, caching=caching)


def request_of(engine: Engine, request_id: int) -> Request:
    request = engine.core._requests.get(request_id)
    assert request is not None
    return request


def order_of(engine: Engine, prompts: dict[int, list[int]]) -> list[int]:
    """Ids in the order in which they got their first slot."""
    engine.run()
    return [request_id for request_id in dict.fromkeys(engine.started) if request_id in prompts]


def finish_outputs(engine: Engine, tenant: str, count: int, output: int, first: int = 1000) -> None:
    for request_id in range(first, first + count):
        engine.submit(request_id, prompt(5, request_id % 90), max_tokens=output, tenant=tenant)
    engine.run()


def test_prompt_and_output_together_decide_who_is_short() -> None:
    engine = engine_with(ShortestJobFirst())
    prompts = {1: prompt(60, 1), 2: prompt(10, 2), 3: prompt(20, 3), 4: prompt(30, 4)}
    for request_id, max_tokens in ((1, 10), (2, 50), (3, 20), (4, 5)):
        engine.submit(request_id, prompts[request_id], max_tokens=max_tokens)
    assert order_of(engine, prompts) == [4, 3, 2, 1]  # 35, 40, 60 and 70 tokens


def test_an_output_counts_no_more_than_the_mean_of_the_tenants_finished_ones() -> None:
    policy = ShortestJobFirst()
    engine = engine_with(policy)
    finish_outputs(engine, "ann", FEWEST, 6)
    finish_outputs(engine, "bob", FEWEST, 30, first=2000)
    for request_id, tenant, max_tokens in (
        (1, "ann", 100), (2, "ann", 4), (3, "bob", 100), (4, "eve", 100), (5, "ann", None),
    ):  # fmt: skip
        engine.submit(request_id, prompt(10), max_tokens=max_tokens, tenant=tenant)
    expected = {i: policy.expected_output(request_of(engine, i)) for i in range(1, 6)}
    assert (expected[1], expected[2], expected[3], expected[5]) == (6, 4, 30, 6)
    assert expected[4] == pytest.approx(18)  # nothing of eve's is known: the mean of all


def test_until_outputs_are_known_max_tokens_counts() -> None:
    policy = ShortestJobFirst()
    engine = engine_with(policy)
    finish_outputs(engine, "ann", FEWEST - 1, 6)
    engine.submit(1, prompt(10), max_tokens=100, tenant="ann")
    engine.submit(2, prompt(10), max_tokens=None, tenant="ann")
    assert policy.expected_output(request_of(engine, 1)) == 100
    assert policy.expected_output(request_of(engine, 2)) == 190  # what the model's limit leaves


def test_a_mean_follows_its_tenant_and_forgets() -> None:
    mean = shortest_job.RunningMean()
    for value in (2, 4, 9):
        mean.add(value)
    assert mean.value == pytest.approx(5)
    for _ in range(20 * shortest_job.MEMORY):
        mean.add(100)
    assert mean.value == pytest.approx(100, abs=0.01)


def test_cancelled_requests_say_nothing_about_the_length_of_outputs() -> None:
    policy = ShortestJobFirst()
    engine = engine_with(policy)
    for request_id in range(2 * FEWEST):
        engine.submit(request_id, prompt(5), max_tokens=50)
        engine.step()
        engine.cancel(request_id)
    engine.run()
    engine.submit(99, prompt(5), max_tokens=50)
    assert policy.expected_output(request_of(engine, 99)) == 50


def test_a_prompt_in_the_prefix_cache_is_short() -> None:
    engine = engine_with(ShortestJobFirst())
    engine.submit(1, prompt(80, 7), max_tokens=2)
    engine.run()
    prompts = {2: prompt(20, 50), 3: [*prompt(80, 7), 99]}
    for request_id, tokens in prompts.items():
        engine.submit(request_id, tokens, max_tokens=5)
    assert request_of(engine, 3).num_cached == 80
    assert order_of(engine, prompts) == [3, 2]


def test_every_choice_of_a_request_is_work() -> None:
    engine = engine_with(ShortestJobFirst())
    prompts = {1: prompt(10, 1), 2: prompt(10, 2)}
    engine.submit(1, prompts[1], max_tokens=20, n=4)
    engine.submit(2, prompts[2], max_tokens=60)
    assert order_of(engine, prompts) == [2, 1]


def test_the_sequence_with_the_most_work_left_gives_way() -> None:
    engine = engine_with(ShortestJobFirst(), small(num_blocks=10, max_num_batched_tokens=60))
    engine.submit(1, prompt(6), max_tokens=30)
    engine.submit(2, prompt(6, 40), max_tokens=16)
    engine.run()
    assert engine.core.stats().counters.preemptions >= 1
    assert engine.started[-1] == 1
    engine.assert_finished(1)
    engine.assert_finished(2)


def test_a_long_request_that_has_waited_for_its_lead_goes_before_a_short_one() -> None:
    for waited, order in ((8.9, [2, 1]), (9.1, [1, 2])):
        engine = engine_with(ShortestJobFirst(ageing=10.0))
        prompts = {1: prompt(90, 1), 2: prompt(10, 2)}
        engine.submit(1, prompts[1], max_tokens=20)  # 110 tokens: a lead of 11 s
        engine.now = waited
        engine.submit(2, prompts[2], max_tokens=10)  # 20 tokens: 2 s
        assert order_of(engine, prompts) == order


def test_no_lead_is_longer_than_the_limit() -> None:
    engine = engine_with(ShortestJobFirst(ageing=10.0, longest_lead=3.0))
    prompts = {1: prompt(90, 1), 2: prompt(1, 2)}
    engine.submit(1, prompts[1], max_tokens=100)
    engine.now = 3.0
    engine.submit(2, prompts[2], max_tokens=1)
    assert order_of(engine, prompts) == [1, 2]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    ageing=st.sampled_from([2.0, 10.0, 100.0]),
    longest_lead=st.sampled_from([1.0, 20.0, 600.0]),
)
@pytest.mark.slow
def test_a_request_waits_only_for_what_came_before_its_lead_was_over(
    seed: int, ageing: float, longest_lead: float
) -> None:
    """Without end, short requests come faster than they are served, and yet the wait of each
    request is bounded: by its lead, and the time that all need that came before its end."""
    rng = random.Random(seed)
    engine = engine_with(ShortestJobFirst(ageing, longest_lead), caching=False)
    arrival: dict[int, float] = {}
    steps: dict[int, int] = {}
    lead: dict[int, float] = {}
    started: dict[int, float] = {}
    step_seconds = 0.5

    def submit(request_id: int) -> None:
        long = request_id % 9 == 0
        length = 100 if long else rng.randint(1, 10)
        output = 50 if long else rng.randint(1, 6)
        # The second token names the request, so that its start is seen in the plan.
        tokens = [request_id // 100, request_id % 100, *[1] * length]
        engine.submit(request_id, tokens, max_tokens=output)
        arrival[request_id] = engine.now
        steps[request_id] = -(-len(tokens) // ROOM.max_num_batched_tokens) + output
        lead[request_id] = min((len(tokens) + output) / ageing, longest_lead)

    for request_id in range(80):
        submit(request_id)
        for _ in range(rng.randint(1, 4)):
            _step_and_note(engine, started)
            engine.now += step_seconds
    while len(started) < 80:
        _step_and_note(engine, started)
        engine.now += step_seconds
    for request_id, came in arrival.items():
        over = came + lead[request_id]
        overtakers = [i for i in started if started[i] < started[request_id] and arrival[i] > over]
        assert not overtakers
        before = sum(steps[i] for i in arrival if i != request_id and arrival[i] <= over)
        slack = 4  # plans are made two steps ahead
        assert started[request_id] - came <= (before + slack) * step_seconds


def _step_and_note(engine: Engine, started: dict[int, float]) -> None:
    known = len(engine.started)
    engine.step()
    for request_id in engine.started[known:]:
        started.setdefault(request_id, engine.now)


def test_the_tenants_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortest_job, "MAX_TENANTS", 5)
    policy = ShortestJobFirst()
    engine = engine_with(policy)
    for number in range(20):
        finish_outputs(engine, f"tenant {number}", 1, 2, first=100 * number)
        finish_outputs(engine, "regular", 1, 2, first=100 * number + 50)
    assert len(policy._tenants) == 5
    assert policy._tenants["regular"].count == 20


@pytest.mark.parametrize("fields", [{"ageing": 0.0}, {"ageing": -1.0}, {"longest_lead": -1.0}])
def test_an_ageing_that_would_let_requests_starve_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="ageing"):
        ShortestJobFirst(**fields)
