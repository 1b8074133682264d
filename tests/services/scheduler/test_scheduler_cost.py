"""What a token costs in the scheduler's core. Run as a script, it prints the measured cost."""

from __future__ import annotations

import functools
import time

import pytest
from support.counted import instructions
from support.scheduler.scheduler_harness import token_work
from support.scheduler.simulated_worker import token_bytes

from penstock.protocol.wire.messages.steps import StepResult
from penstock.services.scheduler.core import SchedulerCore
from penstock.services.scheduler.limits import Limits
from penstock.services.scheduler.policy_choice import POLICIES, make_policy

MOST_INSTRUCTIONS = 400
"""Of the interpreter, for a token of a batch of 64: 230 take 1.5 µs, of a budget of 5."""
MOST_OF_A_POLICY = 20
"""What a policy may add to that; about 0.1 µs."""


class Decoding:
    """``rows`` sequences that decode while ``waiting`` more find no slot."""

    def __init__(self, rows: int, steps: int, policy: str, waiting: int) -> None:
        limits = Limits(
            num_blocks=rows * (steps // 16 + 8),
            block_size=16,
            max_num_seqs=rows,
            max_num_batched_tokens=20 * rows,
            max_model_len=steps + 200,
            vocab_size=50_000,
        )
        self._core = SchedulerCore(limits, 1, make_policy(policy), True, rows + waiting)
        for request_id in range(rows + waiting):
            prompt = [request_id % 40_000 + 1] * 20
            tenant = str(request_id % 16)
            work = token_work(prompt, max_tokens=None, stop_ids=[0], tenant=tenant)
            self._core.add(request_id, 0, "t", work, 0.0)
        self._tokens = token_bytes(range(1, rows + 1))
        self.steps = 0
        while self.steps < 9:  # then all prompts are computed
            self.step()

    def step(self) -> None:
        self.steps += 1
        self._core.plan(0.0)
        self._core.plan(0.0)
        self._core.apply(StepResult(1, self.steps, self._tokens, [], 0.0), 0.0)

    @property
    def generated(self) -> int:
        return self._core.stats().counters.generated_tokens


def decode_cost(rows: int, steps: int, policy: str = "fcfs", waiting: int = 0) -> float:
    """Processor seconds for each token in plan and apply, of some steps."""
    decoding = Decoding(rows, steps, policy, waiting)
    began, before = time.process_time(), decoding.generated
    while decoding.steps < steps:
        decoding.step()
    return (time.process_time() - began) / (decoding.generated - before)


@functools.cache
def decode_instructions(rows: int, policy: str, waiting: int = 0) -> float:
    """Instructions for each token, of steps in which each sequence takes new blocks as well."""
    decoding = Decoding(rows, 42, policy, waiting)
    before, count = decoding.generated, 0
    while decoding.steps < 41:
        count += instructions(decoding.step)
    return count / (decoding.generated - before)


def test_a_token_of_a_running_batch_costs_microseconds() -> None:
    assert 50 < decode_instructions(64, "fcfs") < MOST_INSTRUCTIONS


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "fcfs"])
def test_a_policy_adds_less_than_a_microsecond_to_a_token(policy: str) -> None:
    added = decode_instructions(64, policy) - decode_instructions(64, "fcfs")
    assert added < MOST_OF_A_POLICY


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(name, marks=() if name in ("fcfs", "fair") else pytest.mark.slow)
        for name in POLICIES
    ],
)
def test_a_step_costs_the_same_however_many_wait(policy: str) -> None:
    assert decode_instructions(8, policy, 5000) < 1.2 * decode_instructions(8, policy)


if __name__ == "__main__":
    for rows in (1, 8, 64, 256):
        costs = {
            name: min(decode_cost(rows, 1000, name) for _ in range(3)) * 1e6 for name in POLICIES
        }
        print(f"{rows:4} decode rows:", *(f"{n} {c:.2f}" for n, c in costs.items()), "µs a token")
    for rows in (1, 8, 64, 256, 1024):
        print(f"{rows:4} decode rows: {decode_cost(rows, 300) * rows * 1e6:.1f} µs a step")
    for waiting in (0, 100, 10_000, 100_000):
        cost = min(decode_cost(64, 300, "fcfs", waiting) for _ in range(3)) * 64 * 1e6
        print(f"64 decode rows, {waiting:,} waiting: {cost:.1f} µs a step")
