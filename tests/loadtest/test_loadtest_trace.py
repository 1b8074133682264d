"""``penstock trace`` on a real server, and what it makes of the recordings."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.pipeline.in_process import called
from support.pipeline.served import NULL, Served, SharedServers

from penstock.loadtest.own_server import own_server
from penstock.loadtest.recordings.timeline import (
    Recording,
    Span,
    chrome_trace,
    decoded,
    step_shares,
)
from penstock.protocol.process.trace import DEVICE, EVENT, MAIN, NAMES, PLAN
from penstock.protocol.wire.messages.membership import Capacity, Identity, Peer

ROLES = ("frontend", "tokenizer", "router", "scheduler", "worker")
ROUNDING_US = 0.01


@pytest.fixture(scope="module")
def server(shared_server: SharedServers) -> Served:
    return shared_server(*NULL)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "penstock.services", "trace", *arguments]


def trace(*arguments: str) -> subprocess.CompletedProcess[str]:
    return called("trace", *arguments)


def ask(url: str, tokens: int = 12) -> None:
    body = {"prompt": "water " * 20, "max_tokens": tokens, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()


class Asking:
    """Requests one after the other, until the end of the block."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(2)]

    def _run(self) -> None:
        while not self._over.is_set():
            ask(self._url)

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


@pytest.fixture(scope="module")
def timeline(server: Served, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("trace") / "t.json"
    with Asking(server.url):
        done = trace("--router", server.router, "--seconds", "2", "-o", str(path))
    assert done.returncode == 0, done.stderr
    assert "share between %" in done.stdout
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def names_of_processes(timeline: dict[str, Any]) -> dict[int, str]:
    return {
        event["pid"]: event["args"]["name"]
        for event in timeline["traceEvents"]
        if event["name"] == "process_name"
    }


def spans(timeline: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in timeline["traceEvents"] if event["ph"] == "X"]


def test_every_role_shows_its_own_work(timeline: dict[str, Any]) -> None:
    processes = names_of_processes(timeline)
    assert sorted(name.split()[0] for name in processes.values()) == sorted(ROLES)
    seen = defaultdict(set)
    for span in spans(timeline):
        seen[processes[span["pid"]].split()[0]].add(span["name"])
    assert {"accept request", "TextBatch"} <= seen["frontend"]
    assert {"encode", "TokenBatch"} <= seen["tokenizer"]
    assert {"Submit", "Enqueue"} <= seen["router"]
    assert {"plan", "send plan", "apply result", "hand out tokens"} <= seen["scheduler"]
    assert {"StepPlan", "launch", "step", "send result"} <= seen["worker"]


def test_the_events_of_a_thread_follow_each_other_or_lie_in_each_other(
    timeline: dict[str, Any],
) -> None:
    lanes = defaultdict(list)
    for span in spans(timeline):
        lanes[span["pid"], span["tid"]].append(span)
    for found in lanes.values():
        open_until: list[float] = []
        for span in sorted(found, key=lambda span: (span["ts"], -span["dur"])):
            end = span["ts"] + span["dur"]
            assert span["dur"] >= 0
            while open_until and open_until[-1] <= span["ts"] + ROUNDING_US:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + ROUNDING_US, span
            open_until.append(end)


def test_the_steps_of_a_worker_come_one_after_the_other(timeline: dict[str, Any]) -> None:
    steps = sorted((s for s in spans(timeline) if s["name"] == "step"), key=lambda s: s["ts"])
    assert len(steps) > 20
    for step, later in pairwise(steps):
        assert step["ts"] + step["dur"] <= later["ts"] + ROUNDING_US
    numbers = [step["args"]["number"] for step in steps]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_a_plan_is_made_before_its_step_runs(timeline: dict[str, Any]) -> None:
    """All processes of a host have one clock."""
    found = spans(timeline)
    planned = {s["args"]["number"]: s["ts"] for s in found if s["name"] == "plan"}
    ran = {s["args"]["number"]: s["ts"] for s in found if s["name"] == "step"}
    both = planned.keys() & ran.keys()
    assert len(both) > 20
    assert all(planned[number] < ran[number] for number in both)


@pytest.mark.slow
def test_a_recording_whose_observer_was_killed_ends_by_itself(
    server: Served, tmp_path: Path
) -> None:
    killed = subprocess.Popen(
        command("--router", server.router, "--seconds", "10", "-o", str(tmp_path / "k.json")),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert killed.stderr is not None
    assert "recording 5 processes" in killed.stderr.readline()
    again = ("--router", server.router, "--seconds", "0.3", "-o", str(tmp_path / "a.json"))
    deadline = time.monotonic() + 60
    while "another recording" not in (done := trace(*again)).stderr:
        assert killed.poll() is None, "the first one was over before the second one asked"
        assert done.returncode == 0, done.stderr
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=30)
    assert done.returncode == 1
    while (done := trace(*again)).returncode != 0:
        assert time.monotonic() < deadline, done.stderr
    ask(server.url)


@pytest.mark.slow
def test_a_worker_whose_inbox_is_never_empty_begins_and_ends_in_time(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Steps of 100 ms, computed as their plans come, each sent before the last one is done."""
    flags = ["--device", "null", "--null-step-ms", "100", "--drain-timeout-s", "0.5"]

    def keep_busy(url: str) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):  # the server ends first
            ask(url, tokens=1000)

    runtime = tmp_path_factory.mktemp("r")  # a socket's path has at most 107 bytes
    runtime.chmod(0o700)
    path = runtime / "t.json"
    with own_server([*flags, "--runtime-dir", str(runtime), "--log-level", "warning"]) as url:
        asking = threading.Thread(target=keep_busy, args=(url,))
        asking.start()
        done = trace("--runtime-dir", str(runtime), "--seconds", "2", "-o", str(path))
    asking.join()
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(path.read_text())
    steps = [span for span in spans(found) if span["name"] == "step"]
    assert 5 < len(steps) < 50, "100 plans wait where nobody looks at other senders"


def test_the_server_at_a_url_is_found(server: Served, tmp_path: Path) -> None:
    place = server.router.removeprefix("ipc://").removesuffix("/router.sock")
    found = ["--runtime-dir", place, "--seconds", "0.1", "-o", str(tmp_path / "t.json")]
    assert trace("--url", server.url, *found).returncode == 0
    done = trace("--url", "http://127.0.0.1:1", *found)
    assert done.returncode == 2
    assert "--url http://127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr


def test_where_no_server_is_the_user_is_told_so(tmp_path: Path) -> None:
    done = trace("--runtime-dir", str(tmp_path), "-o", str(tmp_path / "t.json"))
    assert done.returncode == 2
    assert "no server" in done.stderr
    assert "Traceback" not in done.stderr


def recorded(*found: Span) -> Recording:
    identity = Identity(7, "host", "0")
    peer = Peer("worker", "ipc:///w", 1, identity, "ready", "", Capacity(), 0)
    return Recording(peer, list(found))


def test_the_share_between_steps_leaves_out_pauses_without_work() -> None:
    millisecond = 1_000_000
    steps = [(0, 9), (10, 19), (20, 29), (5029, 5038), (5039, 5048)]
    (row,) = step_shares(
        [recorded(*(Span(a * millisecond, b * millisecond, "step", DEVICE, 0) for a, b in steps))]
    )
    assert row["steps"] == 5
    assert row["step_us"] == 9000
    assert row["pause_us"] == 1000
    assert row["between_percent"] == pytest.approx(100 * 3 / 48)
    assert row["idle_s"] == 5.0


def test_times_begin_with_the_first_event_of_all_processes() -> None:
    found = chrome_trace(
        [recorded(Span(9000, 9500, "a", MAIN, 4)), recorded(Span(5000, 6000, "b", MAIN, 5))]
    )
    assert [(s["name"], s["ts"], s["dur"], s["pid"]) for s in spans(found)] == [
        ("a", 4.0, 0.5, 1),
        ("b", 0.0, 1.0, 2),
    ]


@pytest.mark.parametrize("data", [b"short", EVENT.pack(1, 2, len(NAMES), 0, 0)])
def test_bytes_that_are_no_events_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"events|name"):
        list(decoded(NAMES, data))
    assert list(decoded(NAMES, EVENT.pack(1, 2, PLAN, 0, 3))) == [Span(1, 2, "plan", 0, 3)]
