"""``penstock bench steps`` times the executor alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.pipeline.in_process import called


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    # Which number of threads is fastest is measured for longer than the steps are.
    threads = {"PENSTOCK_THREADS": "1"} if "cpu" in arguments else {}
    return called("bench", "steps", *arguments, environment={**os.environ, **threads})


def test_a_step_takes_as_long_as_the_device_that_computes_it(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    done = bench(
        "--device", "null", "--null-step-ms", "4", "--rows", "1", "100", "--context", "50",
        "--steps", "20", "--output-json", str(path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(path.read_text())
    assert [row["rows"] for row in result["decode"]] == [1, 100]
    for row in result["decode"]:
        assert row["step_us"] >= 4000
        assert row["device_us"] == pytest.approx(row["step_us"], rel=0.5)
        assert row["tokens_per_second"] == pytest.approx(row["rows"] / row["step_us"] * 1e6)
        assert 0 <= row["between_percent"] < 50
        assert f"{row['rows']:,}" in done.stdout


@pytest.mark.slow
def test_the_built_in_model_is_timed_at_every_context() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "penstock.services", "bench", "steps", "--device", "cpu"),
            *("--rows", "2", "--context", "30", "300", "--prefill-len", "0", "200", "--steps", "5"),
            *("--max-num-batched-tokens", "202", "--threads", "1"),
        ],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    rows = [line for line in lines if line[:1] == ["2"] and line[2] == "0"]
    assert [line[1] for line in rows] == ["30", "300"]
    assert all(float(line[3].replace(",", "")) > 0 for line in rows)


def test_layers_with_windows_have_blocks_of_their_own(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
        "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 512,
        "max_position_embeddings": 512, "sliding_window": 64, "query_pre_attn_scalar": 16,
    }  # fmt: skip
    named = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
    (tmp_path / "config.json").write_text(json.dumps({**named, **sizes}))
    done = bench(
        str(tmp_path), "--device", "cpu", "--load-format", "dummy", "--rows", "2", "--context",
        "100", "--prefill-len", "70", "--steps", "3",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].split()[:3] == ["2", "100", "70"]


@pytest.mark.slow
def test_prompts_beside_the_rows_make_a_step_longer(tmp_path: Path) -> None:
    """The built-in model's, which is timed in a process of its own in the long run. One of three
    tries: others take the processors away from either."""
    path = tmp_path / "s.json"
    times: list[float] = []
    while len(times) < 3 and (not times or times[-1] <= 3):
        done = bench(
            "--device", "cpu", "--rows", "2", "--context", "30", "--prefill-len", "0", "100",
            "--steps", "9", "--max-num-batched-tokens", "102", "--output-json", str(path),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        alone, beside = json.loads(path.read_text())["decode"]
        assert (alone["prefill"], beside["prefill"]) == (0, 100)
        times.append(beside["step_us"] / alone["step_us"])
    assert times[-1] > 3, times


def test_what_does_not_fit_has_a_reason_instead_of_figures() -> None:
    done = bench("--device", "null", "--rows", "1", "--context", "2000", "--steps", "30")
    assert done.returncode == 0, done.stderr
    assert "2110 positions; max_model_len is 2048" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--temperature", "-1"), 2, "--temperature -1.0: at least 0"),
        (("--rows", "0"), 2, "--rows"),
        (("--model", "/nothing/here"), 3, "/nothing/here"),
    ],
)
def test_wrong_flags_are_named(arguments: tuple[str, ...], code: int, words: str) -> None:
    done = called("bench", "steps", "--device", "null", *arguments)
    assert done.returncode == code
    assert words in done.stderr
