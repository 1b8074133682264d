"""``penstock bench prefill``: what it counts, with the null device and with a real model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.pipeline.in_process import called

from penstock.loadtest.models.make_model import make_model

SHAPE = {
    "hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
    "intermediate_size": 128, "vocab_size": 512,
}  # fmt: skip
LAYER = 128 * 64 + 64 * 64 + 3 * 64 * 128
"""Numbers in the weights of one layer: QKV and output, gate, up and down."""


def bench(path: Path, *arguments: str) -> dict[str, Any]:
    threads = {"PENSTOCK_THREADS": "1"} if "cpu" in arguments else {}
    done = called(
        "bench", "prefill", *arguments, "--output-json", str(path),
        environment={**os.environ, **threads},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_computed_tokens_are_those_that_no_cache_holds(tmp_path: Path) -> None:
    result = bench(
        tmp_path / "p.json", "--device", "null", "--input-len", "64", "300", "--cached-prefix",
        "256", "--suffix-len", "40", "--batch-tokens", "200", "--runs", "3",
    )  # fmt: skip
    assert result["limits"] is None
    rows = result["prompts"]
    assert [row["input_len"] for row in rows] == [64, 300, 296]
    assert [row["num_prompts"] for row in rows] == [3, 1, 5]
    assert [row["cached_len"] for row in rows] == [0, 0, 256]
    assert [row["computed_tokens"] for row in rows] == [192, 300, 200]
    for row in rows:
        assert len(row["seconds"]) == 3
        rate = row["computed_tokens"] / sorted(row["seconds"])[1]
        assert row["tokens_per_second"] == pytest.approx(rate)


@pytest.mark.slow
def test_rates_stand_beside_the_floor_of_the_model(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", **SHAPE)
    result = bench(
        tmp_path / "p.json", str(model), "--device", "cpu", "--input-len", "100",
        "--cached-prefix", "64", "--suffix-len", "20", "--batch-tokens", "100", "--runs", "1",
        "--max-num-batched-tokens", "60", "--max-num-seqs", "8",
        "--bandwidth-gb", "0.01", "--peak-tflops", "0.001",
    )  # fmt: skip
    assert result["dtype"] == "float32"
    plain, cached = result["prompts"]
    products = 2 * (100 * 2 * LAYER + 512 * 64)
    assert plain["flops"] == products + 2 * 4 * 4 * 16 * sum(range(1, 101))
    assert plain["tflops"] == pytest.approx(plain["flops"] / plain["seconds"][0] / 1e12)
    assert plain["peak_share"] == pytest.approx(plain["tflops"] / 0.001)
    weights = 4 * (2 * LAYER + 512 * 64)
    two_steps = 2 * weights / 0.01e9
    assert plain["floor_seconds"] == pytest.approx(max(two_steps, plain["flops"] / 1e9))
    assert cached["cached_len"] == 64
    attention = 5 * 2 * 4 * 4 * 16 * sum(range(65, 85))
    assert cached["flops"] == 2 * (100 * 2 * LAYER + 5 * 512 * 64) + attention


def test_a_length_that_the_model_does_not_allow_is_named() -> None:
    done = called("bench", "prefill", "--device", "null", "--input-len", "4000")
    assert done.returncode == 2
    assert "4001" in done.stderr
    assert "Traceback" not in done.stderr
