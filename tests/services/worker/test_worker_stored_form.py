"""Checkpoints whose files hold something else than their ``config.json`` says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.worker.tiny_models import write_model
from support.worker.whole_logits import assert_alike, configured, our_logits

from penstock.protocol.config import Config, ModelConfig
from penstock.protocol.model_info import read_model_info
from penstock.services.worker.load_report import LoadReport
from penstock.services.worker.model_shape import read_shape

Folder = Callable[[str], Path]
SINGLE = "model.safetensors"


def change(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE, {"format": "pt"})
    return folder


@pytest.fixture
def tied(tiny_folder: Folder, tmp_path: Path) -> Path:
    return configured(tiny_folder("qwen2-tied"), tmp_path / "tied")


def parameters(folder: Path) -> int:
    info = read_model_info(folder)
    return read_shape(info, Config(model=ModelConfig(model=str(folder)))).parameters


def test_a_tied_model_with_an_lm_head_of_its_own_uses_it(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    folder = configured(tiny_folder("llama"), tmp_path / "own", tie_word_embeddings=True)
    assert_alike(folder)
    reports: list[LoadReport] = []
    our_logits(folder, reports.append)
    assert "lm_head.weight differs from model.embed_tokens.weight" in reports[0].notes[0]
    assert parameters(folder) == parameters(tiny_folder("llama")), "a plan counts both"


def test_an_lm_head_that_differs_in_its_last_number_alone_is_used(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    folder = configured(tiny_folder("qwen2-tied"), tmp_path / "last")
    head = load_file(folder / SINGLE)["model.embed_tokens.weight"]
    head[-1, -1] += 100.0
    change(folder, lambda tensors: tensors.update({"lm_head.weight": head}))
    assert_alike(folder)


def test_an_lm_head_that_is_the_embedding_is_not_kept_twice(tied: Path) -> None:
    before, reports = parameters(tied), list[LoadReport]()
    change(tied, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    our_logits(tied, reports.append)
    assert not reports[0].notes
    assert parameters(tied) == before


def test_an_lm_head_alone_is_the_embedding_too(tied: Path) -> None:
    change(tied, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    assert_alike(tied)


def test_names_without_the_prefix_of_the_model_are_read(tied: Path) -> None:
    tensors = load_file(tied / SINGLE)
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(bare, tied / SINGLE, {"format": "pt"})
    assert_alike(tied)


def test_an_lm_head_in_another_shard_is_compared(tmp_path: Path) -> None:
    folder = write_model("llama", tmp_path / "shards", max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert_alike(configured(folder, tmp_path / "tied", tie_word_embeddings=True))
