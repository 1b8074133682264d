"""The number of CPU threads is measured, and fewer are preferred."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from plan_driver import PlanDriver

from penstock.protocol.config import CacheConfig, Config, DeviceConfig, ModelConfig
from penstock.services.worker.cpu_threads import (
    ThreadChoice,
    candidates,
    choose_threads,
    decode_times,
    preferred,
)
from penstock.services.worker.executor import ExecutorCapacity
from penstock.services.worker.loading import load_executor
from penstock.services.worker.null_engine import NullExecutor

Folder = Callable[[str], Path]


@pytest.mark.parametrize(
    ("cores", "expected"),
    [(1, [1]), (2, [1, 2]), (4, [1, 2, 3]), (8, [1, 2, 4, 7]), (17, [1, 2, 4, 8, 16])],
)
def test_a_core_is_left_to_the_others_where_there_are_more_than_two(
    cores: int, expected: list[int]
) -> None:
    assert candidates(cores) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({1: 1.0}, 1),
        ({1: 1.0, 2: 0.9}, 1),
        ({1: 1.0, 2: 0.6, 4: 0.55}, 2),
        ({1: 1.0, 2: 0.9, 4: 0.5}, 4),
        ({1: 1.0, 2: 15.0}, 1),
    ],
)
def test_more_threads_must_be_clearly_faster(seconds: dict[int, float], expected: int) -> None:
    assert preferred(seconds) == expected


def test_a_choice_tells_what_was_measured() -> None:
    assert str(ThreadChoice(1, {1: 1.23, 2: 19.0})) == (
        "1 of 2 threads: a step takes 1.2 ms with 1, 19 ms with 2"
    )


@pytest.mark.parametrize(
    "capacity",
    [ExecutorCapacity(64, 16, 64, 256, 512, 99), ExecutorCapacity(1, 8, 1, 1, 8, 99)],
)
def test_steps_are_measured_within_the_capacity(capacity: ExecutorCapacity) -> None:
    ticks = iter(float(tick) for tick in range(1000))
    executor = NullExecutor(capacity, [])
    assert decode_times(executor, 3, lambda: next(ticks)) == [1.0, 1.0, 1.0]


def test_the_choice_is_set_and_the_executor_is_as_new(tiny_folder: Folder) -> None:
    config = Config(
        model=ModelConfig(model=str(tiny_folder("qwen3"))),
        cache=CacheConfig(num_kv_blocks=64),
        device=DeviceConfig(device="cpu", threads=1),
    )
    executor = load_executor(config, lambda note: None)
    assert torch.get_num_threads() == 1
    assert executor.summary == "1 thread, as --threads says"
    before = PlanDriver(executor).run([[1, 2, 3]], 5)
    executor.reset()
    choice = choose_threads(executor, 2)
    assert torch.get_num_threads() == choice.threads
    assert sorted(choice.step_ms) == [1, 2]
    assert PlanDriver(executor).run([[1, 2, 3]], 5) == before
