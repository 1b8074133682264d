"""The numbers of CPU threads are measured, for decode and prefill apart, and again in pauses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.worker.plan_driver import PlanDriver

from penstock.protocol.config import (
    CacheConfig,
    ClusterConfig,
    Config,
    DeviceConfig,
    ModelConfig,
)
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.steps import StepPlan, StepResult
from penstock.services.worker.cpu_threads import (
    FIRST_INTERVAL,
    LONGEST_INTERVAL,
    LOOKS,
    MOST_SECONDS,
    PAUSE_SECONDS,
    PREFILL_ROWS,
    REMEMBERED,
    ROWS,
    StepThreads,
    ThreadChoice,
    ThreadReview,
    ThreadTrial,
    agreeing,
    candidates,
    decode_steps,
    preferred,
    prefill_steps,
    trial_capacity,
)
from penstock.services.worker.loading import load_executor
from penstock.services.worker.model_executor import MANY_ROWS, ModelExecutor
from penstock.services.worker.null_engine import NullExecutor
from penstock.services.worker.service import WorkerService

Folder = Callable[[str], Path]
CAPACITY = EngineSizes(64, 16, 64, 256, 512, 99)


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
        ({4: 0.5, 2: 0.9, 1: 1.0}, 4),
        ({1: 1.0, 2: 15.0}, 1),
    ],
)
def test_more_threads_must_be_clearly_faster(seconds: dict[int, float], expected: int) -> None:
    assert preferred(seconds) == expected


def test_a_choice_tells_what_was_measured() -> None:
    choice = ThreadChoice(StepThreads(1, 2), {2: 19.0, 1: 1.23}, {2: 61.0, 1: 99.0})
    assert str(choice) == (
        "decode on 1 thread: a step takes 1.2 ms with 1, 19 ms with 2; "
        "prefill on 2 threads: a step takes 99 ms with 1, 61 ms with 2"
    )


class Machine(NullExecutor):
    """Steps take so many seconds with so many threads; others at work make two threads slow."""

    def __init__(self, slowness: float = 1.0) -> None:
        super().__init__(trial_capacity(CAPACITY), [])
        self.slowness = slowness
        self.now = 0.0
        self.busy = False
        self.measured: list[int] = []

    def execute(self, plan: StepPlan) -> StepResult:
        threads = torch.get_num_threads()
        self.measured.append(threads)
        rows = sum(chunk.count for chunk in plan.chunks)
        alone = 0.0011 * rows if rows > ROWS else 0.010
        shared = 0.0006 * rows if rows > ROWS else 0.009
        taken = alone if threads == 1 else shared * (20.0 if self.busy else 1.0)
        self.now += self.slowness * taken
        return super().execute(plan)

    def clock(self) -> float:
        return self.now


def trial_on(machine: Machine) -> ThreadTrial:
    return ThreadTrial(machine, [1, 2], machine.clock)


@pytest.mark.parametrize("capacity", [CAPACITY, EngineSizes(1, 8, 1, 1, 8, 99)])
def test_steps_are_measured_within_the_capacity(capacity: EngineSizes) -> None:
    ticks = iter(float(tick) for tick in range(1000))
    executor = NullExecutor(trial_capacity(capacity), [])
    for steps in (decode_steps, prefill_steps):
        found = [one for one in steps(executor, lambda: next(ticks)) if one is not None]
        assert found and set(found) == {1.0}
    assert executor.capacity.num_blocks <= capacity.num_blocks
    assert executor.capacity.max_model_len <= capacity.max_model_len


def test_decode_and_prefill_choose_apart() -> None:
    machine = Machine()
    choice = trial_on(machine).start()
    assert choice.threads == StepThreads(decode=1, prefill=2)
    assert choice.prefill_ms == pytest.approx({1: 1.1 * PREFILL_ROWS, 2: 0.6 * PREFILL_ROWS})
    assert machine.now < 5.0


def looked_again(trial: ThreadTrial) -> StepThreads:
    for _ in trial.again():
        pass
    return trial.choice.threads


def test_a_quiet_look_corrects_a_busy_one_and_only_a_machine_that_stays_busy_a_right_one() -> None:
    machine = Machine()
    machine.busy = True
    trial = trial_on(machine)
    assert trial.start().threads.prefill == 1
    machine.busy = False
    assert looked_again(trial).prefill == 2
    machine.busy = True
    assert [looked_again(trial).prefill for _ in range(REMEMBERED)] == [2] * (REMEMBERED - 1) + [1]


def test_a_step_that_takes_too_long_for_a_pause_is_the_last_of_its_kind() -> None:
    machine = Machine()
    trial = trial_on(machine)
    trial.start()
    machine.busy = True
    slow = 20 * 0.0006 * PREFILL_ROWS
    assert slow > MOST_SECONDS
    taken, before = [], machine.now
    for _ in trial.again():
        taken.append(machine.now - before)
        before = machine.now
    assert sum(seconds > MOST_SECONDS for seconds in taken) == 1


def test_steps_that_are_always_too_long_for_a_pause_are_measured_at_the_start_alone() -> None:
    machine = Machine(slowness=10.0)
    trial = trial_on(machine)
    choice = trial.start().threads
    before, machine.measured = machine.now, []
    assert looked_again(trial) == choice == StepThreads(1, 2)
    assert machine.measured and machine.now - before < 10.0, "decode alone"


def pauses(review: ThreadReview, since: float, until: float, used: bool = False) -> list[float]:
    """When it measured something, in a pause that is looked at four times a second."""
    found = []
    if used:
        review.used()
    for quarter in range(int(4 * since), int(4 * until)):
        now = quarter / 4
        while review.go_on(now, now - since):
            found.append(now)
    return found


def test_an_idle_server_looks_a_few_times_and_then_never_again() -> None:
    machine = Machine()
    trial = trial_on(machine)
    trial.start()
    review = ThreadReview(trial)
    began = machine.now
    found = pauses(review, 0.0, 100_000.0)
    assert found and min(found) >= PAUSE_SECONDS
    assert len(set(found)) == LOOKS - 1
    assert machine.now - began < 10.0
    assert not pauses(review, 100_000.0, 200_000.0)


def test_a_server_that_is_used_looks_ever_more_seldom_and_never_before_a_pause() -> None:
    machine = Machine()
    trial = trial_on(machine)
    trial.start()
    review = ThreadReview(trial)
    looks, now = [], 0.0
    while now < 20 * LONGEST_INTERVAL:
        assert not pauses(review, now, now + PAUSE_SECONDS, used=True)
        looks += sorted(set(pauses(review, now, now + 5.0)))
        now += 5.0
    gaps = [after - before for before, after in pairwise(looks)]
    assert gaps[0] >= FIRST_INTERVAL
    assert gaps == sorted(gaps)
    assert LONGEST_INTERVAL <= gaps[-1] < LONGEST_INTERVAL + 10.0


class Uneven:
    """Logits that depend on the number of threads from three on."""

    capacity = CAPACITY

    def logits(self, plan: StepPlan) -> torch.Tensor:
        return torch.ones(1, 3) * (1.0 if torch.get_num_threads() < 3 else 1.0 + 1e-6)

    def reset(self) -> None: ...


def test_a_number_of_threads_that_changes_bits_is_not_chosen() -> None:
    assert agreeing(Uneven(), [1, 2, 3, 4]) == [1, 2]


def loaded(folder: Path, threads: int | None) -> Any:
    config = Config(
        model=ModelConfig(model=str(folder)),
        cache=CacheConfig(num_kv_blocks=64),
        device=DeviceConfig(device="cpu", threads=threads),
    )
    return load_executor(config, lambda note: None)


def test_threads_that_are_given_are_what_every_step_has(tiny_folder: Folder) -> None:
    executor = loaded(tiny_folder("qwen3"), 1)
    assert executor.summary == "1 thread, as --threads says"
    assert executor.threads == StepThreads(1, 1)
    assert not executor.improve(1e9, 1e9)


def test_steps_of_decode_and_of_prefill_have_their_own_number(
    tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor: ModelExecutor = loaded(tiny_folder("qwen3"), 1)
    executor.threads = StepThreads(1, 2)
    found: list[tuple[int, int]] = []
    plain = executor._model.hidden

    def hidden(step: Any, *others: Any) -> Any:
        found.append((len(step.tokens), torch.get_num_threads()))
        return plain(step, *others)

    monkeypatch.setattr(executor._model, "hidden", hidden)
    PlanDriver(executor).run([[1] * (MANY_ROWS + 5)], 3)
    assert [threads for rows, threads in found if rows >= MANY_ROWS] == [2]
    assert {threads for rows, threads in found if rows < MANY_ROWS} == {1}


@pytest.mark.slow
def test_looking_again_changes_no_token_and_touches_no_cached_block(tiny_folder: Folder) -> None:
    executor: ModelExecutor = loaded(tiny_folder("qwen3"), None)
    before = PlanDriver(executor).run([[1, 2, 3] * 20], 5)
    keys = [key.clone() for key, _ in executor._memory.layers]
    trial = ThreadTrial(ModelExecutor(executor._model, trial_capacity(executor.capacity)), [1, 2])
    trial.start()
    executor.review = ThreadReview(trial)
    now = time.monotonic()
    assert not executor.improve(now, 1.0)
    pieces = 0
    while executor.improve(now, 60.0):
        pieces += 1
    assert pieces > 10
    assert executor.threads == executor.review.choice.threads
    for (key, _), cached in zip(executor._memory.layers, keys, strict=True):
        assert torch.equal(key, cached)
    executor.reset()
    assert PlanDriver(executor).run([[1, 2, 3] * 20], 5) == before


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[WorkerService]:
    service = WorkerService(Config(cluster=ClusterConfig(router=f"ipc://{tmp_path}/router.sock")))
    yield service
    service.mailbox.close()


class Improving(NullExecutor):
    """Has three pieces of work for a pause of two seconds."""

    def __init__(self) -> None:
        super().__init__(CAPACITY, [])
        self.left = 3

    def improve(self, now: float, pause: float) -> bool:
        if pause < 2.0 or not self.left:
            return False
        self.left -= 1
        self.summary = f"{self.left} left"
        return self.left > 0


def test_a_worker_uses_its_pauses_piece_by_piece_and_sleeps_when_that_is_done(
    worker: WorkerService,
) -> None:
    worker.executor = executor = Improving()
    for now in (100.0, 101.0):
        worker._expected = 7  # after a step
        worker.on_tick(now)
        assert executor.left == 3 and worker.patience(now) > 0
    worker.on_tick(102.25)
    assert executor.left == 2 and worker.patience(102.25) == 0.0
    worker._expected = 8  # a step came in between
    worker.work(102.5)
    assert executor.left == 2 and worker.patience(102.5) > 0
    worker.on_tick(103.0)
    worker.on_tick(105.25)
    worker.work(105.25)
    assert executor.left == 0 and worker.patience(105.25) > 0
