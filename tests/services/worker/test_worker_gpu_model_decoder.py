"""The GPU's executor around code that is not ours, against that library's own generation.

Without a GPU the kernels run in Triton's interpreter, launch by launch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.worker.plain_logprobs import check_prompts
from support.worker.plan_driver import GREEDY, PlanDriver
from support.worker.repeated_work import Repeated
from support.worker.tiny_models import enlarged, generated, seen_through_blocks, some_prompts

from penstock.protocol.model_info import read_model_info
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.steps import SlotSampling
from penstock.services.worker.gpu.executor import GpuExecutor
from penstock.services.worker.gpu.model_decoder import model_executor
from penstock.services.worker.layer_groups import group_layers
from penstock.services.worker.model_executor import ModelExecutor
from penstock.services.worker.model_weights import load_model
from penstock.services.worker.models.causal_model import CausalModel, StepInputs
from penstock.services.worker.models.decoder import Decoder
from penstock.services.worker.models.transformers_loading import load_transformers_model

pytestmark = pytest.mark.usefixtures("few_programs")
ON_GPU = torch.cuda.is_available()
CPU = torch.device("cpu")
OF_QUICK_TESTS = ("llama", "gemma2", "olmo2")
OWN_LAYERS = ("starcoder2", "cohere", "exaone4")
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
Folder = Callable[[str], Path]


def silent(note: str) -> None:
    pass


def assert_exact(variant: str, executor: GpuExecutor) -> None:
    prompts, count = some_prompts([1, 35, 150] if ON_GPU else [1, 20]), 2
    if ON_GPU or variant not in OF_QUICK_TESTS:
        count = 16 if ON_GPU else 3
    assert PlanDriver(executor, 1).run(prompts, count) == generated(variant, prompts, count)


def executor_of(model: CausalModel) -> GpuExecutor:
    groups = group_layers(model.caches).groups
    sizes = EngineSizes(80, 16, 8, 48, 256, 307, groups=groups)
    return model_executor(model, "by its own code", sizes)


def by_transformers(folder: Path, dtype: torch.dtype = torch.float32) -> GpuExecutor:
    info = read_model_info(folder)
    return executor_of(load_transformers_model(info, dtype, DEVICE, random=False, seed=0))


def by_our_layers(folder: Path) -> GpuExecutor:
    info = read_model_info(folder)
    return executor_of(load_model(info, torch.float32, DEVICE, silent, longest=256))


BY_TRANSFORMERS = (
    "gpt2", "gpt2-scales", "qwen3", "stablelm", "gemma2", "llama-80", "gpt-neox", "opt", "phi",
    "olmo", "helium", "gpt-oss", "llama4",
)  # fmt: skip
OF_EXPERTS = ("gpt-oss",)
IN_SHORT = ("gemma2",)
"""Of windows and soft caps."""


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(name, marks=[] if ON_GPU or name in IN_SHORT else pytest.mark.slow)
        for name in BY_TRANSFORMERS
    ],
)
def test_models_by_transformers_code_give_its_tokens(variant: str, tiny_folder: Folder) -> None:
    assert_exact(variant, by_transformers(tiny_folder(variant)))


@pytest.mark.parametrize(
    "variant", ["olmo2", *(pytest.param(name, marks=pytest.mark.slow) for name in OWN_LAYERS)]
)
def test_families_without_kernels_for_their_layers_give_the_tokens_of_transformers(
    variant: str, tiny_folder: Folder
) -> None:
    assert_exact(variant, by_our_layers(tiny_folder(variant)))


@pytest.mark.slow
def test_where_all_blocks_are_seen_besides_a_window_hides_nothing(tiny_folder: Folder) -> None:
    info = read_model_info(tiny_folder("llama"))
    model = load_model(info, torch.float32, DEVICE, silent, longest=256)
    assert isinstance(model, Decoder)
    changed = Decoder(seen_through_blocks(model.specification, window=9), model.weights)
    assert_exact("llama", executor_of(changed))


def test_layers_with_mlps_of_different_widths_have_our_attention_and_give_right_tokens(
    tiny_folder: Folder,
) -> None:
    info = read_model_info(tiny_folder("llama"))
    model = load_model(info, torch.float32, DEVICE, silent, longest=256)
    assert isinstance(model, Decoder)
    assert_exact("llama", executor_of(enlarged(model, width=48)))


@pytest.mark.slow
def test_steps_padded_to_the_size_of_a_graph_and_sampled_rows_are_those_of_the_plain_executor(
    tiny_folder: Folder,
) -> None:
    """Logprobs of prompts, too, for which more rows than the sampled ones are read."""
    folder, prompts = tiny_folder("olmo2"), some_prompts([1, 9])
    executor = by_our_layers(folder)
    executor.graphs.make(lambda work: Repeated(executor.chunks, work), 8)
    samplings = [GREEDY, SlotSampling(1.0, 20, 0.9, 11)]
    plain = load_model(read_model_info(folder), torch.float32, CPU, silent, longest=256)
    capacity = EngineSizes(80, 16, 8, 48, 256, 307, groups=group_layers(plain.caches).groups)
    wanted = PlanDriver(ModelExecutor(plain, capacity), 2).run(prompts, 2, samplings=samplings)
    assert PlanDriver(executor, 6).run(prompts, 2, samplings=samplings) == wanted
    executor.reset()
    check_prompts(PlanDriver(executor, 3), folder, prompts)


gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device"),
]


@pytest.mark.parametrize("variant", [pytest.param(each, marks=gpu) for each in BY_TRANSFORMERS])
def test_graphs_of_transformers_code_give_its_tokens(variant: str, tiny_folder: Folder) -> None:
    """torch's products of experts in float32 wait for the device, which the executor finds out."""
    executor = by_transformers(tiny_folder(variant))
    executor.warm_up()
    waits = "a step waits for the device" if variant in OF_EXPERTS else ""
    assert executor.graphs.why_none.startswith(waits) and bool(executor.graphs.why_none) == bool(
        waits
    )
    assert_exact(variant, executor)


@pytest.mark.parametrize("variant", [pytest.param(each, marks=gpu) for each in OF_EXPERTS])
def test_experts_of_transformers_code_have_graphs_in_bfloat16(
    variant: str, tiny_folder: Folder
) -> None:
    executor = by_transformers(tiny_folder(variant), torch.bfloat16)
    executor.warm_up()
    assert not executor.graphs.why_none


@pytest.mark.parametrize("variant", [pytest.param("stablelm", marks=gpu)])
def test_code_that_waits_for_the_device_is_launched_kernel_by_kernel(
    variant: str, tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = by_transformers(tiny_folder(variant))
    model: Any = executor.decoder
    forward = model._model.hidden

    def waiting(step: StepInputs, rows: torch.Tensor | None) -> torch.Tensor:
        if int(step.tokens[0]) < 0:
            raise AssertionError("a token is negative")
        hidden: torch.Tensor = forward(step, rows)
        return hidden

    monkeypatch.setattr(model._model, "hidden", waiting)
    executor.warm_up()
    assert "a step waits for the device" in executor.graphs.why_none
    assert executor.graphs.why_none in executor.summary
    assert_exact(variant, executor)
