"""Studies of models that are divided among GPUs: here among processes that meet by gloo."""

from __future__ import annotations

import argparse
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.loadtest.models.make_model import make_model
from penstock.loadtest.studies import divided_equal, divided_killed, divided_speed, gpu_memory
from penstock.loadtest.studies.divided_equal import REFERENCE, ROUNDED, Answers, Comparison
from penstock.loadtest.studies.divided_killed import Case
from penstock.loadtest.studies.divided_layout import Cards, Layout, layout

FLAGS = [
    *("--", "--device", "cpu", "--num-kv-blocks", "100", "--max-model-len", "256"),
    *("--max-num-seqs", "8"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_THREADS", "1")
        yield str(make_model(tmp_path_factory.mktemp("models") / "divided"))


@pytest.mark.timeout(240)
def test_two_ranks_give_the_answers_of_one_worker(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--layouts", "2x1x1", "--cards", "2", "--share", "4", "--num-prompts", "4"]
    asked += ["--input-len", "5:60"]
    assert divided_equal.main([folder, *asked, "--output-len", "12", *FLAGS]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.partition(":")[0] for line in lines} == {
        "one, float32", "one, bfloat16", "TP 2, float32", "TP 2, bfloat16",
    }  # fmt: skip
    assert sum("4 of 4 answers the same" in line for line in lines) == 2


@pytest.mark.timeout(240)
def test_streams_have_the_same_tokens_when_a_rank_is_killed(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--layouts", "1x2x1", "--cards", "2", "--streams", "4", "--tokens", "150"]
    flags = ["--cases", "last-killed", *FLAGS, "--dtype", "float32"]
    assert divided_killed.main([folder, *asked, *flags]) == 0
    told = capsys.readouterr().out
    assert "PP 2, last rank killed: 4 of 4 streams the same, longest pause" in told
    assert "left behind" not in told


@pytest.mark.timeout(240)
def test_speeds_of_layouts_are_rows_of_a_table(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--long", "60", "--input", "20", "--output", "4", "--requests", "8"]
    assert divided_speed.main(["--cards", "2", *sizes, f"{folder}:1x1x2", *FLAGS]) == 0
    head, _, row = (line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines())
    assert row[0].strip() == "divided, DP 2" and len(row) == len(head)
    assert all(re.search(r"\d", cell) for cell in row[1:-3]), row


@pytest.mark.timeout(120)
def test_a_server_that_does_not_start_fails_its_case_and_holds_up_no_other(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--long", "20", "--input", "20", "--output", "2", "--requests", "2"]
    asked = [f"{tmp_path / 'none'}:1x1x1", f"{folder}:1x1x1"]
    assert divided_speed.main(["--cards", "2", *sizes, *asked, *FLAGS]) == 1
    told = capsys.readouterr().out
    assert "none, one: `penstock serve` ended" in told and "| divided, one |" in told


def answers(tokens: list[int], *logprobs: float) -> Answers:
    return Answers([tokens], list(logprobs), 1.0, 1.0)


def test_bfloat16_may_differ_by_twice_what_one_worker_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    two = Layout(2, 1, 1)
    for most, good in ((0.2, True), (0.21, False)):
        found = Comparison()
        found.add(divided_equal.Case(two, "bfloat16"), answers([4], -1.0, -2.0 - most))
        assert not capsys.readouterr().out, "there is nothing to compare it with yet"
        found.add(REFERENCE, answers([5], -1.0, -2.0))
        found.add(ROUNDED, answers([5], -1.0, -2.1))
        assert found.good is good
        assert f"{most:.6f} at most, {most / 0.1:.2f}" in capsys.readouterr().out


def test_another_token_in_float32_is_a_difference() -> None:
    found = Comparison()
    found.add(REFERENCE, answers([5, 6], -1.0))
    found.add(ROUNDED, answers([5, 7], -1.1))
    assert found.good
    found.add(divided_equal.Case(Layout(1, 2, 1), "float32"), answers([5, 7], -1.0))
    assert not found.good


@pytest.mark.parametrize("text", ["2x2", "2x0x1", "axbxc", "8x8x2"])
def test_a_layout_that_is_none_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=text):
        layout(text)


def test_a_layout_that_needs_more_cards_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        divided_killed.main(["nowhere", "--layouts", "2x2x1", "--cards", "2"])
    assert ended.value.code == 2
    assert "--cards 2: a layout needs 4" in capsys.readouterr().err


def test_cards_with_the_fewest_servers_are_taken_and_who_shares_one_takes_turns() -> None:
    cards = Cards(3, 2)
    assert cards.take(1) == [0]
    assert cards.take(2) == [1, 2]
    assert cards.take(3) == [0, 1, 2]
    waiting = threading.Thread(target=cards.take, args=(2,), daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    cards.give_back([0, 1])
    waiting.join(10)
    assert not waiting.is_alive()
    entered = threading.Event()

    def enter() -> None:
        with cards.alone([2]):
            entered.set()

    with cards.alone([1, 2]):
        other = threading.Thread(target=enter, daemon=True)
        other.start()
        assert not entered.wait(0.05)
    assert entered.wait(10)


def test_a_case_is_a_role_and_a_fault_and_two_ranks_have_no_middle() -> None:
    case = Case.named("middle-stopped")
    assert case == ("middle", "stopped")
    assert not case.has_victim(Layout(1, 2, 1)) and case.has_victim(Layout(1, 3, 1))
    with pytest.raises(argparse.ArgumentTypeError, match="first-lost"):
        Case.named("first-lost")


def test_the_lowest_and_highest_memory_of_each_gpu_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readings, over = iter([[50, 60], [5, 60], [50, 70]]), threading.Event()

    def read() -> list[int]:
        try:
            return next(readings)
        except StopIteration:
            over.set()
            return [20, 65]

    monkeypatch.setattr(gpu_memory, "memory_in_use", read)
    monkeypatch.setattr(gpu_memory, "LOOK_S", 0.001)
    with gpu_memory.MemoryWatch() as watch:
        assert over.wait(10)
    assert (watch.before, watch.lowest, watch.highest) == ([50, 60], [5, 60], [50, 70])
