"""Random arrivals, cancels, failures and delays against a worker that checks every plan.

Whatever happens: every open choice reaches exactly one end, its tokens are those of a run alone,
and in the end nothing waits, nothing runs, and every block is free or cached.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scheduler.scheduler_harness import Engine

from penstock.protocol.wire.messages.cache_hints import RetainedSpan
from penstock.protocol.wire.messages.steps import SlotSampling
from penstock.protocol.wire.messages.tokens import EndReason
from penstock.services.scheduler.cache_shares import CacheShares
from penstock.services.scheduler.limits import Limits
from penstock.services.scheduler.policy_choice import POLICIES

POISON = 49
NOT_A_NUMBER = 48
FIRST_CLEAN_FAILURES = 2
"""Failures that are nobody's fault, too few to end a request: three strikes end one."""


def random_limits(rng: random.Random, row_tokens: int) -> Limits:
    block_size = rng.choice([1, 2, 4, 8])
    max_num_seqs = rng.choice([1, 2, 4, 9])
    return Limits(
        num_blocks=rng.randint(40, 120) // block_size + 2,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs * row_tokens + rng.choice([0, 1, 5, 60, 100]),
        max_model_len=rng.choice([24, 40, 64]),
        vocab_size=50,
        max_row_tokens=row_tokens,
    )


class RandomRun:
    """One engine and a world that treats it as the seed says."""

    def __init__(
        self,
        seed: int,
        requests: int,
        poison: bool = False,
        not_a_number: bool = False,
        row_tokens: int = 0,
    ) -> None:
        """``row_tokens``: rows bring none to so many tokens; 0: always one."""
        self.rng = random.Random(seed)
        counts = random.Random(seed + 1)
        self.with_poison = poison
        self.engine = Engine(
            random_limits(self.rng, max(1, row_tokens)),
            policy=self.rng.choice(list(POLICIES)),
            caching=self.rng.random() < 0.75,
            max_in_flight=self.rng.choice([1, 2, 2, 2, 3]),
            poison=POISON if poison else -1,
            not_a_number=NOT_A_NUMBER if not_a_number else -1,
            row_count=(lambda: counts.randint(0, row_tokens)) if row_tokens else None,
            shares=CacheShares(counts.choice([0.2, 1.0]), counts.choice([0.1, 0.5, 1.0])),
        )
        self.engine.worker.token_seconds = self.rng.choice([0.0, 0.001, 0.01])
        early = self.rng.choice([0.0, 0.0, 0.02, 0.2])
        """How often a grammar is not compiled when a token is due."""
        self.engine.worker.is_early = lambda _: self.rng.random() < early
        self.left = requests
        self.failures = 0
        self.next_id = 0
        self.prefixes = [
            [self.rng.randrange(48) for _ in range(self.rng.randint(1, 30))] for _ in range(3)
        ]
        self.stop_ids = [self.rng.randrange(48) for _ in range(self.rng.choice([0, 1, 3]))]

    def play(self) -> None:
        actions = [
            (6, self.submit),
            (10, self.plan),
            (10, self.deliver),
            (1, self.cancel),
            (1, self.cancel_choice),
            (1, self.replace),
            (0.3, self.resume_elsewhere),
            (0.2, self.fail_a_step),
            (0.1, self.restart),
            (0.1, self.lose_an_owner),
            (0.3, self.let_time_pass),
        ]
        weights = [weight for weight, _ in actions]
        while self.left:
            (action,) = self.rng.choices([action for _, action in actions], weights)
            action()
        self.engine.run()
        self.engine.assert_idle()
        for (request_id, choice), stream in self.engine.streams.items():
            if not stream.cancelled:
                self.check_end(request_id, choice)

    def check_end(self, request_id: int, choice: int) -> None:
        stream = self.engine.streams[request_id, choice]
        end = self.engine.end(request_id, choice)
        if end.reason is not EndReason.ERROR:
            self.engine.assert_finished(request_id, choice)
            return
        computed = stream.prompt + stream.expected[:-1]
        bad = NOT_A_NUMBER in computed and self.engine.not_a_number >= 0
        poisonous = POISON in computed and self.engine.poison >= 0
        too_often = self.failures >= (1 if self.with_poison else FIRST_CLEAN_FAILURES + 1)
        assert end.message
        assert bad or poisonous or too_often or end.status == 504, end

    def random_prompt(self) -> list[int]:
        prefix = self.rng.choice(self.prefixes)
        own = [self.rng.randrange(48) for _ in range(self.rng.randint(0, 6))]
        prompt = prefix[: self.rng.randint(0, len(prefix))] + own
        prompt = prompt[: self.engine.limits.max_model_len - 1] or [1]
        special = [t for t in (self.engine.poison, self.engine.not_a_number) if t >= 0]
        if special and self.rng.random() < 0.15:
            prompt[self.rng.randrange(len(prompt))] = self.rng.choice(special)
        return prompt

    def submit(self) -> None:
        self.left -= 1
        self.next_id += 1
        self.engine.submit(
            self.next_id,
            self.random_prompt(),
            max_tokens=self.rng.choice([0, 1, 2, 7, 20, None]),
            n=self.rng.choice([1, 1, 1, 2, 5]),
            stop_ids=self.stop_ids,
            seed=self.rng.randrange(3),
            owner=self.rng.choice("ab"),
            priority=self.rng.randrange(3),
            cache_salt=self.rng.choice(["", "", "salt"]),
            tenant=self.rng.choice(["", "ann", "bob"]),
            retain=self.rng.choice([[], [], [RetainedSpan(40, 3600), RetainedSpan(9, 300)]]),
            release=self.rng.random() < 0.1,
            time_left=self.rng.choice([None, None, None, 5.0]),
            age=self.rng.random(),
            prompt_logprobs=self.rng.choice([None, None, None, 1]),
            virtual=self.rng.choice([0, 0, 0, 5]),
        )

    def some_id(self) -> int:
        return self.rng.randint(max(1, self.next_id - 6), self.next_id + 1)

    def plan(self) -> None:
        self.engine.plan()

    def deliver(self) -> None:
        if self.engine.answers:
            self.engine.deliver()

    def cancel(self) -> None:
        self.engine.cancel(self.some_id())

    def cancel_choice(self) -> None:
        self.engine.cancel(self.some_id(), choice=self.rng.randrange(3))

    def replace(self) -> None:
        """The owner goes on with its open choices under a higher attempt."""
        self.go_on(self.some_id(), drop=0)

    def resume_elsewhere(self) -> None:
        """Another owner, who knows fewer tokens, takes the request over."""
        self.go_on(self.some_id(), drop=self.rng.randint(1, 3))

    def go_on(self, request_id: int, drop: int) -> None:
        streams = {
            choice: stream
            for (i, choice), stream in self.engine.streams.items()
            if i == request_id and stream.open
        }
        holder = self.engine.core.holder(request_id)
        if not streams or holder is None:
            return
        request = self.engine.core._requests.get(request_id)
        first = next(iter(streams.values()))
        if request is None:
            return
        limit = next(iter(request.open.values())).max_len
        outputs = {c: s.received[: max(0, len(s.received) - drop)] for c, s in streams.items()}
        rejected = self.engine.submit(
            request_id,
            first.prompt[first.virtual :],
            max_tokens=limit - len(first.prompt),
            virtual=first.virtual,
            outputs=outputs,
            attempt=holder[0] + 1,
            owner=self.rng.choice("ab"),
            stop_ids=self.stop_ids,
            seed=msgspec.msgpack.decode(request.sampling, type=SlotSampling).seed,
        )
        assert rejected is None

    def fail_a_step(self) -> None:
        if self.failures < FIRST_CLEAN_FAILURES and self.engine.plans:
            self.failures += 1
            self.engine.worker.fail_steps[self.engine.core._in_flight.last + 1] = "device lost"

    def restart(self) -> None:
        if self.failures < FIRST_CLEAN_FAILURES:
            self.failures += 1
            self.engine.restart()

    def lose_an_owner(self) -> None:
        owner = self.rng.choice("ab")
        for request_id, attempt in self.engine.core.holding(owner):
            self.engine.core.cancel(request_id, attempt, owner)
        for stream in self.engine.streams.values():
            if stream.owner == owner and stream.open:
                stream.cancelled = True

    def let_time_pass(self) -> None:
        self.engine.now += self.rng.random() * 3
        if self.rng.random() < 0.5:
            self.engine.expire()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), requests=st.integers(1, 40))
def test_every_request_reaches_one_end_with_the_tokens_of_a_run_alone(
    seed: int, requests: int
) -> None:
    RandomRun(seed, requests, poison=False, not_a_number=False).play()


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), requests=st.integers(1, 25))
def test_poisonous_requests_end_and_take_nobody_along(seed: int, requests: int) -> None:
    RandomRun(seed, requests, poison=True, not_a_number=False).play()


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), requests=st.integers(1, 25))
def test_requests_that_compute_nan_end_and_take_nobody_along(seed: int, requests: int) -> None:
    RandomRun(seed, requests, poison=False, not_a_number=True).play()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    requests=st.integers(1, 25),
    row_tokens=st.sampled_from([2, 3, 5, 5]),
    not_a_number=st.booleans(),
    poison=st.sampled_from([False, False, True]),
)
def test_the_tokens_are_the_same_however_many_a_row_brings(
    seed: int, requests: int, row_tokens: int, not_a_number: bool, poison: bool
) -> None:
    RandomRun(seed, requests, poison, not_a_number, row_tokens).play()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("poison", "not_a_number", "row_tokens"),
    [(False, False, 0), (False, False, 5), (True, False, 2), (False, True, 3)],
)
def test_a_hundred_runs_of_each_kind_end_as_they_should(
    poison: bool, not_a_number: bool, row_tokens: int
) -> None:
    for seed in range(100):
        try:
            RandomRun(seed, 1 + seed % 40, poison, not_a_number, row_tokens).play()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


def crowds() -> Iterator[Any]:
    """Each policy with another budget, with caching and without; all of them in the long run."""
    budgets = [8, 24, 400]
    for number, policy in enumerate(POLICIES):
        for place, budget in enumerate(budgets):
            for caching in (True, False):
                usual = place == number % len(budgets) and caching == (number % 2 == 0)
                yield pytest.param(policy, budget, caching, marks=() if usual else pytest.mark.slow)


@pytest.mark.parametrize(("policy", "budget", "caching"), [*crowds()])
def test_a_crowd_with_memory_for_a_quarter_of_it_finishes(
    policy: str, budget: int, caching: bool
) -> None:
    rng = random.Random(budget)
    limits = Limits(
        num_blocks=40,
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=budget,
        max_model_len=120,
        vocab_size=500,
    )
    engine = Engine(limits, policy=policy, caching=caching)
    for request_id in range(24):
        prompt = [rng.randrange(500) for _ in range(rng.randint(1, 60))]
        engine.submit(
            request_id, prompt, max_tokens=40, priority=request_id % 3, tenant=str(request_id % 5)
        )
    engine.run()
    for request_id in range(24):
        engine.assert_finished(request_id)
    assert engine.core.stats().counters.preemptions > 0
    engine.assert_idle()
