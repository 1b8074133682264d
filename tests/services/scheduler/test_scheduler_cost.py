"""What a token costs in the scheduler's core. Run as a script, it prints the measured cost."""

from __future__ import annotations

import time

import pytest
from scheduler_harness import token_work
from simulated_worker import token_bytes

from penstock.protocol.wire.messages.steps import StepResult
from penstock.services.scheduler.core import SchedulerCore
from penstock.services.scheduler.limits import Limits
from penstock.services.scheduler.policy_choice import POLICIES, make_policy

BOUND_SECONDS = 20e-6
"""Four times the budget of 5 µs: a shared, busy machine must not fail the test."""


POLICY_BOUND_SECONDS = 1e-6
"""What a policy may add to a token of a batch of 64."""


def decode_cost(
    rows: int, steps: int, policy: str = "fcfs", waiting: int = 0, rounds: int = 1
) -> float:
    """Processor seconds for each token in plan and apply, ``rows`` sequences decoding while
    ``waiting`` more find no slot: of ``rounds`` times ``steps`` steps, the cheapest."""
    total = rounds * steps
    limits = Limits(
        num_blocks=rows * (total // 16 + 8),
        block_size=16,
        max_num_seqs=rows,
        max_num_batched_tokens=20 * rows,
        max_model_len=total + 200,
        vocab_size=50_000,
    )
    core = SchedulerCore(limits, 1, make_policy(policy), True, rows + waiting)
    for request_id in range(rows + waiting):
        prompt = [request_id % 40_000 + 1] * 20
        work = token_work(prompt, max_tokens=None, stop_ids=[0], tenant=str(request_id % 16))
        core.add(request_id, 0, "t", work, 0.0)
    tokens = token_bytes(range(1, rows + 1))
    costs, began, answered = [], 0.0, 0
    for step in range(1, total + 1):
        if step == 10 or (step > 10 and step % steps == 1):  # by the tenth all prompts are computed
            began, answered = time.process_time(), core.stats().counters.generated_tokens
        core.plan(0.0)
        core.plan(0.0)
        core.apply(StepResult(1, step, tokens, [], 0.0), 0.0)
        if step % steps == 0:
            spent = time.process_time() - began
            costs.append(spent / (core.stats().counters.generated_tokens - answered))
    return min(costs)


def test_a_token_of_a_running_batch_costs_microseconds() -> None:
    assert min(decode_cost(rows=64, steps=300) for _ in range(3)) < BOUND_SECONDS


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "fcfs"])
def test_a_policy_adds_less_than_a_microsecond_to_a_token(policy: str) -> None:
    pairs = [(decode_cost(64, 300), decode_cost(64, 300, policy)) for _ in range(5)]
    cheapest, with_policy = map(min, zip(*pairs, strict=True))
    assert with_policy - cheapest < POLICY_BOUND_SECONDS


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_costs_the_same_however_many_wait(policy: str) -> None:
    alone = decode_cost(8, 200, policy, rounds=5)
    beside_a_queue = decode_cost(8, 200, policy, waiting=5_000, rounds=5)
    assert beside_a_queue < 3 * alone


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
