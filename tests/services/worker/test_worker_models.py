"""Which ``config.json`` is served, in both layouts, and which is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import LLAMA3

from penstock.kernels.rotary import RopeParameters
from penstock.protocol.model_info import BadModelFolder, read_model_info
from penstock.services.worker.models.decoder import DecoderConfig
from penstock.services.worker.models.registry import adapter_for

Folder = Callable[[str], Path]


@pytest.fixture
def configured(tiny_folder: Folder, tmp_path: Path) -> Callable[..., DecoderConfig]:
    def configure(variant: str, remove: tuple[str, ...] = (), **changes: Any) -> DecoderConfig:
        folder = tmp_path / "model"
        shutil.copytree(tiny_folder(variant), folder)
        config = json.loads((folder / "config.json").read_text()) | changes
        for key in remove:
            config.pop(key, None)
        (folder / "config.json").write_text(json.dumps(config))
        info = read_model_info(folder)
        return adapter_for(info).decoder_config(info)

    return configure


Configure = Callable[..., DecoderConfig]


def test_both_layouts_of_rope_settings_mean_the_same(configured: Configure) -> None:
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    config = configured("llama3", ("rope_parameters",), rope_theta=500000.0, rope_scaling=scaling)
    assert config.rope == RopeParameters(500000.0, "llama3", 8.0, 1.0, 4.0, 128)


def test_the_present_layout_is_read(configured: Configure) -> None:
    config = configured("llama3")
    assert config.rope == RopeParameters(500000.0, "llama3", 8.0, 1.0, 4.0, 128)


def test_old_rope_scaling_with_type_and_null_scaling_are_read(configured: Configure) -> None:
    config = configured(
        "llama", ("rope_parameters",), rope_theta=1e6, rope_scaling={"type": "linear", "factor": 2}
    )
    assert config.rope == RopeParameters(1e6, "linear", 2.0)


def test_no_rope_scaling_is_plain(configured: Configure) -> None:
    config = configured("qwen2", ("rope_parameters",), rope_theta=1e6, rope_scaling=None)
    assert config.rope == RopeParameters(1e6)


def test_absent_rope_settings_mean_the_usual_base(configured: Configure) -> None:
    config = configured("qwen2", ("rope_parameters",))
    assert config.rope == RopeParameters(10_000.0)


def test_head_dim_is_derived_when_absent_or_null(configured: Configure) -> None:
    assert configured("llama", ("head_dim",)).head_dim == 16


def test_families_differ_in_biases_and_norms(tiny_folder: Folder) -> None:
    flags = {}
    for variant in ("qwen3", "qwen3-untied", "qwen2", "llama", "llama-tied-biases"):
        info = read_model_info(tiny_folder(variant))
        c = adapter_for(info).decoder_config(info)
        flags[variant] = (c.qkv_bias, c.output_bias, c.mlp_bias, c.qk_norm, c.tie_word_embeddings)
    assert flags == {
        "qwen3": (False, False, False, True, True),
        "qwen3-untied": (True, True, False, True, False),
        "qwen2": (True, False, False, False, False),
        "llama": (False, False, False, False, False),
        "llama-tied-biases": (True, True, True, False, True),
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": False, "sliding_window": 128},
        {"use_sliding_window": True, "sliding_window": 4096, "layer_types": None},
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}
        | {"layer_types": None},
    ],
)
def test_a_sliding_window_that_no_layer_uses_is_accepted(
    configured: Configure, changes: dict[str, Any]
) -> None:
    configured("qwen2", **changes)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": (
        {"architectures": ["MambaForCausalLM"]},
        "'MambaForCausalLM' is not supported.*LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM",
    ),
    "quantization": ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    "activation": ({"hidden_act": "gelu"}, "'gelu': supported is silu"),
    "rope type": (
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        "'yarn' is not supported; supported are default, linear, dynamic, llama3",
    ),
    "rope of a type that is no text": ({"rope_parameters": {"rope_type": []}}, "rope type"),
    "several rope settings": ({"rope_parameters": {"full_attention": {}}}, "one setting"),
    "rope that is no object": ({"rope_parameters": 3}, "must be an object"),
    "rope without its factor": ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
    "a rope factor that is not finite": (
        {"rope_parameters": {"rope_type": "linear", "factor": 0}},
        "factor must be a positive number",
    ),
    "partial rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "sliding layers": (
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64},
        "sliding_window 64",
    ),
    "a sliding window": (
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
        | {"layer_types": None},
        "sliding_window 64",
    ),
    "no hidden size": ({"hidden_size": None}, "hidden_size must be a positive integer"),
    "a huge hidden size": ({"hidden_size": 2**40}, "hidden_size"),
    "a boolean number of layers": ({"num_hidden_layers": True}, "num_hidden_layers"),
    "heads that do not divide": ({"num_key_value_heads": 3}, "no multiple"),
    "an odd head": ({"head_dim": 7}, "odd"),
    "an eps that is text": ({"rms_norm_eps": "small"}, "rms_norm_eps"),
    "a flag that is a number": ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_a_config_is_refused_for_its(case: str, configured: Configure) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(BadModelFolder, match=message) as caught:
        configured("qwen2", **changes)
    assert "config.json" in str(caught.value)
