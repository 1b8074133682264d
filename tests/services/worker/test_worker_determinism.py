"""``--deterministic`` with a model that it cannot compute is refused before weights are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from penstock.protocol.config import Config, ConfigError
from penstock.protocol.config.fields import DeviceConfig, ModelConfig
from penstock.protocol.model_info import read_model_info
from penstock.protocol.pooling import read_pooling
from penstock.services.worker import model_loading
from penstock.services.worker.determinism import (
    check_deterministic,
    check_deterministic_kernels,
)

Folder = Callable[[str], Path]
PLAIN = "models that generate alone; leave --deterministic out"


def settings(folder: Path, **model: Any) -> Config:
    return Config(
        model=ModelConfig(model=str(folder), **model),
        device=DeviceConfig(device="cpu", deterministic=True),
    )


def refusal(config: Config, device: str = "cpu", dtype: str = "float32") -> str:
    """Empty: there is none."""
    info = read_model_info(config.model.model)
    try:
        check_deterministic(config, info, read_pooling(info, config.model), device, dtype)
    except ConfigError as failure:
        return str(failure)
    return ""


@pytest.mark.parametrize("dtype", ["bfloat16", "auto"])
def test_a_type_without_one_order_is_refused_before_weights_are_read(
    tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    def read(*args: Any, **options: Any) -> None:
        pytest.fail("the weights are read")

    monkeypatch.setattr(model_loading, "make_model", read)
    monkeypatch.setattr(model_loading, "choose_dtype", lambda *_: torch.bfloat16)
    with pytest.raises(ConfigError) as failure:
        model_loading.load_model_executor(settings(tiny_folder("llama"), dtype=dtype), print)
    assert str(failure.value) == (
        "--deterministic: on a CPU the order of sums is fixed in float32 alone, and --dtype "
        f"{dtype} is bfloat16 here; give --dtype float32, or leave --deterministic out"
    )


def test_a_model_that_transformers_computes_is_refused(tiny_folder: Folder) -> None:
    found = refusal(settings(tiny_folder("gpt2")))
    assert found.startswith("--deterministic: transformers' code computes GPT2LMHeadModel, and")
    assert found.endswith("(docs/models.md), or leave --deterministic out")


def test_quantized_weights_are_refused(tiny_folder: Folder, tmp_path: Path) -> None:
    folder = changed(tiny_folder("llama"), tmp_path, quantization_config={"quant_method": "fp8"})
    found = refusal(settings(folder))
    assert "are quantized (fp8), and plain ones are needed; give a checkpoint in bfloat" in found


def test_a_folder_for_another_task_is_refused(tiny_folder: Folder, tmp_path: Path) -> None:
    folder = changed(
        tiny_folder("llama"), tmp_path, architectures=["LlamaForSequenceClassification"]
    )
    found = refusal(settings(folder))
    assert found.startswith("--deterministic: the model is for ") and found.endswith(PLAIN)


@pytest.mark.parametrize(
    ("variant", "reason"),
    [
        ("llama", ""),
        ("mistral", "the model's attention has windows, chunks, soft caps or sinks, for which no"),
        ("gemma2", "the model's attention has windows, chunks, soft caps or sinks, for which no"),
        ("cohere", "on a GPU Penstock's own kernels have to compute the model's layers, and here"),
    ],
)
def test_on_a_gpu_it_is_told_from_the_models_form(
    tiny_folder: Folder, variant: str, reason: str
) -> None:
    found = refusal(settings(tiny_folder(variant)), "cuda", "bfloat16")
    assert found.startswith(f"--deterministic: {reason}") if reason else not found
    assert not reason or found.endswith("leave --deterministic out")


def test_kernels_that_turn_out_not_to_run_are_told_after_loading(tiny_folder: Folder) -> None:
    config = settings(tiny_folder("llama"))
    with pytest.raises(ConfigError, match=r"they do not: Triton does not work here; give another"):
        check_deterministic_kernels(config, "Triton does not work here")


def test_without_the_flag_nothing_is_refused(tiny_folder: Folder) -> None:
    config = settings(tiny_folder("gpt2"))
    device = msgspec.structs.replace(config.device, deterministic=False)
    plain = msgspec.structs.replace(config, device=device)
    assert not refusal(plain, dtype="bfloat16")
    check_deterministic_kernels(plain, "no kernels")


def changed(source: Path, folder: Path, **values: Any) -> Path:
    """A copy of a folder's files without weights, with these values in ``config.json``."""
    config = json.loads((source / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps(config))
    return folder
