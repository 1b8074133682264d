"""Bad input gets a clear error that names its cause, soon, and costs nobody else."""

from __future__ import annotations

import json
import shutil
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.pipeline.served import Served, served

from penstock.loadtest.models.make_model import make_model

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = make_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=512)
    with served(str(folder), "--device", "null", "--max-body-bytes", "1000000") as server:
        yield server


SOON_S = 10.0
"""A hundredth of a second where the machine is free; each of these processes starts in less."""


def post(server: Served, path: str, body: bytes) -> tuple[int, dict[str, Any], float]:
    """(status, error object, seconds)."""
    began = time.monotonic()
    request = urllib.request.Request(
        server.url + path, body, {"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer), time.monotonic() - began
    except urllib.error.HTTPError as error:
        found = json.load(error)["error"]
        return error.code, found, time.monotonic() - began


def with_field(name: str, raw: str) -> bytes:
    return b'{"prompt": "Hello", "max_tokens": 4, "%s": %s}' % (name.encode(), raw.encode())


NESTED = "[" * 100_000 + "]" * 100_000
LARGE = '"%s"' % ("x" * 2_000_000)
CASES: list[tuple[str, str, bytes, int, str]] = [
    ("an empty prompt", COMPLETIONS, b'{"prompt": ""}', 400, "empty"),
    ("an empty list of ids", COMPLETIONS, b'{"prompt": []}', 400, "prompt"),
    ("an empty list in a list", COMPLETIONS, b'{"prompt": [[]]}', 400, "prompt"),
    ("no messages", CHAT, b'{"messages": []}', 400, "messages"),
    ("no prompt", COMPLETIONS, b"{}", 400, "prompt"),
    (
        "a prompt of more tokens than the model takes",
        COMPLETIONS,
        json.dumps({"prompt": [5] * 600}).encode(),
        400,
        "512",
    ),
    (
        "a text of more tokens than the model takes",
        COMPLETIONS,
        json.dumps({"prompt": "hello " * 5000}).encode(),
        400,
        "512",
    ),
    ("a prompt without room", COMPLETIONS, b'{"prompt": "Hi", "max_tokens": 512}', 400, "512"),
    ("an id past the vocabulary", COMPLETIONS, b'{"prompt": [5, 512]}', 400, "512"),
    ("a negative id", COMPLETIONS, b'{"prompt": [-1]}', 400, "-1"),
    ("a huge id", COMPLETIONS, b'{"prompt": [99999999999999999999]}', 400, "prompt"),
    ("NaN", COMPLETIONS, with_field("temperature", "NaN"), 400, "JSON"),
    ("Infinity", COMPLETIONS, with_field("temperature", "Infinity"), 400, "JSON"),
    ("a float past all floats", COMPLETIONS, with_field("temperature", "1e400"), 400, ""),
    ("a negative temperature", COMPLETIONS, with_field("temperature", "-0.1"), 400, "temperature"),
    ("an integer of 4,000 digits", COMPLETIONS, with_field("seed", "9" * 4000), 400, ""),
    ("top_p over 1", COMPLETIONS, with_field("top_p", "1.5"), 400, "top_p"),
    ("text for a number", COMPLETIONS, with_field("max_tokens", '"4"'), 400, "max_tokens"),
    ("a boolean for a number", COMPLETIONS, with_field("n", "true"), 400, "n"),
    ("too many choices", COMPLETIONS, with_field("n", "100000"), 400, "n"),
    ("an unknown field", COMPLETIONS, with_field("temprature", "1"), 400, "temprature"),
    ("a field not supported yet", COMPLETIONS, with_field("suffix", '"x"'), 400, "suffix"),
    ("an array for the body", COMPLETIONS, b"[1, 2]", 400, ""),
    ("no JSON", COMPLETIONS, b"hello", 400, "JSON"),
    ("half of a JSON", COMPLETIONS, b'{"prompt": "x', 400, "JSON"),
    ("bad UTF-8", COMPLETIONS, b'{"prompt": "\xff\xfe"}', 400, ""),
    ("deep nesting", COMPLETIONS, with_field("metadata", NESTED), 400, "nest"),
    ("an oversized body", COMPLETIONS, with_field("user", LARGE), 413, "1000000"),
    ("an unknown model", COMPLETIONS, with_field("model", '"gpt-9"'), 404, "gpt-9"),
    ("an unknown role", CHAT, b'{"messages": [{"role": "king", "content": "x"}]}', 400, "king"),
    ("a part of an unknown type", CHAT,
     b'{"messages": [{"role": "user", "content": [{"type": "smell"}]}]}', 400, "smell"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "status", "names"),
    [case[1:] for case in CASES],
    ids=[case[0].replace(" ", "_") for case in CASES],
)
def test_a_bad_request_is_told_its_cause(
    server: Served, path: str, body: bytes, status: int, names: str
) -> None:
    processes = set(server.processes())
    found, error, seconds = post(server, path, body)
    assert found == status, error
    assert names in error["message"], error
    assert len(error["message"]) < 1000
    assert seconds < SOON_S
    assert set(server.processes()) == processes
    assert post(server, COMPLETIONS, b'{"prompt": "Hi", "max_tokens": 2}')[0] == 200


@pytest.mark.parametrize(
    "data",
    [
        b"GARBAGE\r\n\r\n",
        b"GET /live HTTP/1.1\r\nHost: x\r\nBad Header: 1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: five\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["no_request_line", "a_bad_header", "a_bad_length", "a_bad_chunk"],
)
def test_malformed_http_is_told_its_cause_in_json(server: Served, data: bytes) -> None:
    port = urllib.parse.urlsplit(server.url).port
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(data)
        raw = b""
        while part := client.recv(65536):
            raw += part
    head, _, body = raw.partition(b"\r\n\r\n")
    assert head.split()[1] == b"400"
    assert b"x-request-id: " in head
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_bad_requests_leave_nothing_behind(server: Served) -> None:
    metrics = server.settled()
    for name in ("requests_running", "requests_waiting", "kv_blocks_used", "queue_depth"):
        assert metrics[f"penstock_{name}"] == 0


# --- starting with bad input


def start(*arguments: str) -> tuple[int, str, float]:
    """(exit code, output, seconds) of a `serve` that cannot start."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "penstock.services", "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr, time.monotonic() - began


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", shards=2)


def damage_missing_shard(folder: Path) -> list[str]:
    next(folder.glob("model-00002*")).unlink()
    return ["model-00002"]


def damage_truncated_shard(folder: Path) -> list[str]:
    shard = next(folder.glob("model-00001*"))
    shard.write_bytes(shard.read_bytes()[:-1000])
    return ["model-00001"]


def damage_misshapen_tensor(folder: Path) -> list[str]:
    shard = next(folder.glob("model-00001*"))
    data = shard.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    name = next(n for n in header if n.endswith("q_proj.weight"))
    header[name]["shape"].append(1)
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    shard.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    return [name, "shape"]


def damage_config(folder: Path) -> list[str]:
    (folder / "config.json").write_text("{ not json")
    return ["config.json"]


def damage_tokenizer(folder: Path) -> list[str]:
    (folder / "tokenizer.json").write_text("{}")
    return ["tokenizer.json"]


@pytest.mark.slow  # in every run: some of the folders of bad_folders.py, and loads that fail
@pytest.mark.parametrize(
    "damage",
    [
        damage_missing_shard,
        damage_truncated_shard,
        damage_misshapen_tensor,
        damage_config,
        damage_tokenizer,
    ],
    ids=lambda damage: damage.__name__.removeprefix("damage_"),
)
def test_a_damaged_model_folder_is_refused_by_name(folder: Path, damage: Any) -> None:
    names = damage(folder)
    code, output, seconds = start(str(folder), "--device", "cpu", "--port", "0")
    assert code == 3, output
    for name in names:
        assert name in output
    assert "Traceback" not in output
    assert seconds < 20.0


def test_a_model_path_that_does_not_exist_is_refused_at_once() -> None:
    code, output, seconds = start("/no/such/model", "--port", "0")
    assert code == 3
    assert "/no/such/model" in output
    assert "Traceback" not in output
    assert seconds < SOON_S


def test_a_port_in_use_is_refused_at_once() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        code, output, seconds = start("--device", "null", "--port", str(port))
    assert code == 4
    assert str(port) in output
    assert "Traceback" not in output
    assert seconds < SOON_S


@pytest.mark.slow  # as with the folders of bad_folders.py, of which some are quick
def test_a_refused_start_leaves_no_files(folder: Path, tmp_path: Path) -> None:
    damage_truncated_shard(folder)
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    start(str(folder), "--device", "cpu", "--port", "0", "--runtime-dir", str(runtime))
    assert [str(path) for path in runtime.rglob("*")] == []
    shutil.rmtree(runtime)
