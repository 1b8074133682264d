"""A corpus of model folders that cannot be served, each made from a sound one.

Every folder also holds code and pickles that would leave a mark when something ran them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from penstock.loadtest.models.make_model import make_model, make_tokenizer

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
NORM, QUERY = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"
BAD_MODEL = 3
"""The exit code of all of them."""
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab\nsize 1192135096\n"


class Case(NamedTuple):
    name: str
    damage: Callable[[Path], object]
    """Changes a sound folder; returns the path to serve if it is another one."""
    says: tuple[str, ...]
    """What the error names: file, cause, tensor."""
    shards: int = 1
    quick: bool = False
    """Started as a whole server in every run of the tests."""


def write_sound(folder: Path, shards: int, marker: Path) -> Path:
    """A folder that can be served, with code in it that would write ``marker``."""
    make_model(folder, shards=shards)
    code = f"open({str(marker)!r}, 'w')"
    for name in ("modeling_own.py", "tokenization_own.py", "tokenizer.py", "conftest.py"):
        (folder / name).write_text(code + "\n")
    for name in ("training_args.bin", "optimizer.pt"):
        (folder / name).write_bytes(f"cbuiltins\nexec\n(V{code}\ntR.".encode())
    own = {
        "AutoModelForCausalLM": "modeling_own.Own",
        "AutoTokenizer": ["tokenization_own.Own"] * 2,
    }
    change_json(folder / "config.json", auto_map=own, trust_remote_code=True)
    change_json(folder / "tokenizer_config.json", auto_map=own, trust_remote_code=True)
    return folder


def make_bad(case: Case, folder: Path, marker: Path) -> Path:
    """Returns the path to serve."""
    write_sound(folder, case.shards, marker)
    path = case.damage(folder)
    return path if isinstance(path, Path) else folder


# --- ways to damage


def change_json(path: Path, **fields: Any) -> None:
    """``...`` removes a key."""
    table = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({k: v for k, v in table.items() if v is not ...}))


def config(**fields: Any) -> Callable[[Path], object]:
    return lambda folder: change_json(folder / "config.json", **fields)


def write(name: str, content: str | bytes) -> Callable[[Path], object]:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data) and None


def remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def split(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:end]), raw[end:]


def join(path: Path, header: str, data: bytes) -> None:
    path.write_bytes(len(header.encode()).to_bytes(8, "little") + header.encode() + data)


def header(
    change: Callable[[dict[str, Any]], object], file: str = SINGLE
) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        table, data = split(folder / file)
        change(table)
        join(folder / file, json.dumps(table), data)

    return damage


def header_text(change: Callable[[str], str]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        table, data = split(folder / SINGLE)
        join(folder / SINGLE, change(json.dumps(table)), data)

    return damage


def swap_sides(table: dict[str, Any]) -> None:
    table[QUERY]["shape"] = [2 * table[QUERY]["shape"][0], table[QUERY]["shape"][1] // 2]


def zero(*, header_too: bool, name: str = "") -> Callable[[Path], None]:
    """Zeros in place of the whole file, of its data, or of one tensor."""

    def damage(folder: Path) -> None:
        path = folder / SINGLE
        table, data = split(path)
        changed = np.frombuffer(data, np.uint8).copy()
        begin, end = table[name]["data_offsets"] if name else (0, len(data))
        changed[begin:end] = 0
        join(path, json.dumps(table), changed.tobytes())
        if header_too:
            path.write_bytes(bytes(path.stat().st_size))

    return damage


def truncate(file: str, left: Callable[[int], int]) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / file, left((folder / file).stat().st_size))


def index(**files: str) -> Callable[[Path], None]:
    """Let the index name other files; ``norm`` stands for the norm's name."""

    def damage(folder: Path) -> None:
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        weight_map |= {NORM if name == "norm" else name: file for name, file in files.items()}
        change_json(folder / INDEX, weight_map=weight_map)

    return damage


def in_both_shards(folder: Path) -> None:
    first, first_data = split(folder / FIRST)
    second, data = split(folder / SECOND)
    begin, end = second[NORM]["data_offsets"]
    first[NORM] = second[NORM] | {"data_offsets": [len(first_data), len(first_data) + end - begin]}
    join(folder / FIRST, json.dumps(first), first_data + data[begin:end])


def large_tokenizer(folder: Path) -> None:
    trained: Tokenizer = make_tokenizer(700)
    table = json.loads(trained.to_str())
    extra = {t["content"]: t["id"] for t in table["added_tokens"] if not t["special"]}
    table["model"]["vocab"] |= extra
    (folder / "tokenizer.json").write_text(json.dumps(table))


def code_for_a_tokenizer(folder: Path) -> None:
    """Only the folder's own code could make this tokenizer."""
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_text("a\nb\n")
    change_json(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer")


CASES = [
    Case("no such folder", lambda f: f / "none", ("none: no such folder",), quick=True),
    Case("a file", lambda f: f / "config.json", ("config.json: a file, not a folder",)),
    Case("an empty folder", empty, ("config.json: no such file",)),
    # --- config.json
    Case("config.json is missing", remove("config.json"), ("config.json: no such file",)),
    Case("config.json is no JSON", write("config.json", "{ no"), ("config.json: not valid JSON",)),
    Case("config.json is an array", write("config.json", "[1]"), ("config.json: expected an obj",)),
    Case("config.json is a Git LFS pointer", write("config.json", LFS), ("git lfs pull",)),
    Case("an unsupported architecture", config(architectures=["GPT9"]), ("config.json", "'GPT9'",
         "is not supported")),
    Case("no architectures", config(architectures=...), ("config.json: architectures must name",)),
    Case("vocab_size is missing", config(vocab_size=...), ("config.json: vocab_size", "None")),
    Case("vocab_size is text", config(vocab_size="512"), ("config.json: vocab_size", "'512'")),
    Case("vocab_size is negative", config(vocab_size=-1), ("config.json: vocab_size", "-1")),
    Case("vocab_size is another model's", config(vocab_size=600),
         (SINGLE, "'model.embed_tokens.weight'", "[512, 64] instead of [600, 64]")),
    Case("an unsupported rope type", config(rope_parameters={"rope_type": "xpos", "factor": 2}),
         ("config.json: rope type 'xpos'", "supported are")),
    Case("quantized in a way that is not read", config(quantization_config={"quant_method": "hqq"}),
         ("config.json: quantization_config: quant_method hqq is not supported",)),
    Case("layers of an unknown kind", config(use_sliding_window=True,
         layer_types=["linear_attention"] * 2),
         ("config.json: layer_types: 'linear_attention'",)),
    # --- tokenizer and template
    Case("tokenizer.json is missing", remove("tokenizer.json"), ("tokenizer.json: no such file",)),
    Case("tokenizer.json is damaged", write("tokenizer.json", '{"model": 5}'),
         ("tokenizer.json: not a valid tokenizer",)),
    Case("a tokenizer of another model", large_tokenizer,
         ("tokenizer.json: token ids reach 699", "512")),
    Case("a tokenizer made by code in the folder", code_for_a_tokenizer,
         ("tokenizer.json: no such file",)),
    Case("a chat template that does not parse", write("chat_template.jinja", "a\n{% if %}"),
         ("chat_template.jinja", "line 2")),
    # --- the weights' file
    Case("pickled weights", lambda f: (f / SINGLE).rename(f / "pytorch_model.bin") and None,
         ("'pytorch_model.bin'", "never opened", "safetensors")),
    Case("weights are a Git LFS pointer", write(SINGLE, LFS), (SINGLE, "git lfs pull")),
    Case("weights are an empty file", write(SINGLE, b""), (SINGLE, "0 bytes is too short")),
    Case("weights are truncated", truncate(SINGLE, lambda size: size - 5000),
         (SINGLE, "truncated: tensor 'model.")),
    Case("a header longer than the file", write(SINGLE, (10**6).to_bytes(8, "little") + b"{}"),
         (SINGLE, "claims 1000000 bytes, the file has 10")),
    Case("a header that is no JSON", header_text(lambda text: "}" + text),
         (SINGLE, "the header is not JSON")),
    Case("a file of zeros", zero(header_too=True), (SINGLE, "filled with zeros")),
    Case("data of zeros", zero(header_too=False), (SINGLE, "every tensor is all zeros")),
    # --- its tensors
    Case("an unknown dtype", header(lambda t: t[NORM].update(dtype="F6")), (NORM, SINGLE, "'F6'")),
    Case("a misshapen tensor", header(swap_sides),
         (QUERY, SINGLE, "[128, 32] instead of [64, 64]")),
    Case("a missing tensor", header(lambda t: t.update({"model.other": t.pop(NORM)})),
         ("missing", NORM, "model.other", SINGLE)),
    Case("a surplus tensor", header(lambda t: t.update(
         {"model.layers.7.extra": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}})),
         ("not of this model: 'model.layers.7.extra'", SINGLE)),
    Case("a tensor of zeros", zero(header_too=False, name=QUERY), (QUERY, SINGLE, "zeros")),
    Case("a key twice", header_text(lambda t: f'{{"{NORM}": 0, {t[1:]}'),
         (SINGLE, "more than once", NORM)),
    Case("overlapping tensors", header(lambda t: t[NORM].update(data_offsets=[0, 256])),
         (SINGLE, "does not begin where")),
    # --- shards
    Case("a missing shard", remove(SECOND), (INDEX, SECOND, "1 of 2 shards"), 2, quick=True),
    Case("a shard above the folder", index(norm="../x.safetensors"),
         (INDEX, "'../x.safetensors' is no plain file name"), 2),
    Case("a shard with an absolute path", index(norm="/etc/passwd"),
         (INDEX, "'/etc/passwd' is no plain file name"), 2),
    Case("index and shards disagree", index(norm=FIRST), (INDEX, "not in the file", NORM), 2),
    Case("a tensor in two shards", in_both_shards, (INDEX, "more than one file", NORM), 2),
    Case("a truncated shard", truncate(FIRST, lambda size: size // 2), (FIRST, "truncated"), 2),
]  # fmt: skip
