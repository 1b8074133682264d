"""Where an engine on a CPU says that it repeats answers bit for bit, it does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.worker.plan_driver import PlanDriver
from support.worker.tiny_models import some_prompts

from penstock.protocol.config import CacheConfig, Config, DeviceConfig, ModelConfig, SchedulerConfig
from penstock.protocol.config.fields import LoadingConfig, SpeculationConfig
from penstock.protocol.model_info import read_model_info
from penstock.protocol.pooling import read_pooling
from penstock.protocol.wire.messages.steps import SlotSampling
from penstock.services.worker.determinism import repeats
from penstock.services.worker.executor_report import attached, capacity_of
from penstock.services.worker.loading import load_executor

Folder = Callable[[str], Path]


def settings(folder: Path, **groups: Any) -> Config:
    config = Config(
        model=ModelConfig(model=str(folder), dtype="float32", max_model_len=128),
        cache=CacheConfig(num_kv_blocks=600),
        scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=300),
        device=DeviceConfig(device="cpu", threads=1),
    )
    return msgspec.structs.replace(config, **groups)


def test_answers_and_logprobs_have_the_same_bits_in_every_batch(tiny_folder: Folder) -> None:
    """Alone, in batches of 2 to 64, in chunks and after preemptions."""
    executor = load_executor(settings(tiny_folder("qwen3")), lambda note: None)
    assert capacity_of(executor).repeats and attached(executor, 1, 0).repeats
    prompts = some_prompts([1 + 7 * at % 40 for at in range(64)])
    samplings = [
        SlotSampling([0.0, 0.8, 1.5][at % 3], [0, 20][at % 2], [1.0, 0.9][at % 2], at, logprobs=2)
        for at in range(64)
    ]
    wanted = None
    for seed, cut in enumerate(
        (
            {"running": 1, "chunk": 1000},
            {"running": 2, "chunk": 5},
            {"running": 9},
            {"running": 64, "chunk": 13, "preemptions": 20},
            {"running": 64, "chunk": 1000},
        )
    ):
        executor.reset()
        driver = PlanDriver(executor, seed)
        tokens = driver.run(prompts, 3, samplings=samplings, **cut)  # type: ignore[arg-type]
        found = tokens, driver.logprobs
        wanted = wanted or found
        assert len(found[1]) == 64 * 3
        assert found == wanted, cut


@pytest.mark.parametrize(
    ("variant", "groups", "dtype", "said"),
    [
        ("qwen3", {}, torch.float32, True),
        ("gemma2", {}, torch.float32, True),
        ("qwen3", {"speculation": SpeculationConfig(speculative="auto")}, torch.float32, True),
        ("qwen3", {}, torch.bfloat16, False),
        ("gpt-neox", {}, torch.float32, False),
        ("qwen3", {"cache": CacheConfig(kv_cache_dtype="int8")}, torch.float32, False),
        ("qwen3", {"loading": LoadingConfig(lora=["a=/a"])}, torch.float32, False),
    ],
    ids=str,
)
def test_an_engine_repeats_answers_where_deterministic_would_change_nothing(
    variant: str, groups: dict[str, Any], dtype: torch.dtype, said: bool, tiny_folder: Folder
) -> None:
    config = settings(tiny_folder(variant), **groups)
    info = read_model_info(config.model.model)
    pooling = read_pooling(info, config.model)
    assert repeats(config, info, pooling, "cpu", str(dtype).removeprefix("torch.")) is said


def test_a_gpu_repeats_answers_with_the_flag_alone(tiny_folder: Folder) -> None:
    for asked in (False, True):
        config = settings(tiny_folder("qwen3"), device=DeviceConfig(deterministic=asked))
        info = read_model_info(config.model.model)
        pooling = read_pooling(info, config.model)
        assert repeats(config, info, pooling, "cuda", torch.bfloat16) is asked
