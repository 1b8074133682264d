"""LoRA adapters in the GPU's executor, beside merged weights and the plain executor.

Without a GPU its kernels run in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from support.pipeline.adapter_folders import write_adapter
from support.worker.plan_driver import PlanDriver
from support.worker.repeated_work import Repeated
from support.worker.tiny_adapters import adapted, bring, come, merge, modules_of, settings_for
from support.worker.tiny_models import make_model, some_prompts
from test_worker_adapters import executor_of, expected, logits

from penstock.protocol.model_info import read_model_info
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.steps import LoadAdapter
from penstock.services.worker.adapters.adapter_loader import AdapterLoader
from penstock.services.worker.adapters.device_adapters import DeviceAdapters
from penstock.services.worker.adapters.loading import load_adapters
from penstock.services.worker.gpu.decoder import dense_executor
from penstock.services.worker.gpu.executor import GpuExecutor
from penstock.services.worker.layer_groups import group_layers
from penstock.services.worker.model_weights import load_model
from penstock.services.worker.models.dense import DenseConfig, caches_of, dense_config
from penstock.services.worker.models.dense_form import dense_model

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("few_programs")
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
Folder = Callable[[str], Path]


def gpu_executor(model: Path, **adapters: Path) -> tuple[GpuExecutor, DeviceAdapters]:
    """``--max-loras`` allows one more than ``adapters``."""
    info = read_model_info(model)
    decoder = load_model(info, torch.float32, DEVICE, lambda note: None, longest=256)
    config = dense_config(decoder.specification)
    assert isinstance(config, DenseConfig), config
    dense = dense_model(config, decoder.specification, decoder.weights)
    settings = settings_for(model, **adapters)
    loading = replace(settings.loading, max_loras=len(adapters) + 1, max_lora_rank=16)
    settings = replace(settings, loading=loading)
    _, held = load_adapters(settings, decoder, in_places=True)
    assert isinstance(held, DeviceAdapters)
    groups = group_layers(caches_of(config)).groups
    capacity = EngineSizes(80, 8, 8, 48, 256, info.vocab_size, groups=groups)
    return dense_executor(*dense, capacity, adapters=held), held


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(each, marks=[] if ON_GPU or each == "granite" else pytest.mark.slow)
        for each in ("qwen3", "phi3", "glm4", "gemma2", "granite", "llama3-wide")
    ],
)
def test_logits_equal_those_of_merged_weights(
    variant: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    modules = modules_of(make_model(variant))
    every = write_adapter(tmp_path / "every", modules, seed=1)
    some = {name: size for name, size in modules.items() if ".0." in name}
    part = write_adapter(tmp_path / "part", dict(list(some.items())[::2]), seed=2)
    executor, held = gpu_executor(tiny_folder(variant), every=every, part=part)
    digests, prompts = list(held.numbers), some_prompts([9, 5, 12])
    got = logits(executor, prompts, [digests[0], "", digests[1]]).cpu()
    wanted = [merge(make_model(variant), every), make_model(variant)]
    wanted.append(merge(make_model(variant), part))
    for row, model in enumerate(wanted):
        torch.testing.assert_close(got[row], expected(model, prompts[row]), atol=1e-4, rtol=1e-4)
    assert (got[0] - expected(wanted[1], prompts[0])).abs().max() > 0.01


def test_tokens_are_those_of_the_plain_executor(tiny_folder: Folder, tmp_path: Path) -> None:
    """Decoding beside prefill, preempted, with rows of no adapter, and in steps without any."""
    modules = modules_of(make_model("qwen3"))
    folders = {
        name: write_adapter(tmp_path / name, modules, seed=seed)
        for seed, name in enumerate(("one", "two"))
    }
    executor, held = gpu_executor(tiny_folder("qwen3"), **folders)
    digests = ["", *held.numbers]
    prompts = some_prompts([3, 30, 17, 9] if ON_GPU else [3, 12])
    chosen = [digests[-1 - place % 3] for place in range(len(prompts))]
    plain = executor_of(adapted(tiny_folder("qwen3"), **folders))
    wanted = PlanDriver(plain, 1).run(prompts, 3, adapters=chosen)
    if ON_GPU:
        executor.warm_up()
    elif executor.adapted is not None:
        executor.adapted.make(lambda work: Repeated(executor.chunks, work), 8)
    assert PlanDriver(executor, 2).run(prompts, 3, adapters=chosen, preemptions=1) == wanted
    alone = PlanDriver(plain, 1).run(prompts[:1], 2)
    executor.reset()
    assert PlanDriver(executor, 2).run(prompts[:1], 2) == alone


def test_an_adapter_that_comes_while_steps_run_takes_a_free_place(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    """And leaves nothing in it for the next one, which has fewer layers."""
    modules = modules_of(make_model("qwen3"))
    kept, one = (write_adapter(tmp_path / f"{seed}", modules, seed=seed) for seed in (0, 1))
    few = dict(list(modules.items())[:2])
    small = write_adapter(tmp_path / "small", few, ranks=lambda name: 2, config={"r": 2})
    executor, held = gpu_executor(tiny_folder("qwen3"), kept=kept)
    loader, (prompt,) = AdapterLoader(held, 16), some_prompts([7])
    for folder, scale in ((one, 2.0), (small, 4.0)):
        digest = come(loader, folder).digest
        assert held.numbers[digest] == 2
        got = logits(executor, [prompt], [digest])[0].cpu()
        merged = merge(make_model("qwen3"), folder, lambda name, scale=scale: scale)
        torch.testing.assert_close(got, expected(merged, prompt), atol=1e-4, rtol=1e-4)
        loader.drop(digest)
    wide = write_adapter(tmp_path / "wide", modules, ranks=lambda name: 17, config={"r": 17})
    assert "--max-lora-rank allows 16" in come(loader, wide).reason


def test_an_adapter_takes_the_place_of_another_and_comes_back(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    """The place has the tensors of the one that is in it alone; the host has those of all."""
    modules = dict(list(modules_of(make_model("qwen3")).items())[:1])
    folders = [write_adapter(tmp_path / f"{seed}", modules, seed=seed) for seed in range(3)]
    _, held = gpu_executor(tiny_folder("qwen3"), kept=folders[0])
    loader = AdapterLoader(held, 16)
    (kept,), stack = held.numbers, held.stacks[0].qkv
    other = come(loader, folders[1]).digest
    assert held.numbers == {kept: 1, other: 2}
    before = stack.down.clone(), stack.up.clone()
    assert not torch.equal(before[0][0], before[0][1])
    assert not bring(loader, kept, []).reason and held.numbers == {kept: 1}
    held.leave(kept)
    assert not bring(loader, other, []).reason and held.numbers == {other: 1}
    for now, then in zip((stack.down, stack.up), before, strict=True):
        assert torch.equal(now[0], then[1])
    assert list(held.held) == [kept, other]
    loader.load(LoadAdapter("more", str(folders[2])))
    while not (found := loader.finished()):
        pass
    assert "2 adapters are loaded" in found[0].reason
