"""Which ``config.json`` is served, in both layouts, and which is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support.worker.tiny_models import LLAMA3, with_a_larger_layer

from penstock.kernels.rotary import RopeParameters
from penstock.protocol.model_info import BadModelFolder, read_model_info
from penstock.services.worker.model_shape import shape_of
from penstock.services.worker.models.dense import DenseConfig, dense_config
from penstock.services.worker.models.registry import adapter_for
from penstock.services.worker.models.specification import ModelSpecification

Folder = Callable[[str], Path]


@pytest.fixture
def configured(tiny_folder: Folder, tmp_path: Path) -> Callable[..., ModelSpecification]:
    def configure(variant: str, remove: tuple[str, ...] = (), **changes: Any) -> ModelSpecification:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(tiny_folder(variant), folder)
        config = json.loads((folder / "config.json").read_text()) | changes
        for key in remove:
            config.pop(key, None)
        (folder / "config.json").write_text(json.dumps(config))
        info = read_model_info(folder)
        return adapter_for(info).specification(info)

    return configure


Configure = Callable[..., ModelSpecification]


def rope_of(model: ModelSpecification) -> RopeParameters:
    rotary = model.layers[0].attention.rotary
    assert rotary is not None
    return rotary.parameters


def windows_of(model: ModelSpecification) -> list[int]:
    return [layer.attention.window for layer in model.layers]


def test_both_layouts_of_rope_settings_mean_the_same(configured: Configure) -> None:
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    config = configured("llama3", ("rope_parameters",), rope_theta=500000.0, rope_scaling=scaling)
    assert rope_of(config) == RopeParameters(500000.0, "llama3", 8.0, 1.0, 4.0, 128)


def test_the_present_layout_is_read(configured: Configure) -> None:
    config = configured("llama3")
    assert rope_of(config) == RopeParameters(500000.0, "llama3", 8.0, 1.0, 4.0, 128)


def test_old_rope_scaling_with_type_and_null_scaling_are_read(configured: Configure) -> None:
    config = configured(
        "llama", ("rope_parameters",), rope_theta=1e6, rope_scaling={"type": "linear", "factor": 2}
    )
    assert rope_of(config) == RopeParameters(1e6, "linear", 2.0)


def test_no_rope_scaling_is_plain(configured: Configure) -> None:
    config = configured("qwen2", ("rope_parameters",), rope_theta=1e6, rope_scaling=None)
    assert rope_of(config) == RopeParameters(1e6)


def test_absent_rope_settings_mean_the_usual_base(configured: Configure) -> None:
    config = configured("qwen2", ("rope_parameters",))
    assert rope_of(config) == RopeParameters(10_000.0)


def test_head_dim_is_derived_when_absent_or_null(configured: Configure) -> None:
    assert configured("llama", ("head_dim",)).layers[0].attention.head_dim == 16


def test_families_differ_in_biases_and_norms(tiny_folder: Folder) -> None:
    flags = {}
    for variant in ("qwen3", "qwen3-biased", "qwen2", "llama", "llama-tied-biases"):
        info = read_model_info(tiny_folder(variant))
        c = dense_config(adapter_for(info).specification(info))
        assert isinstance(c, DenseConfig)
        flags[variant] = (c.qkv_bias, c.output_bias, c.mlp_bias, c.qk_norm, c.tie_word_embeddings)
    assert flags == {
        "qwen3": (False, False, False, True, True),
        "qwen3-biased": (True, True, False, True, False),
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
    assert windows_of(configured("qwen2", **changes)) == [0, 0]


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}
        | {"sliding_window": 64},
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
        | {"layer_types": None},
    ],
)
def test_both_layouts_of_windows_mean_the_same(
    configured: Configure, changes: dict[str, Any]
) -> None:
    assert windows_of(configured("qwen2", **changes)) == [0, 64]


def test_heads_are_rotated_in_part_only_where_the_family_knows_it(configured: Configure) -> None:
    def rotated(variant: str, share: float) -> int:
        model = configured(variant, ("rope_parameters",), partial_rotary_factor=share)
        rotary = model.layers[0].attention.rotary
        assert rotary is not None
        return rotary.dim

    assert rotated("llama", 0.5) == 16
    assert rotated("phi3", 0.5) == 8
    with pytest.raises(BadModelFolder, match=r"partial_rotary_factor 0\.7: 11 of 16"):
        rotated("phi3", 0.7)


ABSENT = ("sliding_window", "layer_types")


@pytest.mark.parametrize(
    ("variant", "remove", "changes", "windows"),
    [
        ("mistral", ABSENT, {}, [4096] * 4),
        ("mistral", (), {"sliding_window": 0}, [0] * 4),
        ("gemma2", ABSENT, {}, [4096, 0]),
        ("exaone4", ABSENT, {"sliding_window_pattern": "LG"}, [4096, 0, 4096, 0]),
        ("exaone4", ABSENT[1:], {"sliding_window": None, "sliding_window_pattern": 0}, [0] * 4),
        (
            "qwen2", ABSENT[1:],
            {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 8}, [8, 8],
        ),
        ("qwen2-windows", (), {"use_sliding_window": False}, [0] * 4),
        ("smollm3", ABSENT[1:], {"use_sliding_window": True, "sliding_window": 8}, [0, 0, 0, 8]),
    ],
)  # fmt: skip
def test_windows_are_those_that_the_families_own_code_would_use(
    variant: str,
    remove: tuple[str, ...],
    changes: dict[str, Any],
    windows: list[int],
    configured: Configure,
) -> None:
    model = configured(variant, remove, **({"max_position_embeddings": 10_000} | changes))
    assert windows_of(model) == windows


@pytest.mark.parametrize(
    ("variant", "base"), [("cohere", 5e5), ("cohere2", 1e4), ("olmo2", 1e4), ("olmo3", 5e5)]
)
def test_an_absent_base_of_rotary_embedding_is_the_familys_own(
    variant: str, base: float, configured: Configure
) -> None:
    assert rope_of(configured(variant, ("rope_parameters",))).theta == base


def test_a_rope_type_of_null_is_read_from_the_older_key(configured: Configure) -> None:
    table = {"rope_type": None, "type": "linear", "factor": 2.0, "rope_theta": 1e4}
    assert rope_of(configured("llama", rope_parameters=table)) == RopeParameters(1e4, "linear", 2.0)


def test_why_a_model_is_not_computed_by_the_kernels_is_said_in_words(configured: Configure) -> None:
    assert dense_config(configured("llama", hidden_act="gelu")) == "the activation gelu"
    assert dense_config(configured("llama", head_dim=320)) == "heads of 320"


def test_layers_that_differ_in_size_are_not_computed_by_the_kernels_and_words_say_in_what(
    configured: Configure,
) -> None:
    model = configured("llama")
    wider, more = "MLPs of different widths", "layers with different heads"
    for changes, words in (
        ({"width": 8}, wider),
        ({"kv_heads": 1}, more),
        ({"width": 8, "kv_heads": 1}, f"{more}, {wider}"),
    ):
        changed = with_a_larger_layer(model, **changes)
        assert dense_config(changed) == words
        shape = shape_of(changed)
        assert shape.mlp_width == 2 * (112 + changes.get("width", 0))
        assert shape.kv_width == 16 * (2 + changes.get("kv_heads", 0))
        assert shape.heads_width == 16 * (8 + 4 * changes.get("kv_heads", 0))
    first, second = model.layers
    behind = replace(model, layers=(first, replace(second, residual_multiplier=0.5)))
    assert dense_config(behind) == "2 kinds of layers"


def test_why_a_family_is_not_computed_by_the_kernels_is_said_in_words(tiny_folder: Folder) -> None:
    reasons = {}
    for variant in ("olmo2", "starcoder2", "cohere"):
        info = read_model_info(tiny_folder(variant))
        reasons[variant] = dense_config(adapter_for(info).specification(info))
    assert reasons == {
        "olmo2": "layers without norms ahead of both halves, "
        "norms of queries and keys over all heads",
        "starcoder2": "norms that are no RMSNorm, or differ, an MLP without a gate",
        "cohere": "layers without norms ahead of both halves, "
        "norms that are no RMSNorm, or differ, attention and MLP in parallel, "
        "norms of queries and keys over all heads",
    }


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": (
        {"architectures": ["MambaForCausalLM"]},
        "'MambaForCausalLM' is not supported.*LlamaForCausalLM.*Qwen2ForCausalLM, Qwen3ForCausalLM",
    ),
    "activation": ({"hidden_act": "mish"}, "'mish': supported are silu, swish, gelu"),
    "rope type": (
        {"rope_parameters": {"rope_type": "xpos", "factor": 4.0}},
        "'xpos' is not supported; supported are default, linear, dynamic, llama3, yarn, longrope",
    ),
    "rope of a type that is no text": ({"rope_parameters": {"rope_type": []}}, "rope type"),
    "rope settings of other layers": (
        {"rope_parameters": {"sliding_attention": {}}},
        "rotary settings for sliding_attention: this architecture has one for all layers",
    ),
    "yarn of base 1": (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0, "factor": 2.0}},
        "rope_theta must be above 1 with yarn, got 1",
    ),
    "a trained length of one position": (
        {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 1}},
        "original_max_position_embeddings must be 2 or more, got 1",
    ),
    "longrope without its factors": (
        {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}},
        "short_factor must be 8 positive numbers",
    ),
    "rope that is no object": ({"rope_parameters": 3}, "must be an object"),
    "rope without its factor": ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
    "a rope factor that is not finite": (
        {"rope_parameters": {"rope_type": "linear", "factor": 0}},
        "factor must be a positive number",
    ),
    "a kind of layers": (
        {"use_sliding_window": True, "layer_types": ["full_attention", "linear_attention"]},
        "'linear_attention'; supported are full_attention, sliding_attention",
    ),
    "too few kinds of layers": (
        {"use_sliding_window": True, "layer_types": ["full_attention"]},
        "each of 2 layers",
    ),
    "a window that is no number": (
        {"use_sliding_window": True, "sliding_window": -1, "layer_types": None},
        "sliding_window must be a positive integer",
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
