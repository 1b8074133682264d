"""The mock server as a process, and means to look at it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SMALL = ["--random-input-len", "8", "--warmup-requests", "0", "--quiet"]
"""Flags of ``bench serve``."""


@contextlib.contextmanager
def mock_server(*arguments: str) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("mock_openai.py")), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)


def seen(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url + "/seen", timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def in_some_moment(check: Callable[[], None]) -> None:
    """It holds one time of four: other processes make delays longer, never shorter, and not always
    as much."""
    for _ in range(3):
        with contextlib.suppress(AssertionError):
            return check()
    return check()
