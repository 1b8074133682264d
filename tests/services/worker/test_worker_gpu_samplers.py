"""Samplers of slots on the executor for GPUs: as the plain one draws, and nothing where none asks.

The kernels run in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.worker.asked_slots import asking, biased, ids
from support.worker.plan_driver import GREEDY, PlanDriver
from support.worker.sampler_slots import EVERY_SAMPLER, MIROSTAT
from support.worker.tiny_models import some_prompts
from test_worker_gpu_executor import ON_GPU, gpu_executor, plain_executor

from penstock.protocol.wire.messages.steps import Chunk, Dry, NewSlot, StepPlan
from penstock.services.worker.gpu import stage_rows
from penstock.services.worker.gpu.executor import GpuExecutor

pytestmark = pytest.mark.usefixtures("few_programs")
Folder = Callable[[str], Path]


def test_samplers_give_the_tokens_of_the_plain_executor(tiny_folder: Folder) -> None:
    """Also where a sequence lost its slot, and beside rows that ask for nothing."""
    folder, prompts = tiny_folder("qwen3"), some_prompts([3, 12, 7, 5, 9, 4, 6, 8])
    samplings, count = [*EVERY_SAMPLER[:7], asking(1.1)], 5 if ON_GPU else 3
    wanted = PlanDriver(plain_executor(folder), 2).run(prompts, count, samplings=samplings)
    driver = PlanDriver(gpu_executor(folder), 3)
    assert driver.run(prompts, count, samplings=samplings, preemptions=2) == wanted
    assert not driver.bad


def test_repeats_are_found_before_the_next_token_is_drawn(tiny_folder: Folder) -> None:
    folder, prompts = tiny_folder("qwen3"), some_prompts([9, 4, 6, 5])
    pair = biased(t7=30.0, t9=30.0)
    samplings = [
        asking(1.0, dry=Dry(90.0, 4.0, 1, 0, ids(11)), **pair),
        asking(no_repeat_ngram=1, **pair),
        asking(no_repeat_ngram=2, repetition=1.4),
        GREEDY,
    ]
    count = 8 if ON_GPU else 4
    wanted = PlanDriver(plain_executor(folder), 2).run(prompts, count, samplings=samplings)
    driver = PlanDriver(gpu_executor(folder), 3)
    found = driver.run(prompts, count, samplings=samplings, preemptions=2)
    assert found == wanted
    assert len(set(found[1])) == count


def test_a_bound_of_mirostat_is_learned_again_from_the_output(tiny_folder: Folder) -> None:
    folder = tiny_folder("qwen3")
    (prompt,) = some_prompts([7])
    executor: GpuExecutor = gpu_executor(folder)
    (output,) = PlanDriver(executor, 1).run([prompt], 4, samplings=[MIROSTAT])
    (slot,) = executor.slots.steers.nonzero()[0].tolist()
    bound = float(executor.sampler.slots.bound[slot])
    assert abs(bound - 8.0) > 0.01
    executor.reset()
    tokens = torch.tensor([*prompt, *output[:-1]], dtype=torch.int32).numpy().tobytes()
    new = NewSlot(3, tokens, len(prompt), 0, [], MIROSTAT.packed())
    executor.execute(StepPlan(5, 1, True, [], [new], [], [Chunk(3, 0, 8, False, [4])]))
    last = StepPlan(5, 2, False, [], [], [], [Chunk(3, 8, 2, True, [])])
    result = executor.execute(last)
    assert torch.frombuffer(bytearray(result.tokens), dtype=torch.int32).tolist() == output[-1:]
    assert float(executor.sampler.slots.bound[3]) == pytest.approx(bound, rel=1e-5)


def test_a_step_without_samplers_launches_none_of_their_kernels(
    tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[str] = []
    for name in ("sampler_stages", "surprise", "tail_free_rows"):
        monkeypatch.setattr(
            stage_rows, name, lambda *given, _name=name, **more: launched.append(_name)
        )
    folder, prompts = tiny_folder("qwen3"), some_prompts([3, 5])
    samplings = [asking(0.9, repetition=1.3), asking(0.7, min_p=0.1)]
    PlanDriver(gpu_executor(folder), 1).run(prompts, 3, samplings=samplings)
    assert launched == []
