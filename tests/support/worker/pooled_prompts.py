"""Drives an executor with prompts that have a task, as a scheduler would."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.protocol.wire.messages.steps import Chunk, NewSlot, SlotSampling, StepPlan
from penstock.services.worker.executor import Executor

_SAMPLING = SlotSampling(0.0, 0, 1.0, 0).packed()


def pooled(
    executor: Executor,
    prompts: Sequence[Sequence[int]],
    task: str = "embed",
    *,
    chunk: int = 10_000,
    preempt_after: int | None = None,
    second: Sequence[int] | None = None,
) -> list[npt.NDArray[np.float32]]:
    """What comes of each prompt. All are computed side by side, ``chunk`` tokens of each in a step;
    after ``preempt_after`` steps every one that is not done loses its slot and begins anew."""
    size, step = executor.capacity.block_size, 0
    computed = [0] * len(prompts)
    found: dict[int, npt.NDArray[np.float32]] = {}
    blocks = [-(-len(prompt) // size) for prompt in prompts]
    tables = [
        list(range(sum(blocks[:number]), sum(blocks[: number + 1])))
        for number in range(len(prompts))
    ]
    added = list(range(len(prompts)))
    gone: list[int] = []
    while len(found) < len(prompts):
        step += 1
        if step - 1 == preempt_after:
            added = [number for number in range(len(prompts)) if number not in found]
            gone += added
            for number in added:
                computed[number] = 0
        slots = [
            NewSlot(
                number, np.array(prompts[number], "<i4").tobytes(), len(prompts[number]), 0,
                tables[number], _SAMPLING, task=task, second=second[number] if second else 0,
            )
            for number in added
        ]  # fmt: skip
        chunks, ending = [], []
        for number, prompt in enumerate(prompts):
            if number in found:
                continue
            begin, end = computed[number], min(len(prompt), computed[number] + chunk)
            chunks.append(Chunk(number, begin, end - begin, end == len(prompt), []))
            computed[number] = end
            if end == len(prompt):
                ending.append(number)
        executor.launch(StepPlan(1, step, step == 1, gone, slots, [], chunks))
        result = executor.finished(wait=True)
        assert result is not None and not result.failures, result
        for one in result.pooled:
            found[ending[one.row]] = np.frombuffer(one.values, "<f4")
        gone, added = ending, []
    return [found[number] for number in range(len(prompts))]
