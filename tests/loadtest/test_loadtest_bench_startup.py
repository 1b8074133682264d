"""``penstock bench startup``: real starts, and the phases read from what the server prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from penstock.loadtest.offline.bench_startup import Phase, add_phase

SAID = (
    ("launcher", "penstock 0.1.0 starts 5 processes for /m"),
    ("router", "ready"),
    ("worker 0", "importing torch"),
    ("", "something else"),
    ("worker 0", "reading weights 3%: 2.1 GB/s"),
    ("worker 0", "reading weights 40%: 2.2 GB/s"),
    ("worker 0", "taking KV memory for 8192 blocks"),
    ("worker 0", "ready (17.8 MB of weights in 0.1 s, 353.1 MB/s)"),
)
LINES = [
    json.dumps({"event": event, "service": "launcher", "process": process}) + "\n"
    for process, event in SAID
]


def test_a_phase_lasts_until_its_process_begins_the_next_one() -> None:
    phases: list[Phase] = []
    for now, line in enumerate(LINES):
        add_phase(phases, line, float(now))
    assert phases == [
        Phase("router", "start", 0.0, 1.0),
        Phase("worker 0", "start", 0.0, 2.0),
        Phase("worker 0", "importing torch", 2.0, 2.0),
        Phase("worker 0", "reading weights", 4.0, 2.0),
        Phase("worker 0", "taking KV memory", 6.0, 1.0),
    ]


def test_each_start_is_timed_from_the_command_to_the_first_token(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    done = subprocess.run(
        [
            sys.executable, "-m", "penstock.services", "bench", "startup", "--device", "null",
            "--null-step-ms", "30", "--runs", "1", "--output-json", str(path),
        ],
        capture_output=True,
        text=True,
        timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(path.read_text())
    assert [start["cache"] for start in result["starts"]] == ["cold", "warm"]
    for start in result["starts"]:
        assert start["ready"] + 0.03 < start["first_token"]
        assert all(phase["began"] < start["ready"] for phase in start["phases"])
        processes = {phase["process"] for phase in start["phases"]}
        assert processes == {"router", "tokenizer 0", "scheduler 0", "worker 0", "frontend 0"}
    assert result["cold"]["first_token_seconds"] == result["starts"][0]["first_token"]
    assert "first token" in done.stdout


def test_what_a_server_says_that_cannot_start_is_passed_on() -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "penstock.services", "bench", "startup", "--device", "null",
            "--max-model-len", "100000", "--runs", "1",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert "--max-model-len 100000" in done.stderr
    assert "Traceback" not in done.stderr
