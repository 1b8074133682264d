"""``penstock bench throughput`` and ``latency``, and the requests that they make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.pipeline.in_process import called

from penstock.loadtest.offline.offline_requests import OfflineRequests, draw_requests, moved


def saved(command: str, path: Path, *flags: str) -> dict[str, Any]:
    done = called("bench", command, "--device", "null", "--output-json", str(path), *flags)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_the_draws_are_those_of_the_published_workload() -> None:
    """256 requests of 100 to 1,024 in and out, seed 0: totals as nano-vllm publishes them."""
    made = draw_requests(256, (100, 1024), (100, 1024), 0)
    assert sum(map(len, made.prompts)) == 142_827
    assert sum(made.output_lens) == 133_966
    assert max(made.output_lens) == 1024
    assert made == draw_requests(256, (100, 1024), (100, 1024), 0)
    assert max(map(max, made.prompts)) <= 10_000


def test_moved_prompts_keep_their_lengths_and_share_no_beginning() -> None:
    prompts = draw_requests(20, (5, 50), (1, 1), 0).prompts
    first, second = moved(prompts, 1, 300), moved(prompts, 2, 300)
    assert [len(p) for p in first] == [len(p) for p in second] == [len(p) for p in prompts]
    assert all(a[0] != b[0] for a, b in zip(first, second, strict=True))
    assert all(0 <= token < 300 for prompt in first + second for token in prompt)


def test_a_common_prefix_stands_before_prompts_that_stay_as_they_are() -> None:
    plain = draw_requests(20, (5, 50), (1, 9), 3)
    common = draw_requests(20, (5, 50), (1, 9), 3, prefix=100)
    beginnings = {tuple(prompt[:100]) for prompt in common.prompts}
    assert len(beginnings) == 1
    assert [prompt[100:] for prompt in common.prompts] == plain.prompts
    assert common.output_lens == plain.output_lens


@pytest.fixture(scope="module")
def throughput(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of eight requests, two at a time."""
    return saved(
        "throughput", tmp_path_factory.mktemp("bench") / "t.json", "--num-prompts", "8",
        "--input-len", "5:40", "--output-len", "3:30", "--seed", "5", "--prefix-len", "7",
        "--runs", "3", "--secret", "s" * 20, "--null-step-ms", "10", "--max-concurrency", "2",
    )  # fmt: skip


@pytest.fixture(scope="module")
def drawn() -> OfflineRequests:
    return draw_requests(8, (5, 40), (3, 30), 5, 7)


def test_throughput_counts_exactly_what_was_drawn(
    throughput: dict[str, Any], drawn: OfflineRequests
) -> None:
    result = throughput
    assert result["total_input_tokens"] == sum(map(len, drawn.prompts))
    assert result["total_output_tokens"] == sum(drawn.output_lens)
    assert result["elapsed_time"] == sorted(result["elapsed_times"])[1]
    rate = result["total_output_tokens"] / result["elapsed_time"]
    assert result["output_tokens_per_second"] == pytest.approx(rate)
    assert result["settings"]["device"] == "null"
    assert "s" * 20 not in json.dumps(result)


def test_throughput_with_few_requests_open_takes_as_many_rounds(
    throughput: dict[str, Any], drawn: OfflineRequests
) -> None:
    """A null step takes 10 ms: two at a time are at least as many steps as half of their tokens."""
    least = 0.010 * sum(drawn.output_lens) / 2
    assert least > 2 * 0.010 * max(drawn.output_lens), "all at once would be quicker by far"
    assert least <= throughput["elapsed_time"] < 20 * least


def test_latency_is_the_time_of_the_steps(tmp_path: Path) -> None:
    """A null step takes 10 ms: 20 tokens are 20 of them whatever the batch, and one is one."""
    result = saved(
        "latency", tmp_path / "l.json", "--null-step-ms", "10", "--batch-size", "1", "4",
        "--input-len", "8", "--output-len", "20", "--num-iters", "3",
    )  # fmt: skip
    assert [batch["batch_size"] for batch in result["batches"]] == [1, 4]
    for batch in result["batches"]:
        assert len(batch["latencies"]) == 3
        # A busy machine makes steps longer, never shorter.
        assert 8 < batch["ms_per_step"] < 300
        assert 0.19 < batch["median_latency"] < 6
    alone, together = (batch["median_latency"] for batch in result["batches"])
    assert together < 3 * alone


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["throughput", "--input-len", "9:3"], "9:3"),
        (["throughput", "--num-prompts", "1", "--input-len", "5000"], "--max-model-len"),
        (["latency", "--batch-size", "0"], "--batch-size"),
        (["latency", "--max-num-seqs", "0"], "--max-num-seqs"),
        (["latency", "/no/such/folder"], "/no/such/folder"),
    ],
)
def test_wrong_flags_are_named_before_anything_starts(arguments: list[str], words: str) -> None:
    done = called("bench", *arguments)
    assert done.returncode in (2, 3)
    assert words in done.stderr
    assert "Traceback" not in done.stderr
