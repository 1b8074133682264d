"""What a checkpoint's JSON files say, and clear errors for those that say it wrongly."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from penstock.protocol.model_info import (
    BadModelFolder,
    ModelInfo,
    fingerprint,
    read_model_info,
)
from penstock.protocol.sampling import SamplingParams, resolve

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "eos_token_id": 2,
}


def folder(path: Path, config: Any = None, generation: Any = None, **changes: Any) -> Path:
    """A model folder. Text is written as it is, anything else as JSON; ``None`` changes remove."""
    merged = {k: v for k, v in {**CONFIG, **changes}.items() if v is not None}
    for name, value in (
        ("config.json", merged if config is None else config),
        ("generation_config.json", generation),
    ):
        if isinstance(value, bytes):
            (path / name).write_bytes(value)
        elif value is not None:
            (path / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def read(path: Path, *arguments: Any, **changes: Any) -> ModelInfo:
    return read_model_info(folder(path, *arguments, **changes))


def fault(path: Path, *arguments: Any, **changes: Any) -> str:
    with pytest.raises(BadModelFolder) as caught:
        read(path, *arguments, **changes)
    return str(caught.value)


def test_the_facts_are_read(tmp_path: Path) -> None:
    info = read(tmp_path, extra={"deep": [1]})
    assert info.folder == tmp_path
    assert info.architecture == "Qwen3ForCausalLM"
    assert (info.vocab_size, info.max_model_len) == (1000, 4096)
    assert (info.eos_token_ids, info.defaults) == ([2], {})
    assert info.config["extra"] == {"deep": [1]}


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({}, "float32"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16"}, "float16"),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, "bfloat16"),
    ],
)
def test_both_generations_of_transformers_name_the_dtype(
    tmp_path: Path, changes: dict[str, Any], dtype: str
) -> None:
    assert read(tmp_path, **changes).dtype == dtype


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, None, [2]),
        ([2, 3], None, [2, 3]),
        (2, {"eos_token_id": [5, 6]}, [5, 6]),
        (2, {"eos_token_id": 7}, [7]),
        (2, {"eos_token_id": []}, [2]),
        (2, {"eos_token_id": None}, [2]),
        (2, {}, [2]),
        (-1, None, []),
        (0, None, [0]),
        ([2, 1000, 10**30], None, [2]),
    ],
)
def test_end_tokens_come_from_the_generation_config_first(
    tmp_path: Path, config: Any, generation: Any, expected: list[int]
) -> None:
    assert read(tmp_path, None, generation, eos_token_id=config).eos_token_ids == expected


def test_a_model_may_have_no_end_token(tmp_path: Path) -> None:
    assert read(tmp_path, eos_token_id=None).eos_token_ids == []


def test_sampling_defaults_come_from_the_generation_config(tmp_path: Path) -> None:
    generation = {"temperature": 0.6, "top_p": 1, "top_k": 20.0, "repetition_penalty": 1.1}
    info = read(tmp_path, None, generation)
    penalty = {"repetition_penalty": 1.1}
    assert info.defaults == {"temperature": 0.6, "top_p": 1.0, "top_k": 20, **penalty}
    assert type(info.defaults["top_k"]) is int
    params = resolve(SamplingParams(top_p=0.5), info.defaults, seed=3)
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.6, 0.5, 20, 3)
    assert read(tmp_path, None, {**generation, "do_sample": False}).defaults == penalty
    assert read(tmp_path, None, {"temperature": None}).defaults == {}


@pytest.mark.parametrize(
    ("name", "value", "bound"),
    [
        ("temperature", -0.1, "0 to 100"),
        ("temperature", 1e9, "0 to 100"),
        ("temperature", "0.6", "'0.6'; a number"),
        ("temperature", [0.6], "array"),
        ("temperature", True, "number"),
        ("top_p", 1.5, "0 to 1"),
        ("top_k", 2.5, "whole number"),
        ("top_k", -2, "-1"),
        ("top_k", 10**12, "2147483647"),
    ],
)
def test_a_sampling_default_out_of_range_is_refused_at_start_not_in_each_request(
    tmp_path: Path, name: str, value: Any, bound: str
) -> None:
    text = fault(tmp_path, None, {name: value})
    assert "generation_config.json" in text
    assert name in text
    assert bound in text


@pytest.mark.parametrize("key", ["vocab_size", "max_position_embeddings"])
@pytest.mark.parametrize("value", [None, 0, -1, 1.5, 100.0, True, "100", [100], {}, 2**31, 10**40])
def test_a_size_that_is_none_is_refused_with_its_name_and_value(
    tmp_path: Path, key: str, value: Any
) -> None:
    text = fault(tmp_path, **{key: value})
    assert f"{tmp_path}/config.json: {key} must be a positive integer" in text
    assert repr(value) in text


@pytest.mark.parametrize(
    ("text_config", "named"),
    [
        ({"architectures": ["Gemma3ForCausalLM"], "vocab_size": 9}, "'Gemma3ForCausalLM' in text"),
        ({"model_type": "gemma3_text"}, "'gemma3_text' in text_config"),
        ({"architectures": [], "model_type": 5}, "text model alone may be"),
    ],
)
def test_a_multimodal_model_is_refused_as_one(
    tmp_path: Path, text_config: dict[str, Any], named: str
) -> None:
    text = fault(
        tmp_path,
        architectures=["Gemma3ForConditionalGeneration"],
        vocab_size=None,
        text_config=text_config,
    )
    assert "'Gemma3ForConditionalGeneration' is a multimodal model, which is not supported" in text
    assert named in text


def test_a_model_without_a_trained_length_is_refused_with_the_reason(tmp_path: Path) -> None:
    text = fault(tmp_path, architectures=["MambaForCausalLM"], max_position_embeddings=None)
    assert "'MambaForCausalLM' states no length that it was trained for" in text
    assert "another state than keys and values" in text
    usual = fault(tmp_path, max_position_embeddings=None)
    assert "add the key, with the number of tokens" in usual and "Mamba" not in usual


@pytest.mark.parametrize("key", ["n_positions", "max_seq_len", "seq_length", "n_ctx"])
def test_older_families_name_their_length_otherwise(tmp_path: Path, key: str) -> None:
    assert read(tmp_path, max_position_embeddings=None, **{key: 77}).max_model_len == 77


@pytest.mark.parametrize("value", [None, [], "Qwen3ForCausalLM", {}, 5, [5], [None]])
def test_a_config_without_a_model_class_is_refused(tmp_path: Path, value: Any) -> None:
    assert "config.json: architectures" in fault(tmp_path, architectures=value)


@pytest.mark.parametrize("value", ["2", [2, "3"], 2.0, True, {"id": 2}, [[2]], [None]])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_end_tokens_that_are_no_ids_are_refused(tmp_path: Path, value: Any, file: str) -> None:
    if file == "config.json":
        text = fault(tmp_path, eos_token_id=value)
    else:
        text = fault(tmp_path, None, {"eos_token_id": value})
    assert f"{tmp_path}/{file}: eos_token_id" in text


BROKEN: dict[str, bytes] = {
    "empty": b"",
    "spaces": b"  \n",
    "truncated": json.dumps(CONFIG).encode()[:-9],
    "LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n",
    "HTML": b"<html>404</html>",
    "trailing": b"{} {}",
    "trailing comma": b'{"vocab_size": 1,}',
    "single quotes": b"{'vocab_size': 1}",
    "comment": b'{"vocab_size": 1} // one',
    "NaN": b'{"vocab_size": NaN}',
    "Infinity": b'{"vocab_size": Infinity}',
    "huge number": b'{"vocab_size": 1e400}',
    "digits": b'{"vocab_size": ' + b"9" * 5000 + b"}",
    "UTF-8": b'{"architectures": ["\xff\xfe"]}',
    "UTF-16": json.dumps(CONFIG).encode("utf-16"),
    "NUL": b"{\x00}",
    "surrogate": b'{"a": "\\ud800"}',
    "deep": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_file_that_is_no_json_is_refused_by_name(tmp_path: Path, case: str, file: str) -> None:
    if file == "config.json":
        text = fault(tmp_path, BROKEN[case])
    else:
        text = fault(tmp_path, None, BROKEN[case])
    assert text.startswith(f"{tmp_path}/{file}: ")
    assert "not valid JSON" in text or (case == "LFS pointer" and "LFS" in text)
    assert len(text) < 1000


@pytest.mark.parametrize("content", ["[]", "5", '"text"', "null", "true"])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_file_that_is_no_object_is_refused_by_name(
    tmp_path: Path, content: str, file: str
) -> None:
    text = fault(tmp_path, content) if file == "config.json" else fault(tmp_path, None, content)
    assert text == f"{tmp_path}/{file}: expected an object"


def test_a_folder_that_is_not_there_is_refused_with_a_hint(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path / "file", "org/model-on-the-hub"):
        (tmp_path / "file").write_text("")
        with pytest.raises(BadModelFolder, match=r"folder.*Hugging Face checkpoint"):
            read_model_info(path)
    with pytest.raises(BadModelFolder, match=r"config.json: no such file"):
        read_model_info(tmp_path)


def test_the_present_folder_is_named_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadModelFolder, match=f"^{tmp_path}/config.json: no such file"):
        read_model_info(".")


def test_other_things_in_place_of_the_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(BadModelFolder, match=r"config.json: (Is a directory|not a regular file)"):
        read_model_info(tmp_path)
    (tmp_path / "config.json").rmdir()
    (tmp_path / "config.json").symlink_to(tmp_path / "nowhere")
    with pytest.raises(BadModelFolder, match=r"config.json: no such file"):
        read_model_info(tmp_path)


def test_a_file_of_absurd_size_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.touch()
    os.truncate(path, 200 * 1024 * 1024)
    with pytest.raises(BadModelFolder, match="larger than 67108864 bytes"):
        read_model_info(tmp_path)


def test_an_error_is_one_bounded_line_whatever_a_file_puts_into_it() -> None:
    error = str(BadModelFolder("a\nb\x1b[31mc\u2028d" + "x" * 10**6))
    assert error.startswith("a b [31mc d")
    assert len(error) < 5000


def test_the_fingerprint_tells_models_apart_by_their_shapes_and_vocabulary(tmp_path: Path) -> None:
    assert fingerprint(tmp_path) == ""
    assert fingerprint(tmp_path / "nowhere") == ""
    found = set()
    for config, tokenizer in (("{}", "a"), ("{ }", "a"), ("{}", "b")):
        (tmp_path / "config.json").write_text(config)
        (tmp_path / "tokenizer.json").write_text(tokenizer)
        found.add(fingerprint(tmp_path))
        (tmp_path / "chat_template.jinja").write_text(config + tokenizer)
        assert fingerprint(tmp_path) in found
    assert len(found) == 3


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_yarn_extends_a_model_beyond_its_trained_length(tmp_path: Path, key: str) -> None:
    table = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert read(tmp_path, **{key: table}).max_model_len == 16_384
    assert read(tmp_path, **{key: table | {"type": "linear"}}).max_model_len == 4096
    assert read(tmp_path, **{key: table | {"factor": "4"}}).max_model_len == 4096
