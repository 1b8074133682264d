"""Damaged, hostile and merely odd checkpoint folders: one clear error, or a correct load."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.worker.tiny_models import VARIANTS, write_model

from penstock.protocol.model_info import BadModelFolder, read_model_info
from penstock.services.worker.load_report import LoadReport
from penstock.services.worker.model_weights import load_model
from penstock.services.worker.models.decoder import Decoder
from penstock.services.worker.models.weights import named_tensors

Folder = Callable[[str], Path]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_model(read_model_info(folder), dtype, torch.device("cpu"), lambda note: None)


@pytest.fixture
def copy(tiny_folder: Folder, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder("qwen2"), tmp_path / "model"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = write_model("qwen2", tmp_path / "sharded", max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


def rewrite_header(folder: Path, change: Callable[[str], str]) -> None:
    """Change the JSON text of the header, keeping its data."""
    raw = (folder / SINGLE).read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = change(raw[8 : 8 + length].decode()).encode()
    (folder / SINGLE).write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + length :])


def change_entry(name: str, **fields: Any) -> Callable[[str], str]:
    def change(text: str) -> str:
        header = json.loads(text)
        header[name].update(fields)
        return json.dumps(header)

    return change


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_every_tensor_lands_in_its_place(variant: str, tiny_folder: Folder) -> None:
    folder = tiny_folder(variant)
    model = load(folder)
    named = named_tensors(model.weights)
    saved = load_file(folder / SINGLE)
    assert set(named) == set(saved)
    assert all(torch.equal(named[name], tensor) for name, tensor in saved.items())


def test_shards_load_like_a_single_file(sharded: Path, tiny_folder: Folder) -> None:
    first, second = load(sharded).weights, load(tiny_folder("qwen2")).weights
    one, other = (each.layers[1].linears.qkv for each in (first, second))
    assert torch.equal(one.weight, other.weight)
    assert torch.equal(first.lm_head.weight, second.lm_head.weight)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types_are_converted(copy: Path, stored: torch.dtype) -> None:
    rewrite(copy, lambda t: t.update({name: x.to(stored) for name, x in t.items()}))
    weights = load(copy, torch.bfloat16).weights
    assert weights.norm.weight.dtype == torch.bfloat16
    want = load_file(copy / SINGLE)["model.norm.weight"].to(torch.bfloat16)
    assert torch.equal(weights.norm.weight, want)


def test_harmless_surplus_tensors_are_ignored(tiny_folder: Folder, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder("qwen2-tied"), tmp_path / "tied"))
    extra = {
        "lm_head.weight": load_file(folder / SINGLE)["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
    }
    rewrite(folder, lambda t: t.update(extra))
    load(folder)


def test_everything_wrong_is_named_at_once(copy: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        del tensors["lm_head.weight"]
        tensors["model.layers.9.extra"] = torch.ones(3)
        tensors["model.norm.weight"] = torch.ones(65)
        tensors["model.layers.0.self_attn.q_proj.weight"] = torch.ones(64, 64, dtype=torch.int8)

    rewrite(copy, change)
    with pytest.raises(BadModelFolder) as caught:
        load(copy)
    text = str(caught.value)
    for part in (
        "missing: 'lm_head.weight', 'model.layers.1.mlp.up_proj.weight'",
        "'model.layers.9.extra' in model.safetensors",
        "'model.norm.weight' in model.safetensors: [65] instead of [64]",
        "'model.layers.0.self_attn.q_proj.weight' in model.safetensors: 'I8'",
    ):
        assert part in text


def test_a_long_list_of_errors_is_bounded(copy: Path) -> None:
    rewrite(copy, lambda t: t.update({f"x{i}": torch.ones(1) for i in range(5000)}))
    with pytest.raises(BadModelFolder, match="and 4992 more") as caught:
        load(copy)
    assert len(str(caught.value)) < 2000


def truncate(path: Path, size: int) -> None:
    os.truncate(path, size)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "an empty file": (lambda f: truncate(f / SINGLE, 0), "model.safetensors: 0 bytes is too short"),
    "five bytes": (lambda f: truncate(f / SINGLE, 5), "5 bytes is too short"),
    "half a header": (lambda f: truncate(f / SINGLE, 200), "header claims"),
    "truncated data": (
        lambda f: truncate(f / SINGLE, (f / SINGLE).stat().st_size - 7),
        r"model.safetensors: truncated: tensor '[\w.]+' ends at byte",
    ),
    "trailing bytes": (
        lambda f: (f / SINGLE).open("ab").write(b"abc"),
        "3 bytes after the last tensor",
    ),
    "a Git LFS pointer": (
        lambda f: (f / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256"),
        "Git LFS pointer.*git lfs pull",
    ),
    "no weights": (lambda f: (f / SINGLE).unlink(), "neither model.safetensors nor"),
    "a folder in place of the file": (
        lambda f: ((f / SINGLE).unlink(), (f / SINGLE).mkdir()),
        "not a regular file",
    ),
    "a pipe in place of the file": (
        lambda f: ((f / SINGLE).unlink(), os.mkfifo(f / SINGLE)),
        "not a regular file",
    ),
    "text": (lambda f: (f / SINGLE).write_text("<html>not found</html>"), "header claims"),
    "a header that is no JSON": (lambda f: rewrite_header(f, lambda t: "{" + t), "not JSON"),
    "a header that is deeply nested": (
        lambda f: rewrite_header(f, lambda t: "[" * 100_000),
        "not JSON",
    ),
    "a header that is a list": (lambda f: rewrite_header(f, lambda t: "[]"), "no object"),
    "a tensor named twice": (
        lambda f: rewrite_header(f, lambda t: '{"model.norm.weight":{},' + t[1:]),
        "the header names more than once: 'model.norm.weight'",
    ),
    "a shape that does not fit its bytes": (
        lambda f: rewrite_header(f, change_entry("model.norm.weight", shape=[63])),
        "tensor 'model.norm.weight': shape",
    ),
    "a huge shape": (
        lambda f: rewrite_header(f, change_entry("model.norm.weight", shape=[2**62, 2**62])),
        "tensor 'model.norm.weight': shape",
    ),
    "a negative shape": (
        lambda f: rewrite_header(f, change_entry("model.norm.weight", shape=[-8, -8])),
        "tensor 'model.norm.weight': malformed",
    ),
    "offsets past the end": (
        lambda f: rewrite_header(
            f, change_entry("model.norm.weight", data_offsets=[2**60, 2**60 + 256])
        ),
        "truncated: tensor 'model.norm.weight'",
    ),
    "overlapping tensors": (
        lambda f: rewrite_header(f, change_entry("model.norm.weight", data_offsets=[0, 256])),
        "does not begin where",
    ),
    "an entry that is no object": (
        lambda f: rewrite_header(
            f, lambda t: json.dumps(json.loads(t) | {"model.norm.weight": [1]})
        ),
        "malformed",
    ),
    "an entry without dtype": (
        lambda f: rewrite_header(
            f, lambda t: json.dumps(json.loads(t) | {"model.norm.weight": {"shape": []}})
        ),
        "malformed",
    ),
    "all zeros": (
        lambda f: rewrite(
            f, lambda t: t.update({"lm_head.weight": torch.zeros_like(t["lm_head.weight"])})
        ),
        "tensors of nothing but zeros: 'lm_head.weight' in model.safetensors; the files",
    ),
    "a file of zeros": (
        lambda f: (f / SINGLE).write_bytes(bytes(100_000)),
        "model.safetensors: filled with zeros",
    ),
    "a header and then zeros": (
        lambda f: rewrite(f, lambda t: t.update({n: torch.zeros_like(x) for n, x in t.items()})),
        "model.safetensors: every tensor is all zeros",
    ),
    "a norm of zeros": (
        lambda f: rewrite(f, lambda t: t.update({"model.norm.weight": torch.zeros(64)})),
        "nothing but zeros: 'model.norm.weight'",
    ),
    "a name of a megabyte": (
        lambda f: rewrite_header(
            f, lambda t: t.replace('"model.norm.weight"', json.dumps("\x1b[31m" * 200_000))
        ),
        r"missing: 'model.norm.weight'; not of this model: '\\x1b\[31m",
    ),
    "a pickle in its place": (
        lambda f: (f / SINGLE).rename(f / "pytorch_model.bin"),
        r"'pytorch_model.bin': other formats are never opened.* convert it: \S*python\S* -c ",
    ),
    "a pickle that transformers does not read either": (
        lambda f: (f / SINGLE).rename(f / "consolidated.pth"),
        "'consolidated.pth': other formats are never opened.*convert the checkpoint to safetensors",
    ),
    "shards without their index": (
        lambda f: (f / SINGLE).rename(f / "model-00001-of-00001.safetensors"),
        "'model-00001-of-00001.safetensors' can be read only with that index",
    ),
}


@pytest.mark.parametrize("case", list(DAMAGE))
def test_a_damaged_file_is_named_with_its_cause(case: str, copy: Path) -> None:
    damage, message = DAMAGE[case]
    damage(copy)
    with pytest.raises(BadModelFolder, match=message) as caught:
        load(copy)
    assert str(copy) in str(caught.value)
    assert len(str(caught.value)) < 1000


def change_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def add_again(folder: Path, name: str) -> None:
    """Write a tensor into a second shard; the index names the first."""
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    other = next(folder / file for file in index.values() if file != index[name])
    save_file(load_file(other) | {name: load_file(folder / index[name])[name]}, other)


BAD_INDEX: dict[str, tuple[Callable[[Path], object], str]] = {
    "a missing shard": (
        lambda f: sorted(f.glob("*.safetensors"))[1].unlink(),
        r"no such file beside it: 'model-00002-of-0000\d.safetensors'; 1 of \d shards",
    ),
    "several missing shards": (
        lambda f: [path.unlink() for path in sorted(f.glob("*.safetensors"))[1:3]],
        r"'model-00002-of-0000\d.safetensors', 'model-00003-of-0000\d.safetensors'; 2 of",
    ),
    "a tensor in two shards": (
        lambda f: add_again(f, "model.norm.weight"),
        r"in more than one file: 'model.norm.weight' in model-0000\d-of",
    ),
    "a tensor twice in the index": (
        lambda f: (f / INDEX).write_text(
            '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}'
        ),
        "the index names more than once: 'a'",
    ),
    "a name with a NUL": (
        lambda f: change_index(f, lambda m: m.update({"lm_head.weight": "a\0.safetensors"})),
        r"'a\\x00.safetensors': shards are",
    ),
    "a truncated shard": (
        lambda f: truncate(sorted(f.glob("*.safetensors"))[1], 3000),
        "header claims|truncated",
    ),
    "a shard outside the folder": (
        lambda f: change_index(f, lambda m: m.update({"lm_head.weight": "../x.safetensors"})),
        r"'\.\./x\.safetensors' is no plain file name",
    ),
    "an absolute shard": (
        lambda f: change_index(f, lambda m: m.update({"lm_head.weight": "/etc/passwd"})),
        "no plain file name",
    ),
    "a shard of another format": (
        lambda f: change_index(f, lambda m: m.update({"lm_head.weight": "model.bin"})),
        r"'model\.bin': shards are \.safetensors",
    ),
    "a shard name that is a number": (
        lambda f: change_index(f, lambda m: m.update({"lm_head.weight": 3})),  # type: ignore[dict-item]
        "3 is no plain file name",
    ),
    "a tensor that is not in its shard": (
        lambda f: change_index(
            f, lambda m: m.update({"lm_head.weight": m["model.embed_tokens.weight"]})
        ),
        r"not in the file it names: 'lm_head\.weight'",
    ),
    "no weight_map": (lambda f: (f / INDEX).write_text("{}"), "weight_map"),
    "an index that is no JSON": (lambda f: (f / INDEX).write_text("{"), "not valid JSON"),
}


@pytest.mark.parametrize("case", list(BAD_INDEX))
def test_a_bad_index_or_shard_is_named(case: str, sharded: Path) -> None:
    damage, message = BAD_INDEX[case]
    damage(sharded)
    with pytest.raises(BadModelFolder, match=message):
        load(sharded)


def test_a_file_that_shrinks_after_the_check_gives_an_error_not_a_signal(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.services.worker.checkpoint import Checkpoint

    check = Checkpoint.check

    def check_then_shrink(self: Checkpoint, *args: Any) -> None:
        check(self, *args)
        truncate(copy / SINGLE, (copy / SINGLE).stat().st_size // 2)

    monkeypatch.setattr(Checkpoint, "check", check_then_shrink)
    with pytest.raises(BadModelFolder, match="truncated while tensor"):
        load(copy)


def test_progress_is_told_in_percent(copy: Path) -> None:
    notes: list[str] = []
    load_model(read_model_info(copy), torch.float32, torch.device("cpu"), notes.append)
    assert notes[0] == "checking the checkpoint"
    assert all(
        re.fullmatch(r"reading weights \d+%: [\d.]+ of [\d.]+ kB, [\d.]+ [kMG]?B/s", note)
        for note in notes[1:]
    )
    assert notes[-1].startswith("reading weights 100%")


def test_zeros_that_models_mean_are_loaded_and_reported(copy: Path) -> None:
    mean = ["model.layers.1.self_attn.o_proj.weight", "model.layers.1.mlp.down_proj.weight"]
    bias = "model.layers.0.self_attn.q_proj.bias"
    rewrite(copy, lambda t: t.update({n: torch.zeros_like(t[n]) for n in (*mean, bias)}))
    reports: list[LoadReport] = []
    info = read_model_info(copy)
    load_model(info, torch.float32, torch.device("cpu"), lambda note: None, reports.append)
    assert sorted(reports[0].zero_tensors) == sorted(mean)
    stored = sum(t.numel() * t.itemsize for t in load_file(copy / SINGLE).values())
    assert reports[0].done_bytes == stored


@pytest.mark.slow
def test_the_command_that_the_message_names_converts_a_folder_of_bin_files(
    copy: Path, tmp_path: Path
) -> None:
    expected = load_file(copy / SINGLE)
    folder = tmp_path / "it's $HOME"
    shutil.move(copy, folder)
    torch.save({n: t.bfloat16() for n, t in expected.items()}, folder / "pytorch_model.bin")
    (folder / SINGLE).unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    with pytest.raises(BadModelFolder) as refused:
        load(folder)
    command = str(refused.value).partition("convert it: ")[2]
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert read_model_info(folder).dtype == "bfloat16"
    model = load(folder, torch.bfloat16)
    named = named_tensors(model.weights)
    assert named.keys() == expected.keys()
    assert all(torch.equal(named[name], each.bfloat16()) for name, each in expected.items())


def test_nothing_that_lies_in_the_folder_is_executed(copy: Path, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    code = f"open({str(marker)!r}, 'w')\n"
    for name in ("modeling_evil.py", "configuration_evil.py", "tokenizer.py", "setup.py"):
        (copy / name).write_text(code)
    config = json.loads((copy / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_evil.Evil"}
    config["trust_remote_code"] = True
    (copy / "config.json").write_text(json.dumps(config))
    pickled = f"cbuiltins\nexec\n(V{code.strip()}\ntR.".encode()
    for name in ("pytorch_model.bin", "model.pt", "training_args.bin"):
        (copy / name).write_bytes(pickled)
    load(copy)
    (copy / SINGLE).unlink()
    with pytest.raises(BadModelFolder, match="never opened"):
        load(copy)
    assert not marker.exists()
