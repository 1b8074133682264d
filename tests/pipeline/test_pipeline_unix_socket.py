"""A whole server whose HTTP is on a UNIX socket."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.pipeline.in_process import called

SECONDS = 60.0
SLOW = ("--device", "null", "--null-step-ms", "50")


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=SECONDS)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(SECONDS)
        self.sock.connect(self._path)


def asked(path: Path, route: str, body: Any = None) -> tuple[int, Any]:
    connection = _Connection(path)
    try:
        content = None if body is None else json.dumps(body)
        headers = {"Content-Type": "application/json"} if body is not None else {}
        connection.request("GET" if body is None else "POST", route, content, headers)
        answer = connection.getresponse()
        return answer.status, json.load(answer)
    finally:
        connection.close()


def start(path: Path, *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*(sys.executable, "-m", "penstock.services", "serve"), "--uds", str(path), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PENSTOCK_LOG_FORMAT": "json"},
    )


def run(*command: str) -> str:
    done = called(*command)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pst", dir="/tmp") as found:  # a short path
        yield Path(found)


def test_a_server_on_a_unix_socket_serves_is_found_and_leaves_nothing(folder: Path) -> None:
    path = folder / "penstock.sock"
    server = start(path, *SLOW, "--frontends", "2", "--uds-mode", "660")
    try:
        assert server.stdout is not None
        told = json.loads(server.stdout.readline())
        assert told["url"] == told["api"] == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        for _ in range(8):  # whichever frontend takes it
            status, answer = asked(path, "/v1/completions", {"prompt": "Hi", "max_tokens": 2})
            assert (status, answer["usage"]["completion_tokens"]) == (200, 2)
        assert "penstock-demo" in run("models", f"unix:{path}")
        assert json.loads(run("status", f"unix://{path}", "--json"))["ready"] is True
        other = start(path, *SLOW)
        _, said = other.communicate(timeout=SECONDS)
        assert other.returncode != 0 and "another process listens there" in said
        assert asked(path, "/live")[0] == 200

        answers: list[tuple[int, Any]] = []
        body = {"prompt": "Hi", "max_tokens": 100, "ignore_eos": True}
        running = threading.Thread(
            target=lambda: answers.append(asked(path, "/v1/completions", body))
        )
        running.start()
        deadline = time.monotonic() + SECONDS
        while not asked(path, "/playground/status")[1]["running"]:
            assert time.monotonic() < deadline
        server.send_signal(signal.SIGTERM)
        while path.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        running.join(SECONDS)
        assert answers[0][0] == 200 and answers[0][1]["usage"]["completion_tokens"] == 100
        assert server.wait(SECONDS) == 0
    finally:
        server.kill()
        server.communicate()
    assert not list(folder.iterdir())
