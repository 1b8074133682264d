"""Random load on a server, until its engine has made so many steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from penstock.loadtest.make_model import make_model


def test_random_load_ends_after_so_many_steps_and_every_request_is_answered(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "tiny")
    command = [sys.executable, "-m", "penstock.loadtest.random_load", str(folder)]
    sizes = ["--steps", "100", "--clients", "6", "--longest", "64", "--limit", "90"]
    flags = ["--device", "null", "--null-step-ms", "1"]
    found = subprocess.run(
        [*command, *sizes, "--", *flags], capture_output=True, text=True, timeout=110
    )
    assert found.returncode == 0, found.stderr + found.stdout
    told = json.loads(found.stdout)
    assert told["steps"] >= 100
    assert told["requests"] > 0
    assert told["failed_steps"] == 0
    assert told["failures"] == []


def test_random_load_that_takes_too_long_says_so(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "tiny")
    command = [sys.executable, "-m", "penstock.loadtest.random_load", str(folder)]
    sizes = ["--steps", "1000000", "--clients", "1", "--longest", "8", "--limit", "1"]
    found = subprocess.run(
        [*command, *sizes, "--", "--device", "null"], capture_output=True, text=True, timeout=110
    )
    assert found.returncode == 1
    assert "after 1 s" in json.loads(found.stdout)["failures"][-1]
