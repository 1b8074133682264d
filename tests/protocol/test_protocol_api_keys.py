"""What ``--api-key`` means: keys, and files of keys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.protocol.config import ConfigError, resolve
from penstock.protocol.config.api_keys import MAX_KEYS, read_api_keys


def key_file(tmp_path: Path, text: str | bytes, mode: int = 0o600) -> str:
    path = tmp_path / "keys"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(mode)
    return f"file:{path}"


def test_a_file_holds_one_key_a_line_and_comments(tmp_path: Path) -> None:
    text = "\ufeff# of the team\n\nfirst,key\n  second#key  # of Ann\r\n\t# none\nthird"
    given = [key_file(tmp_path, text), "fourth,key"]
    assert read_api_keys(given) == ["first,key", "second#key", "third", "fourth,key"]
    assert read_api_keys(["a", "file"]) == ["a", "file"]


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        ("", 0o600, "the file holds no key; write one a line"),
        ("# only words\n \n", 0o600, "the file holds no key"),
        ("a\nsecret words\n", 0o600, "line 2 holds 2 words"),
        ("key", 0o644, r"others can read .*; chmod 600 "),
        ("key", 0o640, r"others can read .*; chmod 600 "),
        ("key", 0o622, r"others can write .*; chmod go-w "),
        (b"\xff\xfe\x00", 0o600, "not text"),
    ],
)
def test_a_file_that_is_no_list_of_private_keys_is_refused_with_the_reason(
    tmp_path: Path, text: str | bytes, mode: int, why: str
) -> None:
    given = key_file(tmp_path, text, mode)
    with pytest.raises(ConfigError, match=f"--api-key {given}: .*{why}") as error:
        resolve(["server"], {"api_key": [given]}, {})
    assert "secret" not in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_path_that_leads_to_no_file_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    for path, why in (
        (tmp_path / "none", "No such file"),
        (tmp_path, "no regular file"),
        (pipe, "no regular file"),
    ):
        with pytest.raises(ConfigError, match=f"--api-key file:{path}: .*{why}"):
            read_api_keys([f"file:{path}"])
    with pytest.raises(ConfigError, match="expected file:PATH"):
        read_api_keys(["file:"])


def test_there_are_no_empty_keys_and_not_too_many() -> None:
    with pytest.raises(ConfigError, match="a key is empty"):
        read_api_keys([""])
    with pytest.raises(
        ConfigError, match=f"{MAX_KEYS + 1} keys are given; there may be {MAX_KEYS}"
    ):
        read_api_keys(["k"] * (MAX_KEYS + 1))


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("a,b", ["a", "b"]),
        ('["a,b", "c"]', ["a,b", "c"]),
        ("", []),
    ],
)
def test_in_the_environment_keys_are_separated_by_commas_or_a_json_array(
    text: str, keys: list[str]
) -> None:
    config, _ = resolve(["server"], {}, {"PENSTOCK_API_KEY": text})
    assert config.server.api_key == keys
