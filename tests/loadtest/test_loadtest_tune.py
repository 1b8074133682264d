"""``penstock tune``: real steps, real servers, real loads; and the rules that it decides by."""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.pipeline.in_process import called

from penstock.loadtest.tune import command as tune_command
from penstock.loadtest.tune.command import TUNED, parser
from penstock.loadtest.tune.estimate import Given, estimate, without_steps
from penstock.loadtest.tune.load_level import Level
from penstock.loadtest.tune.objective import Impossible, Objective, Workload, read_objective
from penstock.loadtest.tune.rate_search import MOST_LEVELS, NEAR, RateSearch
from penstock.loadtest.tune.step_points import StepPoint, Steps
from penstock.loadtest.tune.step_process import _read, candidates
from penstock.loadtest.tune.time_limit import OutOfTime, TimeLimit
from penstock.loadtest.tune.tuning import Found, Task
from penstock.loadtest.tune.written import written
from penstock.protocol.config import Config, Provenance
from penstock.protocol.config.machine import Machine
from penstock.protocol.config.resolve import read_file, resolve
from penstock.protocol.config.sources import Source
from penstock.services.command_table import COMMANDS
from penstock.services.layout_choice import SIZES

GROUPS = COMMANDS["serve"].groups
WORK = Workload(100, 50)
STANDING = Given(64, 2048)


def tune(*arguments: str, seconds: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.services", "tune", *arguments]
    return subprocess.run(
        [*command, "--seconds", f"{seconds:g}"],
        capture_output=True,
        text=True,
        timeout=3 * seconds + 60,
        env={**os.environ, "PENSTOCK_THREADS": "1"} if "cpu" in arguments else None,
        check=False,
    )


@pytest.mark.timeout(240)
def test_what_is_written_is_what_serve_reads_and_has_a_reason_for_each_setting(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tuned.toml"
    done = tune(
        *("--device", "null", "--null-step-ms", "20", "--objective", "ttft:2000,tpot:100"),
        *("--input-len", "40", "--output-len", "8", "-o", str(path), "--served-model-name", "mine"),
        seconds=30,
    )
    assert done.returncode == 0, done.stderr
    assert f"penstock serve --config {path}" in done.stdout
    text = path.read_text()
    found = read_file(str(path))
    assert set(TUNED) <= found.keys()
    assert found["served_model_name"] == ["mine"]
    lines = text.splitlines()
    for name in TUNED:
        at = next(at for at, line in enumerate(lines) if line.startswith(f"{name} = "))
        assert lines[at - 1].startswith("# "), f"{name} has no reason"
    assert "# Objective: TTFT 2000 ms and TPOT 100 ms for 90 % of the requests" in text
    assert "requests/s: " in text, "the rate that was kept"
    config, sources = resolve(GROUPS, {"config": str(path)}, {})
    assert config.device.null_step_ms == 20
    assert config.scheduler.max_num_seqs == found["max_num_seqs"] >= 1
    assert all(sources[name].origin == "file" for name in TUNED)
    assert "steps: 1 rows at 44 positions: " in done.stderr, "nothing is tuned silently"
    assert "load: one at a time: 100 % of" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("stages", [1, 2])
def test_the_built_in_model_is_tuned_on_a_cpu(stages: int, tmp_path: Path) -> None:
    path = tmp_path / "tuned.toml"
    done = tune(
        *("--device", "cpu", "--objective", "ttft:20000,tpot:3000", "-o", str(path)),
        *("--input-len", "32", "--output-len", "4", "--pipeline-parallel-size", str(stages)),
        seconds=100,
    )
    assert done.returncode == 0, done.stderr
    found = read_file(str(path))
    assert set(TUNED) <= found.keys()
    assert "device cpu" in path.read_text().replace("\n# ", " ")
    assert ("pipeline_layers" in found) == (stages > 1)
    assert stages == 1 or sum(map(int, found["pipeline_layers"].split(","))) == 10


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        ("tpot:20", "TPOT 5"),
        pytest.param("ttft:20", "TTFT ", marks=pytest.mark.slow),
    ],
)
def test_an_objective_that_no_step_can_keep_is_refused_with_the_best_that_was_found(
    objective: str, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "tuned.toml"
    done = tune(
        *("--device", "null", "--null-step-ms", "50", "--objective", objective, "-o", str(path)),
        seconds=60,
    )
    assert done.returncode == 1, done.stderr
    said = done.stderr.splitlines()[-1]
    assert said.startswith(f"penstock: --objective {objective} cannot be kept here: the best")
    assert words in said
    assert not path.exists()


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "tuned.toml"
    path.write_text("port = 1\n")
    done = called("tune", "--device", "null", "--objective", "tpot:9", "-o", str(path))
    assert done.returncode == 2
    assert f"--output {path}: it is there already" in done.stderr
    assert path.read_text() == "port = 1\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--objective", "speed:3"), "'speed' is none of"),
        (("--objective", "itl:3"), "only ttft and tpot can be tuned for"),
        (("--objective", "tpot:0"), "the limit must be more than 0 ms"),
        (("--objective", "tpot"), "expected tpot:MILLISECONDS"),
        ((), "--objective"),
        (("--objective", "tpot:9", "--nodes", "2", "--router", "tcp://h:1"), "--nodes"),
        (("--objective", "tpot:9", "--input-len", "4000"), "--input-len 4000 and --output-len"),
        (("--objective", "tpot:9", "-o", "tuned.yaml"), "a TOML file is written"),
        (("--objective", "tpot:9", "--task", "embed"), "is for models that generate"),
        (("--objective", "tpot:9", "--max-num-sqs", "4"), "unknown flag --max-num-sqs"),
    ],
)
def test_what_cannot_be_tuned_is_refused_by_name(arguments: tuple[str, ...], words: str) -> None:
    done = called("tune", "--device", "null", *arguments)
    assert done.returncode == 2
    assert words in done.stderr


def test_too_little_time_is_told_with_what_it_was_for() -> None:
    limit = TimeLimit(0.0, quiet=True)
    with pytest.raises(OutOfTime, match=r"--seconds 0 is too short for the start of a server"):
        limit.need(5, "the start of a server")


def test_an_objective_is_read_as_bench_serve_reads_its_limits() -> None:
    found = read_objective("ttft:200, tpot:20.5")
    assert found == Objective(200, 20.5)
    assert found.flags == ["ttft:200", "tpot:20.5"]
    with pytest.raises(argparse.ArgumentTypeError):
        read_objective("")


def steps(decode: dict[int, float], prefill: dict[int, float] = {}) -> Steps:  # noqa: B006
    """Milliseconds by rows, and by tokens of prompts beside one row."""
    points = [StepPoint(rows, 0, ms) for rows, ms in decode.items()]
    points += [StepPoint(1, tokens, ms) for tokens, ms in prefill.items()]
    return Steps("a device", 125, points)


def test_as_many_sequences_run_as_keep_tpot_with_the_prompts_beside_them() -> None:
    # A row takes 1 ms more, a token of a prompt 0.01: each sequence 1 + 2 * 0.01.
    found = estimate(steps({1: 10, 65: 74}, {2048: 10 + 20.48}), Objective(tpot=30), WORK, STANDING)
    assert found.max_num_seqs == 20
    assert "29.4 ms with 20 sequences" in found.why_seqs
    assert "too long" in found.why_seqs
    assert found.request_seconds == pytest.approx((10 + 1 + 50 * 29.4) / 1e3, rel=0.01)


def test_what_was_given_is_not_changed() -> None:
    given = Given(5, 512, frozenset({"max_num_seqs", "max_num_batched_tokens"}))
    found = estimate(steps({1: 1, 8: 8}, {512: 9}), Objective(tpot=3), WORK, given)
    assert (found.max_num_seqs, found.max_num_batched_tokens, found.others) == (5, 512, [])
    assert found.why_seqs == found.why_tokens == "given"
    assert candidates("cpu", given).rows == [1, 2, 4, 5]
    assert candidates("cpu", given).chunks == [512]


def test_a_step_has_other_tokens_than_by_default_only_where_that_gains_a_tenth() -> None:
    same = {256: 36.0, 512: 62.0, 2048: 215.0}
    found = estimate(steps({1: 10}, same), Objective(tpot=30), WORK, STANDING)
    assert found.max_num_batched_tokens == 2048
    assert "stays at its default" in found.why_tokens
    large_is_slow = {256: 36.0, 512: 62.0, 2048: 400.0}
    found = estimate(steps({1: 10}, large_is_slow), Objective(tpot=30), WORK, STANDING)
    assert found.max_num_batched_tokens == 256
    assert found.others[0] == 512


def test_one_sequence_that_is_too_slow_ends_it_with_what_it_takes() -> None:
    with pytest.raises(Impossible, match=r"TPOT 40 ms, which a step of a single sequence takes"):
        estimate(steps({1: 40}), Objective(tpot=30), WORK, STANDING)
    with pytest.raises(Impossible, match=r"TTFT 55 ms, which the steps of a prompt of 100 tokens"):
        estimate(steps({1: 5}, {2048: 1029}), Objective(ttft=50), WORK, STANDING)


def test_engines_of_several_devices_begin_as_they_stand() -> None:
    found = without_steps(STANDING, WORK, Objective(tpot=20), "no steps")
    assert (found.max_num_seqs, found.max_num_batched_tokens) == (64, 2048)
    assert found.others == [1024, 4096]


def level(rate: float, kept: float) -> Level:
    return Level(rate, 100, 0, kept, 1.0, 1.0, 1, 100 / rate if rate else 1.0, 1.0)


@pytest.mark.parametrize(("limit", "first"), [(7.0, 1.0), (7.0, 100.0), (0.3, 0.2), (50.0, 49.0)])
def test_the_rate_that_is_found_is_just_below_the_one_that_fails(
    limit: float, first: float
) -> None:
    search = RateSearch(
        lambda rate: level(rate, float(rate <= limit)), lambda one: one.keeps(1.0), lambda: True
    )
    search.run(first, 0.01)
    assert search.low is not None and search.high is not None
    assert search.low.rate <= limit < search.high.rate <= NEAR * search.low.rate
    assert not search.cut


def test_a_search_ends_where_no_rate_is_kept_and_where_time_is_up() -> None:
    search = RateSearch(lambda rate: level(rate, 0.0), lambda one: one.keeps(1.0), lambda: True)
    search.run(8.0, 1.0)
    assert search.low is None and search.high is not None and search.high.rate >= 1.0
    counted = itertools.count()
    search = RateSearch(
        lambda rate: level(rate, 1.0), lambda one: one.keeps(1.0), lambda: next(counted) < 3
    )
    search.run(1.0, 0.1)
    assert search.cut and search.low is not None and search.low.rate < 10
    assert next(counted) == 4 < MOST_LEVELS


def test_a_server_that_falls_behind_does_not_keep_its_rate_whatever_the_times_are() -> None:
    behind = msgspec.structs.replace(level(10.0, 1.0), seconds=40.0)
    assert level(10.0, 1.0).keeps(1.0)
    assert not behind.keeps(1.0)
    assert not level(10.0, 0.8).keeps(1.0)


def test_secrets_are_marked_in_the_file_and_files_of_them_are_named(tmp_path: Path) -> None:
    path = tmp_path / "some.toml"
    settings: dict[str, Any] = {
        "secret": "abc", "api_key": ["file:/keys"], "max_num_seqs": 3, "model": 'a "b"',
    }  # fmt: skip
    text = written(settings, {"max_num_seqs": "because\nof this"}, ["what it is", "and more"])
    assert "abc" not in text
    assert "# because\n# of this\nmax_num_seqs = 3\n" in text
    assert text.startswith("# what it is\n#\n# and more\n")
    path.write_text(text)
    assert read_file(str(path)) == {
        "secret": "<hidden>", "api_key": ["file:/keys"], "max_num_seqs": 3, "model": 'a "b"',
    }  # fmt: skip


def test_the_flags_are_those_of_serve_and_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--help"])
    shown = capsys.readouterr().out
    assert "--objective" in shown and "--max-num-seqs" in shown


def test_the_layout_that_was_chosen_holds_for_every_trial_and_stands_in_the_file_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, tasks = tune_command._whole, []

    def chosen(config: Config, sources: Provenance, machine: Machine) -> tuple[Config, Provenance]:
        config, sources = whole(config, sources, machine)
        replace = msgspec.structs.replace
        config = replace(
            config,
            cluster=replace(config.cluster, tensor_parallel_size=4),
            launch=replace(config.launch, data_parallel_size=2),
        )
        reason = Source("derived", "penstock plan: TP 4 × PP 1 × DP 2")
        return config, sources | dict.fromkeys(SIZES, reason)

    def tuned(task: Task, limit: TimeLimit) -> Found:
        tasks.append(task)
        return Found({"max_num_seqs": 7}, {"max_num_seqs": "why"}, level(1.0, 1.0), [])

    monkeypatch.setattr(tune_command, "_whole", chosen)
    monkeypatch.setattr(tune_command, "_tuned", tuned)
    path = tmp_path / "tuned.toml"
    assert tune_command.main(["--device", "null", "--objective", "tpot:9", "-o", str(path)]) == 0
    sizes = {"tensor_parallel_size": 4, "pipeline_parallel_size": 1, "data_parallel_size": 2}
    assert sizes.items() <= tasks[0].standing.items()
    assert sizes.items() <= read_file(str(path)).items()
    for name, value in sizes.items():
        told = f"# penstock plan: TP 4 × PP 1 × DP 2.\n{name} = {value}\n"
        assert told in path.read_text()


def test_lines_of_libraries_and_a_cut_one_are_no_steps() -> None:
    lines = [
        "a library says hello\n", '{"executor": "e", "context": 3}\n', "[1]\n",
        '{"rows": 1, "prefill": 0, "ms": 2.5}\n', "{}\n", '{"rows": 2, "pre',
    ]  # fmt: skip
    started, points = _read(lines, lambda text: None)
    assert started is not None and started.executor == "e"
    assert points == [StepPoint(1, 0, 2.5)]
