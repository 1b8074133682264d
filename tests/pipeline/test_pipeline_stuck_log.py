"""A log that nobody takes, in a pipe that is full or on a disk that is: requests are answered as
fast as beside a log that is taken."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.pipeline.served import START_SECONDS

from penstock.loadtest.client import bench_serve

pytestmark = pytest.mark.slow

STEP_MS = "20"
PERCENTILES = ("p99_itl_ms", "p99_ttft_ms")
MORE = 1.1
"""How much more a percentile may be; where something waits for the log, it is many times as much,
or there is no answer at all."""
ATTEMPTS = 6
"""Other processes make some request late in most runs, but not in all those of one server alone."""


@contextlib.contextmanager
def serving(log: int) -> Iterator[str]:
    """The URL of a server whose every process logs all it can to this descriptor."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = ["--device", "null", "--null-step-ms", STEP_MS, "--grpc-port", "0"]
    flags += ["--port", str(port), "--log-level", "debug", "--log-format", "json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.services", "serve", *flags], stdout=log, stderr=log
    )
    children: list[psutil.Process] = []
    try:
        url = f"http://127.0.0.1:{port}"
        await_ready(url, process)
        children = psutil.Process(process.pid).children(recursive=True)
        yield url
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        for one in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.kill()
        process.wait(30)


def await_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        assert process.poll() is None
        try:
            urllib.request.urlopen(f"{url}/ready", timeout=60).close()
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


@contextlib.contextmanager
def unread_pipe() -> Iterator[int]:
    """The writing end of the smallest pipe there is; it is full in the end."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    yield writing
    _, takes_more, _ = select.select([], [writing], [], 0)
    assert not takes_more
    os.close(reading)
    os.close(writing)


@contextlib.contextmanager
def full_disk() -> Iterator[int]:
    with Path("/dev/full").open("wb") as full:
        yield full.fileno()


def loaded(url: str, path: Path) -> dict[str, Any]:
    flags = ["--base-url", url, "--num-prompts", "40", "--max-concurrency", "8", "--ignore-eos"]
    flags += ["--random-input-len", "64", "--random-output-len", "32", "--quiet"]
    assert bench_serve.main([*flags, "--save-result", str(path)]) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    assert (found["completed"], found["total_output_tokens"]) == (40, 40 * 32)
    return found


@pytest.mark.parametrize("sink", [unread_pipe, full_disk])
def test_p99_beside_a_log_that_nobody_takes_is_that_beside_one_that_is_taken(
    sink: Any, tmp_path: Path
) -> None:
    wanted, told = set(PERCENTILES), []
    with (
        (tmp_path / "log").open("wb") as log,
        sink() as stuck,
        serving(log.fileno()) as taken_url,
        serving(stuck) as stuck_url,
    ):
        for attempt in range(ATTEMPTS):
            taken = loaded(taken_url, tmp_path / f"taken {attempt}")
            found = loaded(stuck_url, tmp_path / f"stuck {attempt}")
            wanted -= {name for name in wanted if found[name] <= MORE * taken[name]}
            told.append([(name, taken[name], found[name]) for name in PERCENTILES])
            if not wanted:
                break
    assert not wanted, told
    assert b"choice ended" in (tmp_path / "log").read_bytes()
