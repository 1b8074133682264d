"""Rotary settings in the ways that ``config.json`` files have them: logits are transformers'."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.worker.tiny_models import LLAMA3, YARN
from support.worker.whole_logits import READ_BY_NEWER, assert_alike, configured

from penstock.protocol.model_info import BadModelFolder, read_model_info
from penstock.services.worker.models.registry import adapter_for

Folder = Callable[[str], Path]
SCALING = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SHORT_LLAMA3 = LLAMA3 | {"original_max_position_embeddings": 512}
LONG = {"short_factor": [1.1] * 8, "long_factor": [2.0 + 0.1 * i for i in range(8)]}
LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
NO_TABLE = ("rope_parameters",)
CASES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "rope_scaling beside rope_parameters": ("llama3", (), {"rope_scaling": SCALING}),
    "an empty rope_scaling": ("llama3", (), {"rope_scaling": {}}),
    "beta_fast 0": ("llama", (), {"rope_parameters": YARN | {"beta_fast": 0}}),
    "a trained length beside the settings of Llama 3": (
        "llama3", NO_TABLE,
        {"rope_scaling": SHORT_LLAMA3, "original_max_position_embeddings": 64},
    ),
    "a trained length beside the settings of YaRN": (
        "llama", (), {"rope_parameters": YARN, "original_max_position_embeddings": 32},
    ),
    "yarn of Phi-3": (
        "phi3", NO_TABLE,
        {"rope_scaling": LONG | {"type": "yarn"}, "original_max_position_embeddings": 64},
    ),
    "su of Phi-3": (
        "phi3", NO_TABLE,
        {
            "rope_scaling": LONG | {"type": "su", "original_max_position_embeddings": 512},
            "original_max_position_embeddings": 64,
        },
    ),
    "Phi-3 without a trained length": (
        "phi3", (*NO_TABLE, "original_max_position_embeddings"),
        {"rope_scaling": LONG | {"type": "longrope"}, "max_position_embeddings": 8192},
    ),
    "OLMo 3, bases of each kind": (
        "olmo3", (),
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            }
        },
    ),
    "OLMo 3, settings of no kind": ("olmo3", (), {"rope_parameters": SCALING}),
    "OLMo 3, rope_scaling": (
        "olmo3", NO_TABLE, {"rope_theta": 5e5, "rope_scaling": SCALING | {"truncate": False}},
    ),
    "OLMo 3, truncate beside the kinds": (
        "olmo3", (),
        {"rope_parameters": {"full_attention": dict(SCALING), "truncate": False}},
    ),
    "OLMo 3, truncate of a kind": (
        "olmo3", (),
        {"rope_parameters": {"full_attention": SCALING | {"truncate": False}}},
    ),
    "Gemma 3, settings of no kind": ("gemma3", (), {"rope_parameters": LINEAR}),
    "Gemma 3, rope_scaling": (
        "gemma3", NO_TABLE,
        {"rope_theta": 1e5, "rope_local_base_freq": 2e4, "rope_scaling": LINEAR},
    ),
}  # fmt: skip


NEWER = (
    "OLMo 3, settings of no kind", "OLMo 3, truncate beside the kinds",
    "Gemma 3, settings of no kind",
)  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[READ_BY_NEWER] * (case in NEWER)) for case in CASES],
)
def test_rotary_settings_are_those_of_transformers(
    case: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    variant, remove, changes = CASES[case]
    # Beyond 4096 positions Phi-3 would have the other set of factors.
    folder = configured(tiny_folder(variant), tmp_path / "model", remove, **changes)
    assert_alike(folder, longest=min(4096, read_model_info(folder).max_model_len))


@pytest.mark.parametrize(
    ("variant", "remove", "changes", "words"),
    [
        ("olmo3", NO_TABLE, {"rope_theta": 1e4}, "rope_theta 10000: versions .* differ"),
        ("gemma3", NO_TABLE, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "a rope_type"),
        ("gemma3", (), {"rope_parameters": LINEAR, "rope_scaling": LINEAR}, "without full_atten"),
    ],
)
def test_settings_that_versions_of_transformers_read_in_two_ways_are_refused(
    variant: str,
    remove: tuple[str, ...],
    changes: dict[str, Any],
    words: str,
    tiny_folder: Folder,
    tmp_path: Path,
) -> None:
    info = read_model_info(configured(tiny_folder(variant), tmp_path / "m", remove, **changes))
    with pytest.raises(BadModelFolder, match=words):
        adapter_for(info).specification(info)


def test_yarn_in_rope_scaling_extends_the_model(tiny_folder: Folder, tmp_path: Path) -> None:
    folder = configured(
        tiny_folder("llama"), tmp_path / "model", rope_scaling=YARN | {"factor": 32.0}
    )
    assert "rope_parameters" in json.loads((folder / "config.json").read_text())
    assert read_model_info(folder).max_model_len == 128 * 32
