"""The flags of ``penstock bench serve``."""

from __future__ import annotations

import math

import pytest

from penstock.loadtest import bench
from penstock.loadtest.client.serve_options import parse
from penstock.loadtest.environment import redacted


def test_the_defaults_are_those_of_vllms_tool() -> None:
    options = parse([])
    assert options.base_url == "http://127.0.0.1:8000"
    assert options.endpoint == "/v1/completions"
    assert (options.dataset_name, options.num_prompts) == ("random", 1000)
    assert (options.random_input_len, options.random_range_ratio) == (1024, 0.0)
    assert (options.request_rate, options.burstiness) == (math.inf, 1.0)
    assert options.max_concurrency is None
    assert options.save_result is None


def test_host_and_port_make_the_url() -> None:
    assert parse(["--host", "::1", "--port", "80"]).base_url == "http://[::1]:80"
    assert parse(["--base-url", "https://a/v1", "--port", "80"]).base_url == "https://a/v1"


def test_a_sweep_is_a_run_for_each_level_with_other_prompts() -> None:
    levels = parse(["--sweep-concurrency", "1", "8"]).levels()
    assert [one.max_concurrency for one in levels] == [1, 8]
    assert len({one.prompt_seed for one in levels}) == 2
    assert [one.request_rate for one in parse(["--sweep-rate", "2", "4"]).levels()] == [2, 4]
    assert parse([]).levels() == [parse([])]


def test_a_load_is_open_where_requests_have_times_of_their_own() -> None:
    trace = ["--dataset-name", "trace", "--dataset-path", "x"]
    ramp = ["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1", "--ramp-up-end-rps", "2"]
    for flags in (["--request-rate", "1"], ["--burst-size", "2"], ramp, trace):
        assert parse(flags).open_loop
    assert not parse([]).open_loop
    assert not parse(["--max-concurrency", "3"]).open_loop


def test_several_servers_may_be_named() -> None:
    options = parse(["--base-url", "http://a", "http://b"])
    assert (options.base_url, options.other_urls) == ("http://a", ["http://b"])


def test_sampling_flags_and_extra_body_go_into_the_body() -> None:
    options = parse(
        ["--temperature", "0", "--top-p", "0.9", "--extra-body", '{"top_p": 1, "n": 2}']
    )
    assert options.sampling == {"temperature": 0.0, "top_p": 1, "n": 2}


def test_a_result_folder_alone_saves_under_a_made_up_name() -> None:
    assert parse(["--result-dir", "x"]).save_result == ""
    assert parse(["--save-result"]).save_result == ""
    assert parse(["--save-result", "a.json"]).save_result == "a.json"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--num-prompts", "0"], "--num-prompts"),
        (["--num-prompts", "x"], "'x'"),
        (["--request-rate", "0"], "above 0"),
        (["--random-range-ratio", "1"], "below 1"),
        (["--request-timeout", "nan"], "--request-timeout"),
        (["--goodput", "latency:3"], "'latency'"),
        (["--goodput", "ttft:x"], "ttft:MILLISECONDS"),
        (["--percentile-metrics", "ttft,x"], "'x'"),
        (["--metric-percentiles", "101"], "101"),
        (["--extra-body", "[1]"], "--extra-body"),
        (["--header", "a b=c"], "'a b'"),
        (["--metadata", "x"], "NAME=VALUE"),
        (["--metadata", "quantiles=5"], "quantiles is a field of the result"),
        (["--dataset-name", "sharegpt"], "--dataset-path"),
        (["--endpoint", "v1/x"], "--endpoint"),
        (["--prompts", "3"], "--prompts"),
        (["--sweep-rate", "1", "--sweep-concurrency", "1"], "give one of them"),
        (["--sweep-concurrency", "1", "--max-concurrency", "1"], "takes the place of"),
        (["--sweep-rate", "1", "--request-rate", "1"], "takes the place of"),
        (["--ramp-up-strategy", "linear"], "--ramp-up-start-rps"),
        (["--ramp-up-end-rps", "3"], "--ramp-up-strategy"),
        (["--dataset-name", "trace", "--dataset-path", "x", "--request-rate", "1"], "times of its"),
        (["--dataset-name", "trace"], "--dataset-path"),
        (["--client-processes", "3", "--max-concurrency", "2"], "--client-processes"),
        (["--dataset-name", "agent", "--turns", "1"], "--turns"),
        (["--dataset-name", "conversation", "--dataset-path", "x", "--turns", "2"], "--turns"),
        (["--dataset-name", "agent", "--turns", "3:4"], "--turns"),
    ],
)
def test_a_wrong_flag_is_named_with_its_value(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(flags)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_the_recorded_command_has_no_secrets() -> None:
    text = redacted(
        [
            "--api-key",
            "s1",
            "--header",
            "A=s2",
            "B=s3",
            "--api-key=s4",
            "--header=C=s5",
            "--port",
            "1",
        ]
    )
    assert not any(f"s{n}" in text for n in range(1, 6))
    assert "--port 1" in text
    assert "A=***" in text


def test_bench_without_or_with_an_unknown_command_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([]) == 2
    assert "serve " in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        bench.main(["swerve"])
    assert caught.value.code == 2
    assert "'swerve'" in capsys.readouterr().err
