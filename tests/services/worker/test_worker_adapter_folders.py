"""Which PEFT folders are read, and what is said of the others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pipeline.adapter_folders import PREFIX, write_adapter

from penstock.protocol.model_info import BadModelFolder
from penstock.services.worker.adapters import peft_folder
from penstock.services.worker.adapters.peft_config import read_peft_config
from penstock.services.worker.adapters.peft_folder import AdapterFolder, LayerSize

QUERY, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"
SIZES = {QUERY: LayerSize(8, 6), DOWN: LayerSize(6, 10)}
MODULES = {name: (size.outputs, size.inputs) for name, size in SIZES.items()}
A = f"{PREFIX}{QUERY}.lora_A.weight"
B = f"{PREFIX}{QUERY}.lora_B.weight"


def read(folder: Path, max_rank: int = 64) -> None:
    AdapterFolder(folder, SIZES, max_rank).read()


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "another kind": ({"peft_type": "P_TUNING"}, "virtual tokens that a network of its own makes"),
    "DoRA": ({"use_dora": True}, "DoRA is not supported"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "'modules_to_save' is"),
    "biases": ({"bias": "all"}, "bias is 'all'"),
    "biases of its own": ({"lora_bias": True}, "'lora_bias' is"),
    "another task": ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'"),
    "a changed base": ({"init_lora_weights": "pissa_niter_4"}, "changed the weights of the base"),
    "what nobody knows": ({"use_magic": 1}, "'use_magic' is 1"),
    "no rank": ({"r": None}, "rank r is null"),
    "a rank of zero": ({"r": 0}, "rank r is 0; 1 to 512"),
    "a rank of true": ({"r": True}, "rank r is true"),
    "a huge rank": ({"r": 513}, "rank r is 513"),
    "a wrong rank": ({"r": 8}, r"q_proj.lora_A.weight': \[4, 6\] instead of \[8, 6\]"),
    "a pattern named r": ({"r": 5000, "rank_pattern": {"r": 4}}, "rank r is 5000"),
    "a pattern named alpha": (
        {"lora_alpha": "nan", "alpha_pattern": {"lora_alpha": 8}},
        "lora_alpha is 'nan'",
    ),
    "no alpha": ({"lora_alpha": None}, "lora_alpha is null; it must be a finite number"),
    "a huge alpha": ({"lora_alpha": 10**400}, r"a finite number from -1e\+06 to 1e\+06"),
    "a huge pattern": (
        {"alpha_pattern": {"q_proj": -(10**9)}},
        "q_proj is -1000000000; it must",
    ),
    "a text for rslora": ({"use_rslora": "false"}, "use_rslora is 'false'; true or false"),
    "a list of beginnings": ({"init_lora_weights": ["pissa"]}, "init_lora_weights is "),
    "a text for alpha": ({"lora_alpha": "8"}, "lora_alpha is '8'"),
    "an endless alpha": ({"alpha_pattern": {"q_proj": 1e400}}, "not valid JSON|must be a finite"),
    "a wrong pattern": ({"rank_pattern": {"q_proj": -1}}, "rank q_proj is -1"),
    "a pattern that costs": ({"rank_pattern": {"(a+)+$": 4}}, r"the pattern '\(a\+\)\+\$'"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_configuration_that_is_not_followed_is_refused_by_name(case: str, tmp_path: Path) -> None:
    changes, message = CONFIGS[case]
    folder = write_adapter(tmp_path / "adapter", MODULES, config=changes)
    with pytest.raises(BadModelFolder, match=message):
        read(folder)


NOT_FINITE = torch.full((4, 6), float("nan"))
TENSORS: dict[str, tuple[dict[str, Any], str]] = {
    "not finite": ({"tensors": {A: NOT_FINITE}}, "q_proj.lora_A.weight' holds numbers that are"),
    "another shape": ({"tensors": {B: torch.zeros(9, 4)}}, r"\[9, 4\] instead of \[8, 4\]"),
    "one matrix twice": (
        {"tensors": {A.removeprefix(PREFIX): torch.zeros(4, 6)}},
        "lora_A.weight' is the same matrix",
    ),
    "another type": ({"tensors": {A: torch.zeros(4, 6, dtype=torch.int32)}}, "type 'I32'"),
    "one half": ({"without": [B]}, "q_proj': A or B is missing"),
    "an unknown layer": (
        {"tensors": {f"{PREFIX}model.layers.9.mlp.up_proj.lora_A.weight": torch.zeros(4, 6)}},
        "layers.9.mlp.up_proj.lora_A.weight': the model has no such linear layer",
    ),
    "the LM head": (
        {"tensors": {f"{PREFIX}lm_head.lora_A.weight": torch.zeros(4, 6)}},
        "lm_head.lora_A.weight': the model has no such linear layer that an adapter may change",
    ),
    "DoRA": (
        {"tensors": {f"{PREFIX}{QUERY}.lora_magnitude_vector": torch.zeros(8)}},
        "DoRA is not supported",
    ),
    "an embedding": (
        {"tensors": {f"{PREFIX}model.embed_tokens.lora_embedding_A": torch.zeros(4, 6)}},
        "an adapter of the embedding is not supported",
    ),
    "whatever else": ({"tensors": {"whatever": torch.zeros(2)}}, "'whatever': no A or B"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_a_tensor_that_does_not_fit_is_refused_by_name(case: str, tmp_path: Path) -> None:
    options, message = TENSORS[case]
    folder = write_adapter(tmp_path / "adapter", MODULES, **options)
    with pytest.raises(BadModelFolder, match=message):
        read(folder)


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def as_pickle(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def as_link(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.rename(folder.parent / "elsewhere")
    file.symlink_to(folder.parent / "elsewhere")


def cut(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no configuration": (remove("adapter_config.json"), "adapter_config.json: no such file"),
    "no tensors": (remove("adapter_model.safetensors"), "safetensors: no such file"),
    "a pickle": (as_pickle, "adapter_model.bin is a pickle, which can run code"),
    "a link": (as_link, "adapter_model.safetensors is a link; links are not followed"),
    "cut off": (cut, "truncated"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_folder_without_sound_files_is_refused_by_name(case: str, tmp_path: Path) -> None:
    change, message = FILES[case]
    folder = write_adapter(tmp_path / "adapter", MODULES)
    change(folder)
    with pytest.raises(BadModelFolder, match=message):
        read(folder)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadModelFolder, match="nowhere: no such folder"):
        read(tmp_path / "nowhere")


def test_a_rank_above_the_servers_limit_names_the_flag(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", MODULES)
    with pytest.raises(BadModelFolder, match="its rank is 4; --max-lora-rank allows 3 at most"):
        read(folder, max_rank=3)


def test_files_that_change_while_they_are_read_are_another_adapter(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", MODULES)
    checked = AdapterFolder(folder, SIZES, 64)
    before = AdapterFolder(folder, SIZES, 64).read().digest
    write_adapter(folder, MODULES, seed=9)
    assert checked.read().digest != before


def test_the_first_pattern_that_a_name_ends_with_counts(tmp_path: Path) -> None:
    patterns = {"self_attn.q_proj": 8, "q_proj": 2, "^model.layers.1.mlp.down_proj$": 16}
    folder = write_adapter(tmp_path / "adapter", MODULES, config={"rank_pattern": patterns})
    config = read_peft_config(folder)
    assert config.rank_of(QUERY) == 8
    assert config.rank_of("model.other.q_proj") == 2
    assert config.rank_of("model.layers.0.xq_proj") == 4
    assert config.rank_of("model.layers.1.mlp.down_proj") == 16
    assert config.rank_of("model.layers.0.mlp.down_proj") == 4
    assert config.scale_of(QUERY) == 1.0
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 4


def test_an_adapter_for_which_memory_lacks_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = AdapterFolder(write_adapter(tmp_path / "adapter", MODULES), SIZES, 64)
    numbers = folder.num_bytes // 4
    monkeypatch.setattr(peft_folder, "free_host_bytes", lambda: 6 * numbers)
    assert folder.read(item_bytes=2).pairs
    monkeypatch.setattr(peft_folder, "_bytes", None)  # reading would fail
    with pytest.raises(BadModelFolder, match=r"to read it takes .* of memory are free"):
        folder.read(item_bytes=4)
