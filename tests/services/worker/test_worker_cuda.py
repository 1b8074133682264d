"""What a CUDA device computes, graphs included, beside the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.worker.plan_driver import PlanDriver

from penstock.kernels.draw_keys import draw_keys, key_words
from penstock.kernels.sampling import exponential
from penstock.protocol.config import (
    CacheConfig,
    Config,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
)
from penstock.protocol.wire.messages.steps import SlotSampling
from penstock.services.worker.loading import load_executor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
Folder = Callable[[str], Path]


def outputs(folder: Path, device: str, samplings: list[SlotSampling]) -> list[list[int]]:
    executor = load_executor(
        Config(
            model=ModelConfig(model=str(folder), dtype="float32"),
            cache=CacheConfig(num_kv_blocks=500),
            scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=128),
            device=DeviceConfig(device=device, threads=2),  # type: ignore[arg-type]
        ),
        lambda note: None,
    )
    prompts = [[(7 * i + n) % 300 for i in range(n)] for n in (1, 5, 40, 129, 300, 17)]
    return PlanDriver(executor, 4).run(prompts, 16, samplings=samplings, preemptions=3)


@pytest.mark.parametrize("variant", ["qwen3", "qwen2-wide", "llama3-wide"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_fp32_tokens_equal_those_of_the_cpu(
    variant: str, temperature: float, tiny_folder: Folder
) -> None:
    samplings = [
        SlotSampling(temperature, [0, 30][i % 2], [1.0, 0.9][i // 3], 5 + i) for i in range(6)
    ]
    folder = tiny_folder(variant)
    assert outputs(folder, "cuda", samplings) == outputs(folder, "cpu", samplings)


@pytest.mark.timeout(600)
def test_ten_thousand_steps_of_arrivals_and_aborts_change_no_token(tiny_folder: Folder) -> None:
    """Every illegal access would end the process's CUDA context; a wrong block, slot or position
    would change tokens."""
    draw = random.Random(7)
    prompts = [
        [draw.randrange(300) for _ in range(draw.choice((1, 3, 17, 60, 150)))] for _ in range(900)
    ]
    samplings = [SlotSampling(draw.choice((0.0, 0.9)), 0, 1.0, i) for i in range(len(prompts))]
    executor = load_executor(
        Config(
            model=ModelConfig(model=str(tiny_folder("qwen3")), dtype="float32"),
            cache=CacheConfig(num_kv_blocks=2000),
            scheduler=SchedulerConfig(max_num_seqs=40, max_num_batched_tokens=200),
            device=DeviceConfig(device="cuda"),
        ),
        lambda note: None,
    )
    wanted = PlanDriver(executor, 1).run(prompts, 60, samplings=samplings, running=40)
    driver, steps, cut = PlanDriver(executor, 2), 0, 0
    while steps < 10_000:
        driver.step = 0
        found = driver.run(
            prompts, 60, samplings=samplings, running=draw.choice((1, 3, 20, 40)), preemptions=40,
            aborts=0.2,
        )  # fmt: skip
        steps += driver.step
        for output, whole in zip(found, wanted, strict=True):
            assert output == whole[: len(output)]
            cut += len(output) < 60
        assert not driver.bad
    assert cut > 100


def test_random_numbers_are_the_same_on_both_devices() -> None:
    counter = np.arange(64, dtype=np.uint64)
    words = torch.from_numpy(key_words(draw_keys(counter, counter, counter)))
    ids = torch.arange(5000, dtype=torch.int32)[None, :]
    host = exponential(ids, words)
    device = exponential(ids.cuda(), words.cuda()).cpu()
    torch.testing.assert_close(device, host, rtol=1e-6, atol=0)
