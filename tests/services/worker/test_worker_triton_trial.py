"""A GPU on which Triton does not work: torch's operations compute, and the log says why."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.worker.plan_driver import PlanDriver
from support.worker.pretended_device import pretended
from support.worker.tiny_models import generated, some_prompts

from penstock.protocol.config import (
    CacheConfig,
    Config,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
)
from penstock.protocol.model_info import read_model_info
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.services.worker import model_loading
from penstock.services.worker.gpu.triton_trial import failure_of_triton, why_no_kernels
from penstock.services.worker.loaded_model import LoadedModel, kernels_for
from penstock.services.worker.model_executor import ModelExecutor
from penstock.services.worker.model_weights import load_model
from penstock.services.worker.models.dense import DenseConfig, dense_config
from penstock.services.worker.models.dense_form import DenseModel, dense_model

PREFILL = "penstock.services.worker.gpu.attention_choice.prefill_attention"
CPU = torch.device("cpu")
Folder = Callable[[str], Path]
WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
from penstock.services.worker import model_loading
from penstock.services.worker.models import transformers_model
from support.worker.pretended_device import pretended
print(model_loading.kernels_for(pretended(sys.argv[1]), 16))
"""


@pytest.fixture(autouse=True)
def _tried_anew() -> Iterator[None]:
    why_no_kernels.cache_clear()
    yield
    why_no_kernels.cache_clear()


def test_a_triton_that_works_is_found_to_work() -> None:
    pytest.importorskip("triton")
    device = torch.device("cuda") if torch.cuda.is_available() else CPU
    assert why_no_kernels(device) == ""


def test_a_kernel_that_fails_leaves_the_model_to_torch_with_the_reason(
    tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")

    def fail(*given: object, **named: object) -> None:
        raise RuntimeError("Failed to find C compiler.\n Please specify via CC")

    monkeypatch.setattr("penstock.kernels.gpu.norm.rms_norm", fail)
    folder = tiny_folder("qwen2")
    reason = kernels_for(pretended(folder), 16)
    assert reason == (
        "Triton does not work here: RuntimeError: Failed to find C compiler. Please specify via CC"
    )
    model = load_model(read_model_info(folder), torch.float32, CPU, lambda note: None, longest=256)
    executor = LoadedModel(model, reason).executor(EngineSizes(80, 16, 8, 48, 256, 307))
    assert isinstance(executor, ModelExecutor)
    prompts = some_prompts([1, 20])
    assert PlanDriver(executor, 1).run(prompts, 3) == generated("qwen2", prompts, 3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where no GPU is")
def test_a_model_of_which_a_kernel_fails_later_is_loaded_again_without(
    tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first step is where the kernels of attention are compiled."""
    errors = pytest.importorskip("triton.runtime.errors")

    def in_form(model: Any, block_size: int) -> DenseModel:
        config = dense_config(model.specification)
        assert isinstance(config, DenseConfig)
        return dense_model(config, model.specification, model.weights)

    def fail(*given: object, **named: object) -> None:
        raise errors.OutOfResources(200_000, 100_000, "shared memory")

    monkeypatch.setattr(model_loading, "kernels_for", in_form)
    monkeypatch.setattr(PREFILL, fail)
    folder = tiny_folder("qwen3")
    config = Config(
        model=ModelConfig(model=str(folder), max_model_len=256),
        cache=CacheConfig(num_kv_blocks=64),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16),
        device=DeviceConfig(device="cpu", threads=1),
    )
    with caplog.at_level(logging.WARNING, "penstock.worker"):
        executor = model_loading.load_model_executor(config, lambda note: None)
    assert "loaded again, without kernels of Penstock's own: OutOfResources: " in caplog.text
    assert isinstance(executor, ModelExecutor)
    prompts = some_prompts([1, 20])
    assert PlanDriver(executor, 1).run(prompts, 3, chunk=16) == generated("qwen3", prompts, 3)


@pytest.mark.parametrize(
    "failure", [RuntimeError("a shape"), RuntimeError("Triton Error [CUDA]: out of memory")]
)
def test_what_is_no_failure_of_triton_ends_the_start(failure: Exception) -> None:
    assert failure_of_triton(failure) == ""
    assert failure_of_triton(RuntimeError("Triton Error [CUDA]: invalid device function"))


def test_a_kernel_that_computes_wrong_numbers_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(
        "penstock.kernels.gpu.norm.rms_norm", lambda x, weight, eps, out: out.zero_()
    )
    assert "a norm that it computes differs from torch's" in why_no_kernels(CPU)


def test_rocm_has_no_kernels_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.3")
    assert why_no_kernels(CPU) == "the kernels are made for CUDA, and this torch for ROCm 6.3"


def test_a_worker_without_triton_computes_with_torch(tiny_folder: Folder) -> None:
    program = f"import sys; sys.path.append({str(Path(__file__).parents[2])!r})\n{WITHOUT_TRITON}"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tiny_folder("qwen2"))],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Triton does not work here: ModuleNotFoundError: "), done.stdout
