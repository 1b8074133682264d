"""``penstock bench serve`` against a mock server whose delays are known."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.loadtest.mock_server import SMALL, in_some_moment, mock_server, seen

from penstock.loadtest.client import bench_serve
from penstock.loadtest.evaluation import eval as evaluation

TTFT_MS, ITL_MS = 80.0, 20.0
ENDED_SECONDS = 1.0
"""A client has dealt with an answer of no length by then, which nobody else can see."""


@pytest.fixture(scope="module")
def slow() -> Iterator[str]:
    with mock_server("--ttft-ms", str(TTFT_MS), "--itl-ms", str(ITL_MS)) as url:
        yield url


@pytest.fixture(scope="module")
def fast() -> Iterator[str]:
    with mock_server() as url:
        yield url


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """Run it in this process; returns (exit code, the JSON that it saved)."""

    def once(url: str, model: str, *flags: str) -> tuple[int, dict[str, Any]]:
        path = tmp_path / "result.json"
        arguments = ["--base-url", url, "--model", model, *SMALL, "--save-result", str(path)]
        code = bench_serve.main([*arguments, "--save-detailed", *flags])
        return code, json.loads(path.read_text())

    return once


def test_the_latencies_are_the_delays_that_the_server_was_set_to(slow: str, run: Any) -> None:
    def check() -> None:
        code, result = run(
            *(slow, "plain", "--num-prompts", "24", "--max-concurrency", "8"),
            *("--random-output-len", "11"),
        )
        assert code == 0
        total_ms = TTFT_MS + 10 * ITL_MS
        assert TTFT_MS - 1 < result["median_ttft_ms"] < 2 * TTFT_MS
        assert ITL_MS - 1 < result["median_itl_ms"] < 2 * ITL_MS
        assert ITL_MS - 1 < result["mean_tpot_ms"] < 2 * ITL_MS
        assert total_ms - 5 < result["median_e2el_ms"] < 2 * total_ms
        rate = 8 / (total_ms / 1000)
        assert rate / 2 < result["request_throughput"] < 1.02 * rate
        assert result["output_throughput"] == pytest.approx(11 * result["request_throughput"])
        assert result["max_concurrent_requests"] == 8

    in_some_moment(check)


def test_every_request_agrees_with_the_times_that_the_server_wrote_down(
    slow: str, run: Any
) -> None:
    def check() -> None:
        seen(slow)
        _, result = run(
            *(slow, "plain", "--num-prompts", "12", "--max-concurrency", "1"),
            *("--random-output-len", "4"),
        )
        ttft_off, gap_off = [], []
        for n, record in enumerate(seen(slow)["seen"]):
            ttft_off.append(result["ttfts"][n] - (record["sent"][0] - record["arrived"]))
            own = [b - a for a, b in zip(record["sent"], record["sent"][1:], strict=False)]
            gap_off += [abs(a - b) for a, b in zip(result["itls"][n], own, strict=True)]
        assert min(ttft_off) > -0.0005  # never earlier than the server sent it
        # What is wrong is so for all of them; others hold up many, but not as many as that.
        assert statistics.quantiles(ttft_off, n=4)[0] < 0.005
        assert statistics.quantiles(gap_off, n=4)[0] < 0.002

    in_some_moment(check)


def test_an_early_chunk_with_only_the_role_is_no_first_token(slow: str, run: Any) -> None:
    _, result = run(
        slow, "early-role", "--endpoint", "/v1/chat/completions",
        "--num-prompts", "4", "--random-output-len", "3",
    )  # fmt: skip
    assert min(result["ttfts"]) > TTFT_MS / 1e3 - 0.001
    assert [len(gaps) for gaps in result["itls"]] == [2, 2, 2, 2]


def test_tokens_are_those_of_usage_and_a_difference_to_the_chunks_is_noted(
    fast: str, run: Any
) -> None:
    _, result = run(fast, "pairs", "--num-prompts", "4", "--random-output-len", "10")
    assert result["total_output_tokens"] == 40
    assert result["token_counts"]["chunks"] == 20
    assert any("20 chunks, 40 tokens" in note for note in result["notes"])


def test_chunks_are_counted_and_noted_where_the_server_sends_no_usage(fast: str, run: Any) -> None:
    _, result = run(fast, "no-usage", "--num-prompts", "4", "--random-output-len", "10")
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (32, 40)
    assert any("4 answers had no usage" in note for note in result["notes"])


@pytest.mark.parametrize("model", ["plain", "continuous-usage", "empty-text", "closing"])
def test_other_ways_to_stream_give_the_same_counts(fast: str, run: Any, model: str) -> None:
    code, result = run(fast, model, "--num-prompts", "5", "--random-output-len", "10")
    assert code == 0
    assert (result["completed"], result["total_output_tokens"]) == (5, 50)
    assert result["total_input_tokens"] == 40


def test_an_answer_without_visible_text_still_has_a_first_token(slow: str, run: Any) -> None:
    code, result = run(slow, "no-text", "--num-prompts", "2", "--random-output-len", "1")
    assert code == 0
    assert min(result["ttfts"]) > TTFT_MS / 1e3 - 0.001


@pytest.mark.parametrize(
    ("model", "kind", "words"),
    [
        ("busy", "http 429", "no more of request"),
        ("error-event", "error event", "the engine is gone"),
        ("truncated", "truncated", "without finish_reason"),
        ("dropped", "connection lost", "closed before the end"),
        ("hanging", "timeout", "--request-timeout"),
        ("silent", "timeout", "--request-timeout"),
        ("not-a-stream", "no stream", "application/json"),
        ("garbage", "malformed", "not json"),
        ("bad-framing", "malformed", "SMTP"),
    ],
)
def test_a_failure_is_counted_by_its_kind_and_shown_and_fails_the_command(
    fast: str, run: Any, capsys: pytest.CaptureFixture[str], model: str, kind: str, words: str
) -> None:
    # Short only where the limit is what is looked for: a busy machine is late with any answer.
    limit = "0.5" if kind == "timeout" else "30"
    code, result = run(fast, model, "--num-prompts", "8", "--request-timeout", limit)
    assert code == 1
    assert (result["completed"], result["failed"]) == (0, 8)
    assert list(result["error_kinds"]) == [kind]
    found = result["error_kinds"][kind]
    assert found["count"] == 8
    assert 1 <= len(found["examples"]) <= 3
    assert words in found["examples"][0]
    assert f"failed, {kind}: 8" in capsys.readouterr().out


def test_failed_requests_are_in_no_figure_but_their_own(fast: str, run: Any) -> None:
    code, result = run(
        fast, "every-third", "--num-prompts", "9", "--max-concurrency", "1",
        "--random-output-len", "5",
    )  # fmt: skip
    assert code == 1
    assert (result["completed"], result["failed"]) == (6, 3)
    assert result["total_output_tokens"] == 30
    assert sum(error != "" for error in result["errors"]) == 3
    assert result["ttfts"].count(0.0) == 3


def test_connections_are_used_again(fast: str, run: Any) -> None:
    before = seen(fast)["connections"]
    run(fast, "plain", "--num-prompts", "30", "--max-concurrency", "3")
    assert seen(fast)["connections"] - before <= 4


def test_the_body_carries_what_the_flags_say(fast: str, run: Any) -> None:
    seen(fast)
    run(
        fast, "plain", "--num-prompts", "1", "--random-output-len", "3", "--ignore-eos",
        "--temperature", "0.6", "--top-k", "5", "--extra-body", '{"min_tokens": 2, "stream": null}',
        "--header", "X-Team=a b", "--api-key", "sk-1",
    )  # fmt: skip
    record = seen(fast)["seen"][0]
    body = record["body"]
    prompt = body.pop("prompt")
    assert len(prompt) == 8
    assert all(0 <= token < 256 for token in prompt)
    assert body == {
        "model": "plain", "max_tokens": 3, "ignore_eos": True, "temperature": 0.6, "top_k": 5,
        "min_tokens": 2, "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert record["headers"]["X-Team"] == "a b"
    assert record["headers"]["Authorization"] == "Bearer sk-1"


def test_a_chat_gets_words(fast: str, run: Any) -> None:
    seen(fast)
    run(fast, "plain", "--endpoint", "/v1/chat/completions", "--num-prompts", "1")
    body = seen(fast)["seen"][0]["body"]
    (message,) = body["messages"]
    assert message["role"] == "user"
    assert len(message["content"].split()) == 8
    assert body["max_completion_tokens"] == 128


def test_requests_arrive_at_the_planned_times(fast: str, run: Any) -> None:
    from penstock.loadtest.client.arrivals import arrival_times

    planned = arrival_times(50, 50.0, 1.0, 7)

    def check() -> None:
        seen(fast)
        _, result = run(
            *(fast, "plain", "--num-prompts", "50", "--request-rate", "50", "--seed", "7"),
            *("--random-output-len", "1"),
        )
        late = [a - b for a, b in zip(result["start_times"], planned, strict=True)]
        assert min(late) >= 0.0
        punctual, *_ = statistics.quantiles(late, n=4)  # a busy machine is late with some
        assert punctual < 0.005
        arrived = [record["arrived"] for record in seen(fast)["seen"]]
        assert arrived[-1] - arrived[0] == pytest.approx(planned[-1] - planned[0], abs=0.2)

    in_some_moment(check)


def test_waiting_in_the_client_counts_as_latency_unless_asked_otherwise(
    slow: str, run: Any
) -> None:
    """Arrivals twice as fast as two at a time can be served: coordinated omission."""

    def check() -> None:
        flags = (
            *(slow, "plain", "--num-prompts", "30", "--request-rate", "50"),
            *("--max-concurrency", "2", "--random-output-len", "1"),
        )
        _, result = run(*flags)
        waited = result["median_queue_ms"]
        assert result["p99_queue_ms"] > 400
        assert result["median_ttft_ms"] == pytest.approx(waited + TTFT_MS, rel=0.2)
        assert any("which TTFT and E2EL include" in note for note in result["notes"])
        _, result = run(*flags, "--latency-from", "sent")
        assert TTFT_MS - 1 < result["median_ttft_ms"] < 2 * TTFT_MS
        assert result["p99_queue_ms"] > 400
        assert any("counted from then" in note for note in result["notes"])

    in_some_moment(check)


def test_goodput_counts_requests_within_the_limits(slow: str, run: Any) -> None:
    flags = ["--num-prompts", "10", "--random-output-len", "3"]
    _, result = run(slow, "plain", *flags, "--goodput", "ttft:60000", "tpot:60000")
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    _, result = run(slow, "plain", *flags, "--goodput", "ttft:1", "tpot:60000")
    assert result["request_goodput"] == 0.0
    _, result = run(slow, "plain", *flags)
    assert result["request_goodput"] is None


def test_the_keys_are_those_of_vllms_tool(fast: str, run: Any) -> None:
    _, result = run(
        fast, "plain", "--num-prompts", "3", "--metadata", "gpu=none", "tp=1",
        "--metric-percentiles", "25,99.9",
    )  # fmt: skip
    names = {
        "date", "backend", "model_id", "num_prompts", "request_rate", "burstiness",
        "max_concurrency", "duration", "completed", "failed", "total_input_tokens",
        "total_output_tokens", "request_throughput", "request_goodput", "output_throughput",
        "total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests",
        "input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors", "start_times",
    }  # fmt: skip
    names |= {
        f"{statistic}_{metric}_ms"
        for statistic in ("mean", "median", "std", "p25", "p99.9")
        for metric in ("ttft", "tpot", "itl", "e2el")
    }
    assert names <= result.keys()
    assert (result["gpu"], result["tp"], result["request_rate"]) == ("none", "1", "inf")
    assert result["generated_texts"][0].startswith("w0 w1 w2 ")


def test_the_environment_is_recorded_and_the_key_is_not(fast: str, run: Any) -> None:
    _, result = run(fast, "plain", "--num-prompts", "1", "--api-key", "sk-1", "--header", "A=sk-2")
    assert "aiohttp" in result["environment"]["server"]
    assert "--num-prompts 1" in result["environment"]["command"]
    assert result["client"]["usable_cores"] >= 1
    assert "sk-" not in json.dumps(result)


def test_the_key_comes_from_the_environment_and_a_missing_one_is_said(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with mock_server("--key", "sk-9") as url:
        assert bench_serve.main(["--base-url", url, *SMALL]) == 1
        assert "PENSTOCK_API_KEY" in capsys.readouterr().err
        monkeypatch.setenv("OPENAI_API_KEY", "sk-9")
        for variable, value, code in (
            ("OPENAI_BASE_URL", "http://127.0.0.1:9/v1", 1),  # another server's key
            ("OPENAI_BASE_URL", url + "/v1", 0),
            ("PENSTOCK_API_KEY", "sk-9", 0),
        ):
            with monkeypatch.context() as patch:
                patch.setenv(variable, value)
                flags = ["--base-url", url, "--model", "plain", "--num-prompts", "2", *SMALL]
                assert bench_serve.main(flags) == code


def test_the_first_model_is_taken_when_none_is_named(fast: str) -> None:
    seen(fast)
    assert bench_serve.main(["--base-url", fast + "/v1", "--num-prompts", "1", *SMALL]) == 0
    assert seen(fast)["seen"][0]["body"]["model"] == "plain"


def test_warm_up_requests_are_other_prompts_and_not_measured(fast: str, run: Any) -> None:
    seen(fast)
    _, result = run(fast, "plain", "--num-prompts", "4", "--warmup-requests", "2")
    assert result["completed"] == 4
    prompts = [tuple(record["body"]["prompt"]) for record in seen(fast)["seen"]]
    assert len(set(prompts)) == len(prompts) == 6


def test_a_failing_warm_up_ends_the_run(fast: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--base-url", fast, "--model", "busy", "--random-input-len", "8"]
    assert bench_serve.main(flags) == 1
    assert "warm-up failed: http 429: no more of request" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_waited_for_and_then_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--base-url", "http://127.0.0.1:9", "--ready-timeout", "0.4", *SMALL]
    assert bench_serve.main(flags) == 1
    text = capsys.readouterr().err
    assert "cannot connect to 127.0.0.1:9" in text
    assert "--ready-timeout" in text


@pytest.mark.parametrize("tool", [bench_serve.main, evaluation.main])
def test_where_nothing_listens_the_tool_fails_at_once_and_says_what_to_do(
    tool: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    assert tool(["--base-url", "http://127.0.0.1:9"]) == 1
    assert time.monotonic() - began < 30  # 0.1 on a free machine
    text = capsys.readouterr().err
    assert text.startswith("penstock: http://127.0.0.1:9: cannot connect")
    assert "`penstock serve`" in text
    assert "--base-url" in text


def test_a_server_that_lists_no_model_is_measured_when_the_model_is_named(
    fast: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--base-url", fast, "--header", "X-Models=none", "--ready-timeout", "0", *SMALL]
    assert bench_serve.main([*flags, "--model", "plain", "--num-prompts", "1"]) == 0
    assert bench_serve.main([*flags, "--num-prompts", "1"]) == 1
    assert "lists no model; name one with --model" in capsys.readouterr().err


def test_prompts_longer_than_the_model_are_refused_before_any_is_sent(
    fast: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        bench_serve.main(["--base-url", fast, "--num-prompts", "3", "--random-input-len", "4000"])
        == 2
    )
    text = capsys.readouterr().err
    assert "4000 tokens" in text
    assert "4096" in text


def test_ctrl_c_prints_what_is_there(slow: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    seen(slow)  # what came from other tests
    process = subprocess.Popen(
        [
            sys.executable, "-m", "penstock.services", "bench", "serve", "--base-url", slow,
            "--model", "plain", "--num-prompts", "10000", "--max-concurrency", "4",
            "--random-output-len", "3", "--save-result", str(path), *SMALL,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    # Requests wait for one of four places: when the eighth is there, four have ended.
    arrived, deadline = 0, time.monotonic() + 120
    while arrived < 8:
        assert process.poll() is None and time.monotonic() < deadline, f"{arrived} requests came"
        time.sleep(0.1)
        arrived += len(seen(slow)["seen"])
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "interrupted: the" in out
    result = json.loads(path.read_text())
    assert 4 <= result["completed"] < 10000
    assert result["failed"] == 0
    assert result["interrupted"] <= 4


def test_ctrl_c_between_two_requests_is_an_interruption_too(fast: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival": 0, "prompt": "a"}\n{"arrival": 3600, "prompt": "b"}\n')
    seen(fast)
    process = subprocess.Popen(
        [
            sys.executable, "-m", "penstock.services", "bench", "serve", "--base-url", fast,
            "--model", "plain", "--dataset-name", "trace", "--dataset-path", str(path),
            "--trace-speed", "1", "--warmup-requests", "0", "--quiet",
        ],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not seen(fast)["seen"]:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(ENDED_SECONDS)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert "interrupted: the 0 open requests" in out
    assert process.returncode == 130
