"""What drafts gain or lose on a GPU whose steps and whose host take given times."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.worker.paced_device import PROMPT, Pace, PacedDevice, Text
from test_worker_gpu_executor import silent

from penstock.protocol.config import Config
from penstock.protocol.config.fields import DeviceConfig, SpeculationConfig
from penstock.protocol.model_info import read_model_info
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.services.worker.gpu.decoder import dense_executor
from penstock.services.worker.gpu.drafting_executor import DraftingGpuExecutor
from penstock.services.worker.model_weights import load_model
from penstock.services.worker.models.dense import DenseConfig, dense_config
from penstock.services.worker.models.dense_form import dense_model
from penstock.services.worker.speculation.drafting import Drafting
from penstock.services.worker.speculation.setup import make_drafting

TOKENS, ROUNDS, SEQUENCES = 300, 6, 32
PACES = {
    "a small model": Pace(device=200e-6, host=100e-6, depth=6),
    "a model that waits for the host": Pace(device=150e-6, host=250e-6, depth=6),
    "0.6B": Pace(device=750e-6, host=100e-6, depth=3),
    "8B": Pace(device=6.5e-3, host=100e-6, depth=2),
}
UNEVEN = {
    name: pace._replace(noise=0.05, drafted=drafted, host_drafted=host_drafted)
    for name, pace, drafted, host_drafted in (
        ("0.6B", PACES["0.6B"], 1.5, 300e-6),
        ("0.6B, whose steps with drafts wait for the host", PACES["0.6B"], 1.15, 900e-6),
        ("8B", PACES["8B"], 1.05, 300e-6),
    )
}
"""Devices that take longer for one step than for another."""


def text_of(seed: int, repeated: float, period: int = 60) -> Text:
    """Texts that say the same in each period, but for a share of the tokens."""
    memory: dict[tuple[int, int], int] = {}

    def token(slot: int, place: int) -> int:
        key = slot, place
        if key not in memory:
            draw = random.Random(hash((seed, slot, place)))
            again = place >= period and draw.random() < repeated
            memory[key] = token(slot, place % period) if again else draw.randrange(290)
        return memory[key]

    return token


def executor_of(folder: Path) -> DraftingGpuExecutor:
    info = read_model_info(folder)
    model = load_model(info, torch.float32, torch.device("cpu"), silent, longest=512)
    config = dense_config(model.specification)
    assert isinstance(config, DenseConfig)
    sizes = EngineSizes(24 * SEQUENCES, 16, SEQUENCES, 16 * PROMPT, 512, info.vocab_size)
    made = dense_executor(*dense_model(config, model.specification, model.weights), sizes)
    assert isinstance(made, DraftingGpuExecutor)
    return made


def suffix_drafting(executor: DraftingGpuExecutor) -> Drafting:
    config = Config(
        speculation=SpeculationConfig(speculative="suffix"), device=DeviceConfig(device="cuda")
    )
    drafting = make_drafting(config, executor.capacity, generates=True)
    assert drafting is not None
    return drafting


def seconds(folder: Path, pace: Pace, batch: int, repeated: float, drafts: bool) -> float:
    """Of all rounds behind the first one, each with other texts."""
    with pytest.MonkeyPatch.context() as patch:
        executor = executor_of(folder)
        device = PacedDevice(executor, pace, patch)
        if drafts:
            device.speculate(suffix_drafting(executor), patch)
        total = 0.0
        for number in range(ROUNDS):
            device.text = text_of(number, repeated)
            took = device.run(batch, TOKENS, number + 1)
            total += took if number else 0.0
        return total


Gain = Callable[[str, int, float], float]


@pytest.fixture
def gain(tiny_folder: Callable[[str], Path]) -> Gain:
    def measured(name: str, batch: int, repeated: float) -> float:
        folder, pace = tiny_folder("qwen3"), PACES[name]
        plain, drafted = (seconds(folder, pace, batch, repeated, one) for one in (False, True))
        return plain / drafted

    return measured


@pytest.mark.parametrize("name", PACES)
@pytest.mark.parametrize("batch", [1, 8])
def test_drafts_lose_no_more_than_a_fiftieth_whatever_the_text(
    name: str, batch: int, gain: Gain
) -> None:
    for repeated in (0.0, 0.5, 0.9):
        assert gain(name, batch, repeated) > 0.98, repeated


@pytest.mark.parametrize("name", PACES)
@pytest.mark.parametrize("batch", [1, 8])
def test_a_text_that_repeats_itself_comes_twice_as_fast(name: str, batch: int, gain: Gain) -> None:
    assert gain(name, batch, 1.0) > 2


def rounds_of(folder: Path, pace: Pace, batches: list[int], drafts: bool) -> list[float]:
    """Seconds of rounds one after the other, of which all with as many texts have the same ones,
    and whose answers are remembered."""
    with pytest.MonkeyPatch.context() as patch:
        executor = executor_of(folder)
        device = PacedDevice(executor, pace, patch)
        if drafts:
            drafting = suffix_drafting(executor)
            device.speculate(drafting, patch)
            forget = drafting._proposer.forget
            patch.setattr(
                drafting._proposer, "clear", lambda: [forget(slot) for slot in range(SEQUENCES)]
            )
        took = []
        for number, batch in enumerate(batches):
            device.text = text_of(batch, 0.0)
            took.append(device.run(batch, TOKENS, number + 1, b"one"))
        return took


@pytest.mark.parametrize("name", UNEVEN)
def test_answers_given_before_come_faster_eight_at_once_as_one_at_a_time(
    name: str, tiny_folder: Callable[[str], Path]
) -> None:
    batches = [1] * 4 + [8] * 4
    plain, drafted = (
        rounds_of(tiny_folder("qwen3"), UNEVEN[name], batches, one) for one in (False, True)
    )
    gains = [without / each for without, each in zip(plain, drafted, strict=True)]
    assert min(gains[1:4]) > 3, "one at a time"
    assert gains[4] > 0.96, "new ones, on a device whose steps differ"
    assert min(gains[5:]) > 1.5
