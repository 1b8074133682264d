from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.loadtest.models import random_weights
from penstock.loadtest.models.make_model import main, make_model
from penstock.protocol.model_info import read_model_info

ARCHITECTURES = ("qwen3", "qwen2", "llama")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "fields",
    [{}, {"tie": False, "dtype": "bfloat16", "shards": 3, "head_dim": 32, "num_kv_heads": 1}],
)
def test_transformers_loads_every_tensor(
    architecture: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    folder = make_model(tmp_path / "m", architecture=architecture, **fields)
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == getattr(torch, fields.get("dtype", "float32"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "The water wheel turns. 😀 12345"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer(text)["input_ids"]])).logits.float()
    assert torch.isfinite(logits).all()
    assert 0.1 < logits.std() < 100


def test_bfloat16_weights_are_those_of_float32_rounded(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    exact = load_file(make_model(tmp_path / "a") / "model.safetensors")
    rounded = load_file(make_model(tmp_path / "b", dtype="bfloat16") / "model.safetensors")
    assert exact.keys() == rounded.keys()
    for name, values in exact.items():
        assert torch.equal(values.to(torch.bfloat16), rounded[name])


def test_shards_hold_the_same_tensors_as_one_file(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    whole = load_file(make_model(tmp_path / "a") / "model.safetensors")
    folder = make_model(tmp_path / "b", shards=4)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in whole.values())
    assert len(set(index["weight_map"].values())) == 4
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(folder / file)[name], whole.pop(name))
    assert not whole


def test_large_weights_are_spread_over_files_of_a_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.numpy import load_file

    whole = load_file(make_model(tmp_path / "a") / "model.safetensors")
    monkeypatch.setattr(random_weights, "MAX_FILE_BYTES", 70_000)
    folder = make_model(tmp_path / "b")
    weights = sorted(folder.glob("*.safetensors"))
    assert len(weights) > 3
    assert weights[0].name == f"model-00001-of-{len(weights):05}.safetensors"
    found = {}
    for path in weights:
        held = load_file(path)
        assert len(held) == 1 or sum(values.nbytes for values in held.values()) <= 70_000
        found.update(held)
    assert found.keys() == whole.keys()
    assert all((found[name] == whole[name]).all() for name in whole)


def test_a_tensor_of_many_stretches_does_not_depend_on_the_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.numpy import load_file

    monkeypatch.setattr(random_weights, "STRETCH", 1000)
    first = contents(make_model(tmp_path / "a", dtype="bfloat16"))
    monkeypatch.setattr(random_weights, "usable_cores", lambda: 7)
    assert contents(make_model(tmp_path / "b", dtype="bfloat16")) == first
    values = load_file(make_model(tmp_path / "c") / "model.safetensors")
    embedding = values["model.embed_tokens.weight"]
    assert embedding.size > 30_000
    assert abs(embedding.mean()) < 0.03 and abs(embedding.std() - 1) < 0.03
    assert len({value.tobytes() for value in embedding.reshape(-1)[:32_000].reshape(32, -1)}) == 32


def test_a_size_by_name_can_be_changed_in_parts(tmp_path: Path) -> None:
    arguments = [str(tmp_path / "m"), "--size", "tiny", "--num-layers", "1", "--no-tie"]
    assert main(arguments) == 0
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    sizes = (config["hidden_size"], config["num_hidden_layers"], config["tie_word_embeddings"])
    assert sizes == (256, 1, False)


def test_norms_and_biases_are_not_what_forgetting_them_would_give(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    for architecture in ARCHITECTURES:
        folder = make_model(tmp_path / architecture, architecture=architecture)
        for name, values in load_file(folder / "model.safetensors").items():
            if values.ndim == 1:
                neutral = 0.0 if name.endswith(".bias") else 1.0
                assert abs(values - neutral).max() > 0.2, name


def test_equal_arguments_give_equal_bytes_also_in_another_process(tmp_path: Path) -> None:
    here = contents(make_model(tmp_path / "a", seed=3, shards=2))
    arguments = [str(tmp_path / "b"), "--seed", "3", "--shards", "2"]
    command = [sys.executable, "-m", "penstock.loadtest.models.make_model", *arguments]
    environment = {**os.environ, "PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, capture_output=True)
    assert contents(tmp_path / "b") == here
    assert contents(make_model(tmp_path / "c", seed=4, shards=2)) != here


@pytest.mark.parametrize(
    "vocab_size",
    [259, *(pytest.param(n, marks=pytest.mark.slow) for n in (300, 2000)), 512, 20_000],
)
def test_every_id_of_the_model_has_a_text(vocab_size: int, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    folder = make_model(tmp_path / "m", vocab_size=vocab_size, hidden_size=8)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert sorted(tokenizer.get_vocab().values()) == list(range(vocab_size))


def test_our_own_reader_understands_the_folder(tmp_path: Path) -> None:
    info = read_model_info(make_model(tmp_path / "m", dtype="bfloat16", vocab_size=600))
    assert info.architecture == "Qwen3ForCausalLM"
    assert (info.vocab_size, info.max_model_len, info.dtype) == (600, 2048, "bfloat16")
    assert info.eos_token_ids == [2]


def test_it_takes_less_than_two_seconds(tmp_path: Path) -> None:
    """And a hundredth of that, once all is imported."""
    make_model(tmp_path / "first")
    begin = time.process_time()
    make_model(tmp_path / "m")
    assert time.process_time() - begin < 2.0


def test_a_second_call_replaces_the_first_and_leaves_nothing_beside(tmp_path: Path) -> None:
    make_model(tmp_path / "m", shards=3)
    folder = make_model(tmp_path / "m")
    assert "model.safetensors.index.json" not in contents(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_folder_that_is_no_model_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "one.txt").write_text("dear")
    with pytest.raises(FileExistsError, match="no model folder"):
        make_model(tmp_path / "letters")
    assert contents(tmp_path / "letters") == {"one.txt": b"dear"}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"num_heads": 3}, "num_heads .3. must be a multiple of num_kv_heads .2."),
        ({"head_dim": 15}, "head_dim .15. must be even"),
        ({"vocab_size": 100}, "vocab_size"),
        ({"num_layers": 0}, "num_layers"),
        ({"architecture": "gpt2"}, "architecture"),
    ],
)
def test_sizes_that_make_no_model_are_named(
    fields: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=says):
        make_model(tmp_path / "m", **fields)
    assert not (tmp_path / "m").exists()


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "m"), "--num-heads", "3"]) == 2
    assert "num_heads" in capsys.readouterr().err
    assert main([str(tmp_path / "m"), "--no-tie", "--architecture", "llama"]) == 0
    assert json.loads((tmp_path / "m" / "config.json").read_text())["tie_word_embeddings"] is False
