"""``penstock tune`` and the tables of kernels: what is measured, what wins, and what is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

pytest.importorskip("triton")

from support.worker.sharp_model import CONFIG

from penstock.kernels.kernel_table import Choice, chosen, trying, use_choices
from penstock.loadtest.tune import kernel_meter
from penstock.loadtest.tune.estimate import Given
from penstock.loadtest.tune.kernel_meter import KernelMeter, is_faster, measure_kernels
from penstock.loadtest.tune.kernel_trials import Products, Trial, best_rows, cut_trials
from penstock.loadtest.tune.objective import Objective, Workload
from penstock.loadtest.tune.step_points import KernelsMeasured, MeasuredChoice, StepPoint, Steps
from penstock.loadtest.tune.step_process import _read
from penstock.loadtest.tune.time_limit import TimeLimit
from penstock.loadtest.tune.tuning import Task, Tuning
from penstock.loadtest.tune.written import written
from penstock.protocol.config.resolve import resolve
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.services.command_table import COMMANDS
from penstock.services.worker.gpu.decoder import dense_executor
from penstock.services.worker.models.dense_form import allocate_dense

SIZES = (4096, 1024, 8)
STANDING, FASTER, SLOWER, WRONG, BROKEN = (
    Choice("few_rows", SIZES, (1, 4, depth, 4)) for depth in (8, 4, 2, 16, 12)
)
DECODER: Any = SimpleNamespace(
    space=SimpleNamespace(residual=torch.zeros(1)), weights=SimpleNamespace(layers=[None] * 2)
)
MICROSECONDS = {STANDING: 50.0, FASTER: 40.0, SLOWER: 60.0, WRONG: 10.0}


@pytest.fixture(autouse=True)
def _none_are_left() -> Iterator[None]:
    yield
    use_choices([])


def in_use() -> Choice:
    numbers = chosen("few_rows", *SIZES)
    return STANDING if numbers is None else Choice("few_rows", SIZES, numbers)


def out() -> torch.Tensor:
    if in_use() == BROKEN:
        raise RuntimeError("out of registers")
    return torch.full((2, 2), 5.0 if in_use() == WRONG else 1.0)


def trial(*others: Choice) -> Trial:
    return Trial("qkv of 2 layers, 8 rows", STANDING, list(others), lambda: None, in_use, out)


def timed(call: Callable[[], Any]) -> list[float]:
    """As long as what ``call`` has in use takes."""
    us = MICROSECONDS[call()]
    return [1e-6 * us * wide for wide in (0.99, 1.0, 1.01)]


def measured(
    monkeypatch: pytest.MonkeyPatch,
    trials: list[Trial],
    rows: Any = None,
    timer: Any = timed,
    seconds: float = 60.0,
) -> list[MeasuredChoice | KernelsMeasured]:
    monkeypatch.setattr(kernel_meter, "cut_trials", lambda decoder: iter(trials))
    monkeypatch.setattr(kernel_meter, "products_trials", lambda decoder: rows)
    clock = iter(range(1000))
    return list(KernelMeter(DECODER, timer, seconds, lambda: float(next(clock))).run())


def test_the_fastest_choice_with_the_same_numbers_is_kept_with_its_two_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = measured(monkeypatch, [trial(SLOWER, WRONG, BROKEN, FASTER)])
    assert found == [
        MeasuredChoice(str(FASTER), "qkv of 2 layers, 8 rows", 40.0, 50.0), KernelsMeasured(2, 0),
    ]  # fmt: skip
    assert str(found[0]).endswith("took 40 µs, 50 as it stood (20% less)")
    assert in_use() == FASTER, "what is measured next has it"


def test_nothing_is_kept_where_the_standing_choice_is_the_fastest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert measured(monkeypatch, [trial(SLOWER)]) == [KernelsMeasured(2, 0)]
    assert chosen("few_rows", *SIZES) is None


def test_what_there_is_no_time_for_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(monkeypatch, [trial(FASTER)] * 4, seconds=2.5)
    assert found[-1] == KernelsMeasured(2, 3)


@pytest.mark.parametrize(
    ("times", "standing", "faster"),
    [
        ([9.0, 9.1, 9.2], [10.0, 10.1, 10.3], True),
        ([9.0, 9.1, 10.1], [10.0, 10.1, 10.3], False),  # they lie among each other
        ([9.8, 9.8, 9.8], [10.0, 10.0, 10.0], False),  # less than 3 %
    ],
)
def test_a_choice_wins_by_more_than_the_noise(
    times: list[float], standing: list[float], faster: bool
) -> None:
    assert is_faster(times, standing) == faster


def test_rows_are_those_of_the_longest_run_in_which_hopper_is_faster() -> None:
    classes = (1, 2, 4, 8, 16, 32, 64, 128)
    assert best_rows([(rows, 8 <= rows <= 64) for rows in classes]) == (5, 64)
    assert best_rows([(rows, rows != 8) for rows in classes]) == (9, 128)
    assert best_rows([(rows, True) for rows in classes]) == (1, 128)
    assert best_rows([(rows, False) for rows in classes]) == (0, 0)


def test_numbers_of_rows_are_chosen_by_what_all_layers_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    us = {("hopper", 8): 30.0, ("library", 8): 40.0, ("hopper", 128): 90.0, ("library", 128): 80.0}

    def named(name: str, rows: int) -> Callable[[], tuple[str, int]]:
        return lambda: (name, rows)

    classes = [
        Products(rows, "hopper", {name: named(name, rows) for name in ("hopper", "library")})
        for rows in (8, 128)
    ]
    found = measured(
        monkeypatch,
        [],
        (("hopper_rows", 1024, 3072), classes),
        lambda call: [1e-6 * us[call()]] * 3,
    )
    assert found == [
        MeasuredChoice(
            "hopper_rows 1024x3072 = 1 8", "2 layers without attention, 128 rows", 80.0, 90.0
        ),
        KernelsMeasured(1, 0),
    ]
    assert chosen("hopper_rows", 1024, 3072) == (1, 8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where no GPU is")
def test_products_of_few_rows_are_tried_in_ways_that_give_the_same_numbers() -> None:
    config = msgspec.structs.replace(
        CONFIG, hidden_size=128, intermediate_size=256, vocab_size=256, num_heads=2, num_kv_heads=1
    )
    weights = allocate_dense(config, torch.bfloat16, torch.device("cpu"))
    with torch.inference_mode():
        for layer in weights.layers:
            layer.input_norm.fill_(1.0)
            for linear in layer.linears:
                linear.weight.normal_(0.0, 0.1)
        decoder: Any = dense_executor(
            config, weights, EngineSizes(32, 16, 16, 64, 128, 256)
        ).decoder
        trials = list(cut_trials(decoder))
        assert [each.name.split()[0] for each in trials] == 2 * [
            "qkv", "output", "gate_up", "down",
        ]  # fmt: skip
        output = trials[1]
        assert output.standing.sizes == (128, 256, 8)
        assert output.others
        wanted = output.out()
        for choice in output.others:
            with trying(choice):
                torch.testing.assert_close(output.out(), wanted, rtol=2e-2, atol=2e-2)


def test_an_executor_without_such_kernels_has_nothing_to_measure() -> None:
    (found,) = measure_kernels(SimpleNamespace(), 1.0)
    assert isinstance(found, KernelsMeasured)
    assert found.note == "its layers have no kernels to choose between"


def test_the_process_that_measures_tells_choices_beside_steps() -> None:
    lines: list[Any] = [
        StepPoint(1, 0, 2.5), MeasuredChoice(str(FASTER), "x", 4.0, 5.0), KernelsMeasured(3, 1),
    ]  # fmt: skip
    texts = [msgspec.json.encode(line).decode() + "\n" for line in lines]
    told: list[str] = []
    started, found = _read(
        ['{"executor": "e", "context": 3, "device": "d"}\n', *texts], told.append
    )
    assert started is not None and started.device == "d"
    assert found == lines
    assert any("few_rows 4096x1024x8 = 1 4 4 4: x took 4 µs" in one for one in told)


def test_better_choices_stand_in_the_file_with_their_times_and_serve_reads_them(
    tmp_path: Path,
) -> None:
    task = Task(Objective(tpot=9.0), Workload(9, 9), {}, Given(8, 64), "cuda", 2, 1, 1)
    tuning = Tuning(task, TimeLimit(60.0, quiet=True), tmp_path)
    settings, reasons = dict[str, Any](), dict[str, str]()
    better = [MeasuredChoice(str(FASTER), "qkv", 40.0, 50.0)]
    ended = KernelsMeasured(5, 2)
    tuning._kernels(Steps("e", 3, [], "NVIDIA H", better, ended), settings, reasons)
    path = tmp_path / "tuned.toml"
    path.write_text(written(settings, reasons))
    assert "# few_rows 4096x1024x8 = 1 4 4 4: qkv took 40 µs, 50 as it stood" in path.read_text()
    config, _ = resolve(COMMANDS["serve"].groups, {"config": str(path)}, {})
    assert config.device.kernel_table == [str(FASTER)]
    assert config.device.kernel_table_device == "NVIDIA H"
    assert tuning._told == [
        "Not all choices of kernels were measured: there was no time for 2, --seconds gives more."
    ]


def test_where_no_choice_is_better_the_file_says_so_and_has_none(tmp_path: Path) -> None:
    task = Task(Objective(tpot=9.0), Workload(9, 9), {}, Given(8, 64), "cuda", 2, 1, 1)
    tuning = Tuning(task, TimeLimit(60.0, quiet=True), tmp_path)
    settings = dict[str, Any]()
    steps = Steps("e", 3, [], "NVIDIA H", [], KernelsMeasured(5, 0))
    tuning._kernels(steps, settings, {})
    assert settings == {}
    assert tuning._told == ["Kernels: of 5 choices none was better than the standing one."]
