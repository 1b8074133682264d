"""LoRA adapters on a CUDA device, graphs included, beside the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pipeline.adapter_folders import write_adapter
from support.worker.plan_driver import PlanDriver
from support.worker.tiny_adapters import bring, come, merge, modules_of
from support.worker.tiny_models import make_model, some_prompts
from test_worker_adapters import expected, logits

from penstock.protocol.config import (
    CacheConfig,
    Config,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
)
from penstock.protocol.config.fields import LaunchConfig, LoadingConfig
from penstock.services.worker.gpu.executor import GpuExecutor
from penstock.services.worker.loading import load_executor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
Folder = Callable[[str], Path]


def loaded(
    folder: Path, device: Any, adapters: dict[str, Path], dtype: Any = "float32", places: int = 8
) -> Any:
    lora = [f"{name}={path}" for name, path in adapters.items()]
    config = Config(
        model=ModelConfig(model=str(folder), dtype=dtype),
        cache=CacheConfig(num_kv_blocks=500),
        loading=LoadingConfig(lora=lora, max_loras=places, max_cpu_loras=8, max_lora_rank=16),
        launch=LaunchConfig(lora_dirs=[] if adapters else ["/"]),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=128),
        device=DeviceConfig(device=device, threads=2),
    )
    return load_executor(config, lambda note: None)


def some_adapters(variant: str, folder: Path, count: int = 3) -> dict[str, Path]:
    modules = modules_of(make_model(variant))
    return {
        f"a{seed}": write_adapter(folder / f"a{seed}", modules, seed=seed) for seed in range(count)
    }


def outputs(executor: Any) -> list[list[int]]:
    prompts = [[(7 * i + n) % 300 for i in range(n)] for n in (1, 5, 40, 129, 300, 17)]
    digests = ["", *(one.digest for one in executor.adapters)]
    chosen = [digests[place % len(digests)] for place in range(len(prompts))]
    return PlanDriver(executor, 4).run(prompts, 16, adapters=chosen, preemptions=3)


@pytest.mark.parametrize("variant", ["qwen3", "llama3-wide", "phi3", "starcoder2"])
def test_fp32_tokens_equal_those_of_the_cpu(
    variant: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    """The last one's layers are no kernels: torch's operations compute it, adapters and all."""
    adapters = some_adapters(variant, tmp_path)
    executor = loaded(tiny_folder(variant), "cuda", adapters)
    assert isinstance(executor, GpuExecutor) == (variant != "starcoder2")
    found = outputs(executor)
    assert found == outputs(loaded(tiny_folder(variant), "cpu", adapters))
    assert len({tuple(each) for each in found}) > 3


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-4), ("bfloat16", 0.15)])
def test_logits_equal_those_of_merged_weights(
    dtype: str, limit: float, tiny_folder: Folder, tmp_path: Path
) -> None:
    """In bfloat16 the CPU's are off by 0.09: these adapters outweigh the model."""
    adapters = some_adapters("llama3-wide", tmp_path, 2)
    executor = loaded(tiny_folder("llama3-wide"), "cuda", adapters, dtype)
    digests, prompts = [one.digest for one in executor.adapters], some_prompts([9, 5, 12, 30])
    got = logits(executor, prompts, [digests[0], "", digests[1], digests[0]]).float().cpu()
    models = [merge(make_model("llama3-wide"), path) for path in adapters.values()]
    for row, model in enumerate((models[0], make_model("llama3-wide"), models[1], models[0])):
        wanted = expected(model, prompts[row])
        assert (got[row] - wanted).abs().max() < limit * wanted.abs().max().clamp(min=1.0)


def test_adapters_come_and_go_beside_steps_that_do_not_notice(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    adapters = some_adapters("llama3-wide", tmp_path)
    executor = loaded(tiny_folder("llama3-wide"), "cuda", {})
    loader, (prompt,) = executor.loader, some_prompts([9])
    base = logits(executor, [prompt], [""])[0].clone()
    before = torch.cuda.memory_allocated()
    seen: dict[str, torch.Tensor] = {}

    def undisturbed() -> None:
        assert torch.equal(logits(executor, [prompt], [""])[0], base)

    for turn in range(40):
        name, path = list(adapters.items())[turn % 3]
        digest = come(loader, path, undisturbed).digest
        got = logits(executor, [prompt], [digest])[0].clone()
        assert torch.equal(got, seen.setdefault(name, got)) and not torch.equal(got, base)
        loader.drop(digest)
    assert torch.cuda.memory_allocated() - before < 1 << 20 and not executor.loader.busy


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_take_turns_in_two_places_beside_steps_that_do_not_notice(
    dtype: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    """Each has the same bits whichever place it is in, and whatever was there before."""
    adapters = some_adapters("llama3-wide", tmp_path, 5)
    executor = loaded(tiny_folder("llama3-wide"), "cuda", adapters, dtype, places=2)
    loader, (prompt,) = executor.loader, some_prompts([9])
    digests = [one.digest for one in executor.adapters]
    kept = digests[0]
    first = logits(executor, [prompt], [kept])[0].clone()
    seen: dict[str, torch.Tensor] = {}
    memory = torch.cuda.memory_allocated()

    def undisturbed() -> None:
        assert torch.equal(logits(executor, [prompt], [kept])[0], first)

    for turn in range(60):
        digest = digests[1 + turn % 4]
        assert not bring(loader, digest, [kept], undisturbed).reason
        assert len(loader.adapters.numbers) == 2
        both = logits(executor, [prompt, prompt], [kept, digest])
        assert torch.equal(both[1], seen.setdefault(digest, both[1].clone()))
        assert not torch.equal(both[1], both[0])
    assert torch.cuda.memory_allocated() - memory < 1 << 20
