"""The GPU's executor of ``--deterministic``: a row's bits do not depend on the rest of a step.

Without a GPU its kernels run in Triton's interpreter, which adds up in an order of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from support.worker.plan_driver import PlanDriver
from support.worker.tiny_models import generated, some_prompts

from penstock.protocol.config import (
    CacheConfig,
    Config,
    ConfigError,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
)
from penstock.protocol.model_info import read_model_info
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.steps import SlotSampling
from penstock.services.worker.gpu.decoder import dense_executor
from penstock.services.worker.gpu.executor import GpuExecutor
from penstock.services.worker.gpu.fixed_decoder import FixedDecoder
from penstock.services.worker.layer_groups import group_layers
from penstock.services.worker.loading import load_executor
from penstock.services.worker.model_weights import load_model
from penstock.services.worker.models.dense import DenseConfig, caches_of, dense_config
from penstock.services.worker.models.dense_form import dense_model

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("few_programs")
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
Folder = Callable[[str], Path]


def fixed_executor(folder: Path) -> GpuExecutor:
    info = read_model_info(folder)
    model = load_model(info, torch.float32, DEVICE, lambda note: None, longest=256)
    config = dense_config(model.specification)
    assert isinstance(config, DenseConfig), config
    groups = group_layers(caches_of(config)).groups
    capacity = EngineSizes(80, 16, 8, 48, 256, info.vocab_size, groups=groups)
    dense = dense_model(config, model.specification, model.weights)
    return dense_executor(*dense, capacity, decoder=FixedDecoder)


@pytest.mark.parametrize(
    "variant", ["qwen3", pytest.param("qwen2-wide", marks=[] if ON_GPU else pytest.mark.slow)]
)
def test_tokens_are_those_of_transformers(variant: str, tiny_folder: Folder) -> None:
    """Decoding beside prefill, preempted; one has norms of heads, the other biases."""
    prompts = some_prompts([1, 35])
    executor = fixed_executor(tiny_folder(variant))
    assert "one order" in executor.summary and not executor.decoder.shares_prefixes
    found = PlanDriver(executor, 1).run(prompts, 3, preemptions=1)
    assert found == generated(variant, prompts, 3)


def settings(folder: Path, **device: object) -> Config:
    return Config(
        model=ModelConfig(model=str(folder), dtype="bfloat16", max_model_len=512),
        cache=CacheConfig(num_kv_blocks=4000),
        scheduler=SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=700),
        device=DeviceConfig(device="cuda", deterministic=True, **device),  # type: ignore[arg-type]
    )


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_bf16_answers_are_the_same_in_any_batch_chunks_and_order(tmp_path: Path) -> None:
    """200 prompts of a model whose layers have the sizes of Qwen3-0.6B; drawn at a temperature at
    which any other bit soon is another token."""
    folder = make_shape(tmp_path / "model")
    config = settings(folder)
    config = replace(config, loading=replace(config.loading, load_format="dummy"))
    executor = load_executor(config, lambda note: None)
    draw = random.Random(5)
    prompts = [
        [draw.randrange(2000) for _ in range(draw.choice((1, 3, 17, 60, 150, 300)))]
        for _ in range(200)
    ]
    samplings = [SlotSampling([1.0, 0.7][at % 2], 0, 1.0, at) for at in range(len(prompts))]
    wanted = PlanDriver(executor, 1).run(prompts, 24, samplings=samplings, running=1)
    for running, chunk, preemptions in ((2, None, 9), (7, 33, 9), (64, None, 40), (256, 128, 40)):
        driver = PlanDriver(executor, running)
        found = driver.run(
            prompts, 24, samplings=samplings, running=running, chunk=chunk, preemptions=preemptions
        )
        assert found == wanted, (running, chunk)
        assert not driver.bad


def make_shape(folder: Path) -> Path:
    from penstock.loadtest.models.make_model import main

    sizes = {"hidden-size": 1024, "num-heads": 16, "num-kv-heads": 8, "head-dim": 128}
    more = {"intermediate-size": 3072, "num-layers": 4, "vocab-size": 2048}
    flags = [f"--{name}={value}" for name, value in {**sizes, **more}.items()]
    main([str(folder), "--dtype=bfloat16", *flags])
    return folder


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_a_model_with_windows_is_refused(tiny_folder: Folder) -> None:
    with pytest.raises(ConfigError, match="--deterministic: the model's attention has windows"):
        load_executor(settings(tiny_folder("gemma2")), lambda note: None)
