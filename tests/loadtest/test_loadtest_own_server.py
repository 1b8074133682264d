"""``penstock bench serve`` against ``penstock serve`` with a device of known step time."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.pipeline.served import NULL, SharedServers

from penstock.loadtest.client import bench_serve

STEP_MS = float(NULL[-1])


@pytest.fixture(scope="module")
def url(shared_server: SharedServers) -> str:
    return shared_server(*NULL).url


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_every_token_of_our_server_is_counted_and_takes_a_step(
    url: str, endpoint: str, tmp_path: Path
) -> None:
    path = tmp_path / "r.json"
    code = bench_serve.main(
        [
            "--base-url", url, "--endpoint", endpoint, "--num-prompts", "24", "--ignore-eos",
            "--max-concurrency", "8", "--random-input-len", "32", "--random-output-len", "30",
            "--save-result", str(path), "--quiet",
        ]
    )  # fmt: skip
    assert code == 0
    result: dict[str, Any] = json.loads(path.read_text())
    assert result["completed"] == 24
    assert result["total_output_tokens"] == 24 * 30
    if endpoint == "/v1/completions":
        assert result["total_input_tokens"] == 24 * 32
    assert result["token_counts"]["without_usage"] == 0
    # A busy machine makes steps longer, never shorter.
    assert 0.95 * STEP_MS < result["median_tpot_ms"] < 5 * STEP_MS
    assert 0.95 * STEP_MS < result["median_itl_ms"] < 5 * STEP_MS
    assert result["environment"]["server_version"]


TOOL = f"""
import time
from penstock.loadtest.own_server import own_server
with own_server({[*NULL]!r}) as url:
    print(url, flush=True)
    time.sleep(600)
"""


def test_the_server_of_a_tool_that_is_killed_ends_too() -> None:
    with subprocess.Popen([sys.executable, "-c", TOOL], stdout=subprocess.PIPE, text=True) as tool:
        assert tool.stdout is not None
        parts = urlsplit(tool.stdout.readline().strip())
        place = (str(parts.hostname), int(parts.port or 0))
        socket.create_connection(place, 5).close()
        tool.kill()
    ends = time.monotonic() + 30
    while time.monotonic() < ends:
        try:
            socket.create_connection(place, 5).close()
        except OSError:
            return
        time.sleep(0.05)
    raise AssertionError(f"something still listens at {place}")
