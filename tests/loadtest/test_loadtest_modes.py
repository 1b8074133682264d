"""Each kind of load of ``bench serve`` against ``penstock serve`` with steps of a known length."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from support.loadtest.mock_server import in_some_moment, mock_server, seen
from support.pipeline.served import NULL, SharedServers

from penstock.loadtest.client import bench_serve, client_processes
from penstock.loadtest.client.serve_options import parse

# The server is shared with other files, whose prompts it remembers: where prefix hits count, a seed
# of its own makes others.
SMALL = ["--quiet", "--ignore-eos", "--random-input-len", "32", "--random-output-len", "10"]


@pytest.fixture(scope="module")
def url(shared_server: SharedServers) -> str:
    return shared_server(*NULL).url


@pytest.fixture
def run(url: str, tmp_path: Path) -> Any:
    """Run it in this process; returns the JSON that it saved."""

    def once(*flags: str, server: str = url) -> dict[str, Any]:
        path = tmp_path / "result.json"
        arguments = [*SMALL, "--save-detailed", "--save-result", str(path), *flags]
        assert bench_serve.main(["--base-url", server, *arguments]) == 0
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    return once


def intended(found: dict[str, Any]) -> list[float]:
    """When each request was to be sent; a busy machine is late with some."""
    times = zip(found["start_times"], found["queue_delays"], strict=True)
    return [start - delay for start, delay in times]


def test_a_sweep_over_concurrency_is_a_run_for_each_level(
    run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run("--num-prompts", "16", "--sweep-concurrency", "1", "8", "--seed", "71")
    one, eight = found["runs"]
    assert (one["max_concurrency"], eight["max_concurrency"]) == (1, 8)
    assert (one["max_concurrent_requests"], eight["max_concurrent_requests"]) == (1, 8)
    assert one["completed"] == eight["completed"] == 16
    assert eight["output_throughput"] > 2 * one["output_throughput"]
    assert one["prefix_hit_share"] == eight["prefix_hit_share"] == 0  # each has its own prompts
    table = capsys.readouterr().out.strip().splitlines()
    assert any("1 at a time" in line for line in table)
    assert any(line.startswith("server") and "tokens/s" in line for line in table)


def test_a_sweep_over_rates_is_a_run_for_each_level(run: Any) -> None:
    slow, fast = run("--num-prompts", "10", "--sweep-rate", "10", "40")["runs"]
    assert (slow["request_rate"], fast["request_rate"]) == (10, 40)
    assert intended(slow)[-1] == pytest.approx(1.0)
    assert intended(fast)[-1] == pytest.approx(0.25)


def test_a_ramp_sends_more_and_more(run: Any) -> None:
    found = run(
        "--num-prompts", "44", "--burstiness", "100", "--ramp-up-strategy", "linear",
        "--ramp-up-start-rps", "4", "--ramp-up-end-rps", "40",
    )  # fmt: skip
    assert found["completed"] == 44
    assert found["ramp_up_strategy"] == "linear"
    starts = intended(found)
    assert starts[-1] == pytest.approx(2.0)
    # A quarter of the requests has come after half of the time, and a little more.
    assert sum(start < 1.0 for start in starts) == pytest.approx(13, abs=3)


def test_bursts_come_at_once_and_are_queued(run: Any) -> None:
    found = run("--num-prompts", "24", "--burst-size", "8", "--burst-interval", "0.7")
    assert intended(found) == pytest.approx([0.0] * 8 + [0.7] * 8 + [1.4] * 8)
    assert min(found["queue_delays"]) >= 0
    assert found["burst_size"] == 8


@pytest.mark.parametrize(
    ("prompt", "endpoint", "words"),
    [
        ({"messages": [{"role": "user", "content": "hi"}]}, "completions", "messages need"),
        ({"prompt": [1, 2]}, "chat/completions", "prompts of token ids need"),
        ({"prompt": []}, "chat/completions", "line 2: an empty prompt"),
    ],
)
def test_a_trace_with_a_prompt_that_the_endpoint_does_not_take_is_refused_before_the_load(
    prompt: dict[str, Any], endpoint: str, words: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 0, "prompt": "one"}, {"timestamp": 50, **prompt}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with mock_server() as url:
        flags = ["--base-url", url, "--model", "plain", "--endpoint", f"/v1/{endpoint}", "--quiet"]
        flags += ["--dataset-name", "trace", "--dataset-path", str(path), "--num-warmups", "0"]
        assert bench_serve.main(flags) == 2
        assert words in capsys.readouterr().err
        assert seen(url)["seen"] == []


def test_a_trace_is_replayed_at_its_times_with_its_shared_blocks(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 800 * n, "input_length": 200 + n, "output_length": 4 + n,
         "hash_ids": [1, 2, 3, 10 + n]}
        for n in range(5)
    ]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, lines)))
    found = run(
        "--dataset-name", "trace", "--dataset-path", str(path), "--trace-speed", "2",
        "--trace-block-size", "64", "--seed", "72",
    )  # fmt: skip
    assert found["input_lens"] == [200, 201, 202, 203, 204]
    assert found["output_lens"] == [4, 5, 6, 7, 8]
    assert intended(found) == pytest.approx([0.4 * n for n in range(5)])
    # The first three blocks of 64 are in the prefix cache from the second request on.
    assert found["total_cached_tokens"] == 4 * 192


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
def test_conversations_go_on_from_what_was_answered(run: Any, endpoint: str) -> None:
    found = run(
        "--endpoint", endpoint, "--dataset-name", "conversation", "--num-prompts", "4",
        "--turns", "3", "--random-prefix-len", "48", "--think-time", "0.05", "--seed", "75",
    )  # fmt: skip
    assert (found["num_sessions"], found["num_prompts"], found["completed"]) == (4, 12, 12)
    assert found["turns"] == [0, 1, 2] * 4
    lengths = [found["input_lens"][n : n + 3] for n in range(0, 12, 3)]
    for first, second, third in lengths:
        assert first < second < third
        if endpoint == "/v1/completions":
            assert (first, second, third) == (80, 122, 164)
    for number in range(0, 12, 3):
        for turn in (number, number + 1):
            intended = found["start_times"][turn] - found["queue_delays"][turn]
            ended = intended + found["e2els"][turn]
            assert found["start_times"][turn + 1] >= ended + 0.05
    assert found["prefix_hit_share"] > 0.4


def test_prompts_may_share_one_of_several_prefixes(run: Any) -> None:
    found = run(
        "--num-prompts", "12", "--max-concurrency", "1", "--random-prefix-len", "64",
        "--random-prefix-count", "3", "--seed", "73",
    )  # fmt: skip
    assert found["total_cached_tokens"] == 9 * 64  # all but the first of each prefix


def test_agent_sessions_have_the_prefix_hits_and_the_ratio_that_they_are_to_have(run: Any) -> None:
    found = run(
        "--dataset-name", "agent", "--num-prompts", "3", "--random-output-len", "8",
        "--seed", "74",
    )  # fmt: skip
    assert (found["num_sessions"], found["completed"]) == (3, 99)
    assert max(found["turns"]) == 32
    ratio = found["total_input_tokens"] / found["total_output_tokens"]
    assert ratio == pytest.approx(131, rel=0.005)
    # Whole blocks of 16 tokens are cached: half a block of each prompt is not.
    assert found["prefix_hit_share"] == pytest.approx(0.94 - 8 / 1048, abs=0.006)


def test_several_client_processes_measure_one_run(run: Any) -> None:
    def check() -> None:
        found = run("--num-prompts", "40", "--max-concurrency", "8", "--client-processes", "2")
        assert found["client"]["processes"] == 2
        assert (found["completed"], found["total_output_tokens"]) == (40, 400)
        assert found["max_concurrent_requests"] == 8
        assert found["median_itl_ms"] > 0.9 * float(NULL[-1])

    in_some_moment(check)


def test_servers_get_the_same_load_in_turn(run: Any, url: str, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    other = url.replace("127.0.0.1", "localhost")
    flags = [*SMALL, "--num-prompts", "6", "--sweep-concurrency", "1", "3", "--report", str(page)]
    path = tmp_path / "r.json"
    code = bench_serve.main(["--base-url", url, other, *flags, "--save-result", str(path)])
    assert code == 0
    runs = json.loads(path.read_text())["runs"]
    assert [run["base_url"] for run in runs] == [url, other, url, other]
    assert [run["max_concurrency"] for run in runs] == [1, 1, 3, 3]
    text = page.read_text()
    assert "<h2>Comparison</h2>" in text
    assert all(f'data-value="{run["output_throughput"]!r}"' in text for run in runs)


def test_client_processes_that_were_started_end_where_another_one_cannot_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    children: list[asyncio.subprocess.Process] = []

    async def started(part: client_processes.Part) -> asyncio.subprocess.Process:
        if children:
            raise BlockingIOError("no more processes")
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec("sleep", "60", stdin=pipe, stdout=pipe)
        children.append(child)
        return child

    monkeypatch.setattr(client_processes, "_started", started)
    options = parse(["--base-url", "http://127.0.0.1:1", "--client-processes", "2"])
    with pytest.raises(BlockingIOError):
        asyncio.run(client_processes.run_in_processes(options, {}, "m", None))
    assert children[0].returncode == -signal.SIGKILL
