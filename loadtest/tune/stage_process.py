"""Runs ``measured_stages`` beside this process, for a bounded time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.loadtest.tune.estimate import Given
from penstock.loadtest.tune.objective import Workload
from penstock.loadtest.tune.stage_choice import StageChoice
from penstock.loadtest.tune.step_process import ROWS, WHOLE_SHARE
from penstock.loadtest.tune.time_limit import TimeLimit
from penstock.loadtest.tune.written import written

PREFILL = {"cpu": 256, "cuda": 8192}
"""The most tokens of prompts in the step that is timed."""


def measure_stages(
    standing: Mapping[str, Any],
    stages: int,
    device: str,
    given: Given,
    workload: Workload,
    limit: TimeLimit,
    folder: Path,
) -> StageChoice | str:
    """The layers of each stage, or why they could not be measured. standing: settings by name."""
    path = folder / "stages.toml"
    path.write_text(written(standing))
    path.chmod(0o600)
    sizes = {
        "stages": stages,
        "rows": max(1, min(given.max_num_seqs, ROWS[device]) // stages),
        "prefill": min(given.max_num_batched_tokens, PREFILL[device]),
        "prompt": workload.prompt,
        "answer": workload.answer,
    }
    command = [sys.executable, "-m", "penstock.loadtest.tune.measured_stages"]
    command += ["--config", str(path)]
    for name, size in sizes.items():
        command += [f"--{name}", str(size)]
    limit.now("layers: timing those of each kind")
    seconds = min(WHOLE_SHARE * limit.seconds, limit.left)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return f"they took longer than {seconds:.0f} s; --seconds gives more"
    for line in reversed(done.stdout.splitlines()):
        try:
            return msgspec.json.decode(line, type=StageChoice)
        except msgspec.DecodeError:  # a library's
            continue
    return (done.stderr.strip().splitlines() or ["the process that times them said nothing"])[-1]
