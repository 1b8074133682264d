"""Whose KV blocks are whose: nothing is shared between models that compute differently."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.protocol.config import Config
from penstock.services.worker.kv_space import kv_space

MEGABYTE = bytes(1 << 20)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["A"]}')
    (folder / "model.safetensors").write_bytes(MEGABYTE)
    return folder


def space_of(folder: Path, layout: str = "layout", **model: Any) -> bytes:
    config = Config()
    model = {"model": str(folder), **model}
    changed = msgspec.structs.replace(config.model, **model)
    return kv_space(msgspec.structs.replace(config, model=changed), layout)


def test_a_model_keeps_its_space_wherever_it_is_and_whatever_it_is_called(folder: Path) -> None:
    before = space_of(folder)
    moved = folder.rename(folder.with_name("moved"))
    copied = shutil.copytree(moved, moved.with_name("copied"))
    assert space_of(moved) == space_of(copied) == before, "a copy with its files' times"
    assert space_of(moved, served_model_name=["another"]) == before
    (moved / "README.md").write_text("says nothing of weights")
    assert space_of(moved) == before


@pytest.mark.parametrize("place", [0, 1 << 19, (1 << 20) - 1])
def test_other_weights_of_the_same_size_have_another_space(folder: Path, place: int) -> None:
    """Two fine-tunes that were written at one time differ in nearly every piece."""
    before, path = space_of(folder), folder / "model.safetensors"
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    content = bytearray(MEGABYTE)
    begin = max(0, place - (1 << 17))
    for at in range(begin, min(len(content), place + (1 << 17))):
        content[at] = 1
    path.write_bytes(content)
    os.utime(path, ns=times)
    assert space_of(folder) != before


def test_one_changed_weight_between_all_pieces_is_told_by_the_time_of_its_file(
    folder: Path,
) -> None:
    before, path = space_of(folder), folder / "model.safetensors"
    content = bytearray(MEGABYTE)
    content[20000] = 1
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))
    assert space_of(folder) != before


def test_config_layout_and_settings_of_a_model_are_part_of_its_space(folder: Path) -> None:
    spaces = {
        space_of(folder),
        space_of(folder, layout="another"),
        space_of(folder, dtype="float32"),
        space_of(folder, max_model_len=77),
    }
    (folder / "config.json").write_text('{"architectures": ["B"]}')
    spaces.add(space_of(folder))
    (folder / "more.safetensors").write_bytes(b"more")
    spaces.add(space_of(folder))
    assert len(spaces) == 6


def test_deterministic_blocks_are_not_those_of_other_kernels(folder: Path) -> None:
    config = Config()
    config = msgspec.structs.replace(
        config, model=msgspec.structs.replace(config.model, model=str(folder))
    )
    device = msgspec.structs.replace(config.device, deterministic=True)
    deterministic = msgspec.structs.replace(config, device=device)
    assert kv_space(deterministic, "layout") != kv_space(config, "layout")
