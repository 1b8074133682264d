"""How much of KV memory is in use when it is short: blocks are taken as tokens come, not ahead."""

from __future__ import annotations

import random

import pytest
from support.scheduler.scheduler_harness import token_work
from support.scheduler.simulated_worker import token_bytes

from penstock.protocol.wire.messages.steps import StepPlan, StepResult
from penstock.services.scheduler.core import SchedulerCore
from penstock.services.scheduler.limits import Limits
from penstock.services.scheduler.policy_choice import make_policy

VOCABULARY = 151_936


def mixed_load() -> list[tuple[list[int], int]]:
    """256 prompts of 100 to 1,024 random tokens, and the lengths of their answers, likewise."""
    draw = random.Random(0)
    load = []
    for _ in range(256):
        prompt = [draw.randrange(VOCABULARY) for _ in range(draw.randint(100, 1024))]
        load.append((prompt, draw.randint(100, 1024)))
    return load


def loaded(num_blocks: int, block_size: int) -> SchedulerCore:
    limits = Limits(
        num_blocks=num_blocks, block_size=block_size, max_num_seqs=256,
        max_num_batched_tokens=8192, max_model_len=40_960, vocab_size=VOCABULARY,
    )  # fmt: skip
    core = SchedulerCore(limits, 1, make_policy("fcfs"), True, 1000)
    for number, (prompt, output_len) in enumerate(mixed_load()):
        assert core.add(number, 0, "owner", token_work(prompt, output_len), 0.0) is None
    return core


def answer(plan: StepPlan, rows: int) -> StepResult:
    return StepResult(plan.epoch, plan.step, token_bytes([7] * rows), [], 0.005)


def run(core: SchedulerCore) -> tuple[int, float | None]:
    """The most blocks in use at any time, and the share that was when the first sequence was
    preempted; a step at a time, until then or the end."""
    most, now = 0, 0.0
    before = core.stats()
    decoding: set[int] = set()
    while (plan := core.plan(now)) is not None:
        decoding -= {*plan.gone}
        rows = len(decoding) + sum(chunk.sample for chunk in plan.chunks)
        decoding |= {chunk.slot for chunk in plan.chunks if chunk.sample}
        if core.counters.preemptions:
            return most, before.blocks_used / before.blocks_total
        before = core.stats()
        most = max(most, before.blocks_used)
        core.apply(answer(plan, rows), now)
        now += 0.005
    return most, None


@pytest.mark.parametrize("block_size", [16, 32])
def test_a_quarter_of_the_memory_is_used_to_the_last_blocks_before_a_sequence_is_preempted(
    block_size: int,
) -> None:
    peak, preempted = run(loaded(300_000 // block_size, block_size))
    assert preempted is None
    assert peak * block_size > 100_000
    _, used = run(loaded(peak // 4, block_size))
    assert used is not None
    assert used >= 0.96
