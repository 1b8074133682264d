"""A worker whose model sleeps: its memory leaves the device and comes back to its addresses."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_worker_held_device_memory import GRAIN, PretendedDriver, awaited, memory_of
from test_worker_held_weights import an_account, load
from torch import Tensor

from penstock.protocol.config import Config, ModelConfig
from penstock.protocol.process import logs
from penstock.protocol.process.participant import Ended
from penstock.protocol.wire.messages.membership import Capacity, Phase, Sleep, Sleeper
from penstock.services.worker.executor import DeviceFailed
from penstock.services.worker.gpu import resting_memory
from penstock.services.worker.gpu.held_memory import HeldMemoryError
from penstock.services.worker.gpu.resting_memory import RestingMemory, pinned_memory
from penstock.services.worker.held import holding as holding_module
from penstock.services.worker.held.holding import Holding
from penstock.services.worker.held.memory import HostMemory
from penstock.services.worker.resting import Resting

Folder = Any


# --- memory


class FakePiece:
    """What is given back is lost."""

    def __init__(self, size: int, *, refusals: int = 0) -> None:
        self.memory = torch.arange(size, dtype=torch.uint8)
        self.is_there, self.is_protected = True, True
        self.copies, self._refusals = 0, refusals

    def give_back(self) -> None:
        assert self.is_there
        self.memory.fill_(255)
        self.is_there = self.is_protected = False

    def take_again(self) -> int:
        if self._refusals:
            self._refusals -= 1
            raise HeldMemoryError("cuMemCreate: out of memory (2)")
        self.is_there = True
        return len(self.memory)

    def protect(self) -> None:
        self.is_protected = True


def nothing() -> None: ...


def zeros(num_bytes: int) -> Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


def test_weights_come_back_as_they_were_and_kv_memory_as_zeros() -> None:
    weights, kv = [FakePiece(7), FakePiece(100)], FakePiece(50)
    asked = list[int]()

    def pinned(num_bytes: int) -> Tensor:
        asked.append(num_bytes)
        return zeros(num_bytes)

    memory = RestingMemory(weights, kv, pinned, nothing, nothing)
    for _ in range(2):
        memory.leave()
        assert not any(piece.is_there for piece in (*weights, kv))
        assert memory.come_back() == [7, 100, 50], "descriptors, KV memory's last"
        for piece in weights:
            assert torch.equal(piece.memory, torch.arange(len(piece.memory), dtype=torch.uint8))
            assert piece.is_protected
        assert not kv.memory.any()
    assert asked == [107], "they do not change: copied once"


def test_memory_that_another_model_is_about_to_give_back_is_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = RestingMemory([FakePiece(3, refusals=2)], None, zeros, nothing, nothing)
    memory.leave()
    assert memory.come_back() == [3]
    monkeypatch.setattr(resting_memory, "FREE_SECONDS", 0.0)
    memory = RestingMemory([FakePiece(3, refusals=1 << 30)], None, zeros, nothing, nothing)
    memory.leave()
    with pytest.raises(HeldMemoryError, match="cuMemCreate"):
        memory.come_back()


def test_a_piece_of_a_device_keeps_its_addresses_alone() -> None:
    driver = PretendedDriver()
    piece = memory_of(driver).make(100)
    (address,) = driver.mapped
    piece.give_back()
    os.close(piece.descriptor)
    assert driver.mapped == {} and len(driver.reserved) == 1
    assert "cuMemAddressFree" not in driver.calls
    descriptor = piece.take_again()
    assert list(driver.mapped) == [address] and len(driver.reserved) == 1
    assert not os.get_inheritable(descriptor)
    assert driver.handles == {}
    piece.protect()
    assert driver.access == [3, 3, 1]
    os.close(descriptor)


def test_kv_memory_of_a_predecessor_leaves_and_comes_back_as_own() -> None:
    piece = memory_of(PretendedDriver()).make(5 * GRAIN)
    driver = PretendedDriver()
    kv = awaited(driver, piece.descriptor, 5 * GRAIN)
    kv.memory = SimpleNamespace(zero_=nothing)  # type: ignore[assignment]
    kv.receive()
    (address,) = driver.mapped
    kv.give_back()
    assert driver.mapped == {}
    descriptor = kv.take_again()
    assert list(driver.mapped) == [address] and driver.handles == {}
    assert os.fstat(descriptor).st_size == 5 * GRAIN
    for each in (descriptor, piece.descriptor):
        os.close(each)


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemExportToShareableHandle", "cuMemMap"])
def test_what_is_refused_as_it_comes_back_leaves_nothing_behind(call: str) -> None:
    driver = PretendedDriver()
    piece = memory_of(driver).make(100)
    piece.give_back()
    os.close(piece.descriptor)
    before = len(os.listdir("/proc/self/fd"))
    driver._fails = call
    with pytest.raises(HeldMemoryError, match=call):
        piece.take_again()
    assert driver.handles == {} and driver.mapped == {}
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_of_the_host_is_pinned_as_a_whole() -> None:
    driver = memory_of(PretendedDriver())._driver
    memory = pinned_memory(driver, 3_000_001)
    assert len(memory) == 3_000_001 and not memory.any()
    assert "cuMemHostRegister_v2" in driver._library.calls


def test_a_host_that_has_too_little_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resting_memory, "free_host_bytes", lambda: 999)
    with pytest.raises(RuntimeError, match=r"1000 bytes .* 999 are free; use --sleep-level 2"):
        pinned_memory(memory_of(PretendedDriver())._driver, 1000)


# --- what is offered meanwhile


class PipeMemory:
    """Memory whose descriptors are pipes' ends."""

    def __init__(self) -> None:
        self.left = 0

    def leave(self) -> None:
        self.left += 1

    def come_back(self) -> list[int]:
        return [os.dup(0), os.dup(0)]


class LeavingMemory(HostMemory):
    def resting(self, pieces: Sequence[Any], kv: Any) -> Any:
        return PipeMemory()


class Holder:
    """Connections to it, and what was offered."""

    def __init__(self) -> None:
        self.offered = list[list[int]]()
        self.changed = threading.Condition()

    def connect(self, path: str) -> Connection:
        return Connection(self)

    def await_offers(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.offered) >= count, 30)


class Connection:
    def __init__(self, holder: Holder) -> None:
        self._holder, self._ended = holder, threading.Event()

    def offer(self, key: Any, manifest: bytes, num_bytes: int, descriptors: list[int]) -> str:
        for each in descriptors:
            os.fstat(each)
        with self._holder.changed:
            self._holder.offered.append(list(descriptors))
            self._holder.changed.notify_all()
        return ""

    def wait_for_end(self) -> None:
        self._ended.wait(60)

    def end(self) -> None:
        self._ended.set()

    def close(self) -> None: ...


def test_weights_are_offered_anew_once_they_are_back(
    tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = Holder()
    monkeypatch.setattr(holding_module, "HolderConnection", holder.connect)
    folder: Path = tiny_folder("qwen3")
    holding = Holding(Config(model=ModelConfig(model=str(folder))), torch.float32, LeavingMemory())
    assert not holding.may_leave
    holding.keep(load(folder), None, "", an_account())
    assert holding.may_leave
    (first,) = holder.offered
    holding.leave()
    for each in first:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(each)
    time.sleep(0.05)
    assert len(holder.offered) == 1, "there is nothing to offer"
    with pytest.raises(RuntimeError):
        holding.leave()
    holding.come_back()
    holder.await_offers(2)


def test_weights_of_the_host_leave_no_device(tiny_folder: Folder) -> None:
    holding = Holding(
        Config(model=ModelConfig(model=str(tiny_folder("qwen3")))), torch.float32, HostMemory()
    )
    assert not holding.may_leave
    with pytest.raises(RuntimeError):
        holding.leave()


# --- the worker


class Rests:
    def __init__(self) -> None:
        self.calls = list[str]()
        self.failure: Exception | None = None

    def leave(self) -> None:
        if self.failure is not None:
            raise self.failure
        self.calls.append("left")

    def come_back(self) -> None:
        self.calls.append("back")


class World:
    """What a worker's part sees, and what it says."""

    def __init__(self) -> None:
        self.phases = list[str]()
        self.schedulers = [SimpleNamespace(identity=SimpleNamespace(engine="0"))]
        self.sleepers = dict[str, Sleeper]()
        self.rests = Rests()
        self.executor: Any = SimpleNamespace(rests=self.rests)
        self.ended = list[Any]()
        log = logs.set_up("worker", "error", "json")
        self.part = Resting(self, "m", "0", self._phase, log)  # type: ignore[arg-type]

    def of(self, service: str, *, model: str) -> list[Any]:
        return self.schedulers

    def _phase(self, phase: str, note: str) -> None:
        self.phases.append(phase)

    def is_told(self, state: str, *, keeps: bool = True) -> None:
        self.sleepers = {"m": Sleeper("m", [], state, Capacity(), keeps_workers=keeps)}

    def look(self) -> None:
        self.executor = self.part.look(self.executor, self.ended.append)
        deadline = time.monotonic() + 30
        while self.part.is_moving and time.monotonic() < deadline:
            self.executor = self.part.look(self.executor, self.ended.append)


def test_a_worker_leaves_its_device_without_a_scheduler_and_comes_back_when_its_model_wakes() -> (
    None
):
    world = World()
    executor = world.executor
    world.is_told(Sleep.FALLING)
    world.look()
    assert world.executor is executor, "its scheduler may have steps under way"
    world.schedulers[0].identity.engine = "1"
    world.look()
    assert world.executor is None and world.ended == [executor]
    assert (world.rests.calls, world.phases) == (["left"], [Phase.LOADING, Phase.ASLEEP])
    world.is_told(Sleep.ASLEEP)
    world.look()
    world.sleepers.clear()
    world.look()
    assert world.executor is None, "a router that knows no sleepers wakes nobody"
    world.is_told(Sleep.WAKING)
    world.look()
    assert world.executor is executor
    assert (world.rests.calls, world.phases[2:]) == (["left", "back"], [Phase.LOADING, Phase.READY])
    world.look()
    assert world.executor is executor


def test_a_worker_of_another_kind_of_sleep_does_nothing() -> None:
    world = World()
    world.schedulers.clear()
    world.is_told(Sleep.FALLING, keeps=False)
    world.look()
    assert world.executor is not None and world.phases == []


def test_a_worker_whose_weights_cannot_leave_ends() -> None:
    world = World()
    world.schedulers.clear()
    world.is_told(Sleep.FALLING)
    world.executor.rests = None
    with pytest.raises(Ended, match="its model sleeps"):
        world.look()


def test_a_worker_whose_memory_does_not_move_ends() -> None:
    world = World()
    world.schedulers.clear()
    world.rests.failure = OSError("no memory")
    world.is_told(Sleep.FALLING)
    with pytest.raises(DeviceFailed, match="no memory"):
        world.look()
