"""What the comparison of sums over GPUs says, and with which exit code it ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.loadtest.studies import all_reduce

TIMES = {
    "dtype": "bfloat16", "rows": 1, "bytes": 8192, "one_shot_us": 3.5, "nccl_us": 17.25,
    "fused_us": 4.25, "nccl_and_norm_us": 19.5,
}  # fmt: skip
FOUND: dict[str, Any] = {
    "ranks": 2, "device": "GPU", "why_not": "", "compared": 10, "wrong": 0, "from_nccl": 0.004,
    "times": [TIMES], "look_ns": 500.0, "stop_us": 300.0,
}  # fmt: skip


def run(monkeypatch: pytest.MonkeyPatch, found: dict[str, Any], *flags: str) -> int:
    monkeypatch.setattr(all_reduce, "_of_all", lambda parsed: found)
    monkeypatch.setattr(sys, "argv", ["all_reduce", *flags])
    return all_reduce.main()


def test_times_are_a_table_and_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "sums.json"
    assert run(monkeypatch, FOUND, "--json", str(path)) == 0
    assert json.loads(path.read_text()) == FOUND
    *_, names, numbers = capsys.readouterr().out.splitlines()
    assert dict(zip(names.split(), numbers.split(), strict=True)) == {
        name: str(value) for name, value in TIMES.items()
    }


@pytest.mark.parametrize(
    "changed", [{"wrong": 3}, {"why_not": "rank 1 of 2: no peer access"}], ids=["wrong", "cannot"]
)
def test_wrong_sums_and_gpus_that_cannot_reach_each_other_are_failures(
    changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, {**FOUND, **changed}) == 1
    assert str(next(iter(changed.values()))) in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.timeout(200)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_sums_over_two_gpus_are_right(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["all_reduce", "--repeats", "100"])
    assert all_reduce.main() == 0, capsys.readouterr().out
