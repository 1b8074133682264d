"""Whose code computes a model that its own family refuses."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from msgspec.structs import replace
from support.worker.plan_driver import PlanDriver
from support.worker.tiny_models import some_prompts
from support.worker.whole_logits import assert_alike, configured

from penstock.protocol.config import (
    CacheConfig,
    Config,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
)
from penstock.protocol.model_info import BadModelFolder, ModelInfo, read_model_info
from penstock.services.worker.loading import load_executor
from penstock.services.worker.model_choice import choose_model
from penstock.services.worker.model_executor import ModelExecutor
from penstock.services.worker.model_shape import read_shape
from penstock.services.worker.models.dense import dense_config
from penstock.services.worker.models.llama import LlamaAdapter
from penstock.services.worker.models.registry import ADAPTERS, own_specification
from penstock.services.worker.models.specification import Experts, ModelSpecification

Folder = Callable[[str], Path]
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "an activation": ("llama", {"hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu'"),
    "an odd rotary width": (
        "phi3",
        {"partial_rotary_factor": 0.7, "rope_parameters": None},
        "partial_rotary_factor",
    ),
}


def config_for(folder: Path, impl: str = "auto") -> Config:
    return Config(
        model=ModelConfig(model=str(folder), model_impl=impl, max_model_len=256),  # type: ignore[arg-type]
        cache=CacheConfig(num_kv_blocks=64),
        scheduler=SchedulerConfig(max_num_seqs=4),
        device=DeviceConfig(device="cpu", threads=1),
    )


def test_a_model_that_its_family_refuses_is_computed_by_transformers(
    tiny_folder: Folder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = configured(tiny_folder("llama"), tmp_path / "model", hidden_act="quick_gelu")
    with caplog.at_level(logging.WARNING, "penstock.worker"):
        executor = load_executor(config_for(folder), lambda note: None)
    assert isinstance(executor, ModelExecutor)
    assert "its own family refuses it" in caplog.text
    assert "hidden_act 'quick_gelu'" in executor.summary
    read: Any = transformers.AutoModelForCausalLM.from_pretrained
    model = read(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    [prompt] = some_prompts([20])
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        wanted = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert PlanDriver(executor, 1).run([prompt], 5) == [wanted[0, 20:].tolist()]


@pytest.mark.parametrize("case", list(REFUSED))
def test_the_choice_names_what_the_family_refuses(
    case: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    variant, changes, words = REFUSED[case]
    info = read_model_info(configured(tiny_folder(variant), tmp_path / "model", **changes))
    choice = choose_model(info, config_for(info.folder))
    assert choice.specification is None and words in choice.refusal
    shape = read_shape(info, config_for(info.folder))
    assert shape.dense == "computed by transformers' modelling code"
    with pytest.raises(BadModelFolder, match=rf"{words}.*: --model-impl transformers$"):
        choose_model(info, config_for(info.folder, "native"))
    assert choose_model(info, config_for(info.folder, "transformers")).refusal == ""


def test_what_neither_computes_is_refused_with_both_reasons(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    folder = configured(tiny_folder("gemma3"), tmp_path / "model", use_bidirectional_attention=True)
    with pytest.raises(BadModelFolder, match=r"the model is an encoder.*; nor by .*not causal"):
        load_executor(config_for(folder), lambda note: None)


@pytest.mark.parametrize("impl", ["auto", "transformers"])
def test_a_quantized_model_is_not_left_to_transformers(
    impl: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    """Neither one that only that code computes, nor one that its own family refuses."""
    quantization = {"quant_method": "fp8"}
    folder = configured(
        tiny_folder("nemotron"), tmp_path / "other", quantization_config=quantization
    )
    with pytest.raises(BadModelFolder, match=r"quantized \(fp8\), and Nemotron.*weights must be"):
        choose_model(read_model_info(folder), config_for(folder, impl))
    changes = {"quantization_config": quantization, "hidden_act": "mish"}
    refused = configured(tiny_folder("llama"), tmp_path / "refused", **changes)
    message = "'mish'" if impl == "auto" else "weights must be plain"
    with pytest.raises(BadModelFolder, match=message):
        choose_model(read_model_info(refused), config_for(refused, impl))


def test_a_mixture_of_experts_is_refused_by_name_where_transformers_does_not_compute_it(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    folder = tiny_folder("mixtral")
    words = r"MixtralForCausalLM has 4 experts a layer, and Penstock's own layers are dense"
    with pytest.raises(BadModelFolder, match=rf"{words}; families .*--model-impl auto lets"):
        choose_model(read_model_info(folder), config_for(folder, "native"))
    changes = {"quantization_config": {"quant_method": "fp8"}}
    quantized = configured(folder, tmp_path / "model", **changes)
    with pytest.raises(BadModelFolder, match=rf"are quantized \(fp8\).*{words}\), for which"):
        choose_model(read_model_info(quantized), config_for(quantized))
    with pytest.raises(BadModelFolder, match=r"values of 128; Deep.* has 256 experts .*dense"):
        load_executor(config_for(tiny_folder("deepseek-v3")), lambda note: None)


def test_experts_of_an_adapter_are_refused_by_name(
    tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = read_model_info(tiny_folder("llama"))
    dense = own_specification(info)

    class OfExperts(LlamaAdapter):
        def specification(self, info: ModelInfo) -> ModelSpecification:
            layers = [
                replace(each, mlp=replace(each.mlp, experts=Experts(8, 2))) for each in dense.layers
            ]
            return replace(dense, layers=tuple(layers))

    monkeypatch.setitem(ADAPTERS, info.architecture, OfExperts())
    words = "LlamaForCausalLM has 8 experts a layer, and Penstock's own layers are dense"
    choice = choose_model(info, config_for(info.folder))
    assert choice.specification is None and words in choice.refusal
    with pytest.raises(BadModelFolder, match=f"{words}.*transformers' code may compute it"):
        choose_model(info, config_for(info.folder, "native"))
    assert dense_config(OfExperts().specification(info)) == "mixtures of experts"


def test_a_setting_that_the_familys_code_does_not_read_is_none_of_ours(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    assert_alike(configured(tiny_folder("cohere2"), tmp_path / "model", use_qk_norm=True))
