"""The processes of a running server as targets: found by role, signalled, awaited whole again."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.error
import urllib.request

import psutil
from support.pipeline.served import Served

ROLES = ("router", "tokenizer", "scheduler", "worker", "frontend")
WHOLE_SECONDS = 60.0
"""For a server to be whole again on a machine that does other things as well."""


def find(server: Served, role: str, number: int = 0) -> psutil.Process:
    """The living process ``role number``. Raises ``AssertionError`` when there is none."""
    deadline = time.monotonic() + WHOLE_SECONDS
    while time.monotonic() < deadline:
        for process in server.processes().values():
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[:1] == [f"penstock: {role} {number}"]:
                    return process
        time.sleep(0.01)
    raise AssertionError(f"there is no {role} {number}:\n{server.output[-4000:]}")


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.HTTPError, OSError):
        return False


def children(server: Served) -> list[int]:
    return [process.pid for process in psutil.Process(server.process.pid).children()]


def whole_again(
    server: Served,
    killed: list[psutil.Process],
    count: int,
    began: float,
    within: float = WHOLE_SECONDS,
) -> float:
    """Wait until all of ``killed`` are replaced and the server is ready.

    ``count``: its processes without the launcher. Returns the seconds since ``began``.
    """
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        gone = not any(process.is_running() for process in killed)
        if gone and len(children(server)) == count and is_ready(server.url) and joined(server):
            return time.monotonic() - began
        time.sleep(0.05)
    raise AssertionError(f"not whole within {within:.0f} s:\n{server.output[-6000:]}")


def joined(server: Served) -> bool:
    """Whether all its processes are members and ready."""
    return members(server.url) >= set(children(server))


def members(url: str) -> set[int]:
    """Pids of the processes that the router knows as ready; empty when nobody answers."""
    try:
        # A frontend that is stopped may have got the connection: soon ask another one.
        with urllib.request.urlopen(url + "/playground/status", timeout=3) as answer:
            processes = json.load(answer)["processes"]
    except (urllib.error.HTTPError, OSError):
        return set()
    return {process["pid"] for process in processes if process["phase"] == "ready"}


def nothing_held(server: Served) -> None:
    """No request runs or waits, and every block is free."""
    metrics = server.settled()
    held = {
        name: metrics.get(f"penstock_{name}", 0.0)
        for name in (
            "requests_running",
            "requests_waiting",
            "queue_depth",
            "kv_blocks_used",
        )
    }
    assert not any(held.values()), held
