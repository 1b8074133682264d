"""The interpreter in which tests run kernels does what Triton's own does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_the_lean_interpreter_computes_and_refuses_the_same_with_fewer_calls() -> None:
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    done = subprocess.run(
        [sys.executable, str(TESTS / "support/kernels/lean_and_plain.py")],
        capture_output=True, text=True, timeout=100, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    plain, lean = json.loads(done.stdout)
    assert lean["results"] == plain["results"]
    assert lean["refusal"] == plain["refusal"] != ""
    assert lean["calls"] < 0.4 * plain["calls"]
