"""``penstock bench serve`` against ``penstock serve`` with a device of known step time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from served import NULL, SharedServers

from penstock.loadtest import bench_serve

STEP_MS = float(NULL[-1])


@pytest.fixture(scope="module")
def url(shared_server: SharedServers) -> str:
    return shared_server(*NULL).url


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_every_token_of_our_server_is_counted_and_takes_a_step(
    url: str, endpoint: str, tmp_path: Path
) -> None:
    path = tmp_path / "r.json"
    code = bench_serve.main(
        [
            "--base-url", url, "--endpoint", endpoint, "--num-prompts", "24", "--ignore-eos",
            "--max-concurrency", "8", "--random-input-len", "32", "--random-output-len", "30",
            "--save-result", str(path), "--quiet",
        ]
    )  # fmt: skip
    assert code == 0
    result: dict[str, Any] = json.loads(path.read_text())
    assert result["completed"] == 24
    assert result["total_output_tokens"] == 24 * 30
    if endpoint == "/v1/completions":
        assert result["total_input_tokens"] == 24 * 32
    assert result["token_counts"]["without_usage"] == 0
    # A busy machine makes steps longer, never shorter.
    assert 0.95 * STEP_MS < result["median_tpot_ms"] < 5 * STEP_MS
    assert 0.95 * STEP_MS < result["median_itl_ms"] < 5 * STEP_MS
    assert result["environment"]["server_version"]
