"""How many threads compute an encoder's step of few rows."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from support.worker.tiny_encoders import make_encoder, write_encoder

from penstock.protocol.config import Config
from penstock.protocol.config.fields import DeviceConfig, ModelConfig
from penstock.protocol.model_info import read_model_info
from penstock.services.worker.cpu_threads import LOOKS, PAUSE_SECONDS
from penstock.services.worker.encoders.executor import EncoderExecutor, made_up_prompt
from penstock.services.worker.encoders.loading import load_encoder_executor
from penstock.services.worker.encoders.short_steps import SHORT_ROWS, ShortStepTrial


class Machine:
    """On which a step takes the given times, by threads."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.seconds = seconds
        self.now = 0.0

    def compute(self, threads: int) -> list[float]:
        self.now += self.seconds[threads]
        return [1.0 if threads < 4 else 1.0 + 1e-6]

    def trial(self) -> ShortStepTrial:
        return ShortStepTrial(self.compute, list(self.seconds), lambda: self.now)


@pytest.mark.parametrize(("second", "wanted"), [(0.009, 1), (0.0086, 1), (0.0084, 2), (0.05, 1)])
def test_a_thread_more_must_be_worth_it(second: float, wanted: int) -> None:
    choice = Machine({1: 0.010, 2: second}).trial().start()
    assert choice.threads == wanted
    assert str(choice).startswith(f"short texts on {wanted}: a step takes 10 ms with 1, ")


def test_a_number_of_threads_that_changes_bits_is_left_out() -> None:
    choice = Machine({1: 0.010, 2: 0.008, 4: 0.001}).trial().start()
    assert (choice.threads, list(choice.step_ms)) == (2, [1, 2])


def test_fewer_threads_are_not_tried_where_that_is_hopeless() -> None:
    seconds = {1: 0.08, 2: 0.04, 3: 0.015}
    assert list(Machine(seconds).trial().start().step_ms) == [2, 3]


def test_one_quiet_look_corrects_a_busy_one() -> None:
    machine = Machine({1: 0.010, 2: 0.030})
    trial = machine.trial()
    assert trial.start().threads == 1
    machine.seconds[2] = 0.006
    pieces = sum(1 for _ in trial.again())
    assert (trial.choice.threads, pieces) == (2, 8)
    machine.seconds[2] = 0.030
    assert trial.start().threads == 2


@pytest.fixture
def executor(tmp_path: Path) -> EncoderExecutor:
    folder = write_encoder(make_encoder("Bert"), tmp_path)
    config = Config(
        model=ModelConfig(model=str(folder)), device=DeviceConfig(device="cpu", threads=2)
    )
    return load_encoder_executor(config, read_model_info(folder), lambda note: None)


def test_short_texts_have_the_threads_that_were_measured_and_long_ones_all(
    executor: EncoderExecutor,
) -> None:
    assert executor.summary == "an encoder, 2 threads", "as --threads says"
    executor.measure_short_steps()
    assert executor.summary.startswith("an encoder, 2 threads; short texts on ")
    executor._short_threads = 1
    half = made_up_prompt(executor.capacity, SHORT_ROWS // 2)
    for prompts, threads in (([half], 1), ([half] * 2, 1), ([half] * 3, 2)):
        executor.compute(prompts)
        assert torch.get_num_threads() == threads


def test_an_encoder_looks_at_its_threads_again_in_pauses(executor: EncoderExecutor) -> None:
    now = time.monotonic()
    assert not executor.improve(now, 60.0), "nobody measures what --threads says"
    executor.measure_short_steps()
    assert not executor.improve(now, PAUSE_SECONDS / 2)
    for look in range(LOOKS):
        pieces = 0
        while executor.improve(now + 1000.0 * look, 60.0):
            pieces += 1
        assert bool(pieces) == (look < LOOKS - 1), "nobody used it since"
