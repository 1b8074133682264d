"""Processes that are prepared for a worker's end: when there are any, and for whom."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.protocol.config import Config
from penstock.protocol.wire.messages.membership import Capacity, Identity, Peer, Phase, Sleep
from penstock.services.launcher import processes
from penstock.services.launcher.processes import Child
from penstock.services.launcher.running_model import READY, RunningModel
from penstock.services.launcher.spares import Spares


class Lived(Child):
    """A child that is only said to live."""

    def __init__(self, service: str, number: int = 0) -> None:
        super().__init__(service, number, {"A": "b"})
        self.lives, self.number_of_pid = True, 100 + number
        self.kills = 0

    @property
    def pid(self) -> int:
        return self.number_of_pid if self.lives else 0

    @property
    def alive(self) -> bool:
        return self.lives

    def kill(self) -> None:
        self.kills += 1

    def spare(self) -> Child:
        found = Lived("worker", 50)
        found.held = True
        return found


class World:
    def __init__(self) -> None:
        self.running: list[Any] = []
        self.worker = Lived("worker")
        children = [self.worker, Lived("scheduler", 1), Lived("tokenizer", 2)]
        self.model = RunningModel(Config(), children, READY, 0.0)
        self.spares = Spares()
        self.spares.processes = self
        self.peers: dict[int, Peer] = {}
        self.joined(Phase.LOADING)

    def add(self, children: Sequence[Child]) -> None:
        self.running += children

    def remove(self, children: Sequence[Child]) -> None:
        self.running = [child for child in self.running if child not in children]

    def joined(self, phase: str) -> None:
        identity = Identity(self.worker.pid, "host")
        self.peers[self.worker.pid] = Peer("worker", "", 1, identity, phase, "", Capacity(), 0)

    def tick(self) -> None:
        self.spares.tick([self.model], self.peers)


def test_one_is_prepared_for_each_worker_once_that_is_ready() -> None:
    world = World()
    world.tick()
    assert world.running == [], "the machine is busy with the start"
    world.joined(Phase.READY)
    for _ in range(3):
        world.tick()
    (spare,) = world.running
    assert spare.held and world.spares.take(world.worker) is spare
    assert world.spares.take(Lived("scheduler")) is None
    spare.lives, spare.restart_at = False, 5.0
    assert world.spares.take(world.worker) is None, "it has died and will be started again"
    assert not world.spares.ended(spare)
    world.tick()
    assert world.running == [spare]


def test_another_one_is_prepared_when_it_took_a_place_and_its_worker_is_ready() -> None:
    world = World()
    world.joined(Phase.READY)
    world.tick()
    (spare,) = world.running
    spare.lives, spare.restart_at = False, None  # as ``Child.go_on_as`` leaves it
    world.joined(Phase.LOADING)
    world.tick()
    assert world.running == [spare]
    world.joined(Phase.READY)
    world.tick()
    world.tick()
    assert len(world.running) == 1 and world.running[0] is not spare


def test_none_stays_for_a_model_that_falls_asleep() -> None:
    world = World()
    world.joined(Phase.READY)
    world.tick()
    (spare,) = world.running
    world.model.enter(Sleep.FALLING, 1.0)
    world.tick()
    world.tick()
    assert spare.kills == 1 and world.running == [spare], "it is not dead yet"
    assert world.spares.ending, "what it has of a device is not free yet"
    assert world.spares.take(world.worker) is None
    spare.lives = False
    assert world.spares.ended(spare), "and is not started again"
    assert world.running == [] and not world.spares.ending


def test_one_that_is_dead_when_its_model_falls_asleep_is_forgotten() -> None:
    world = World()
    world.joined(Phase.READY)
    world.tick()
    (spare,) = world.running
    spare.lives, spare.restart_at = False, 9.0
    world.model.enter(Sleep.FALLING, 1.0)
    world.tick()
    assert world.running == [] and spare.restart_at is None and spare.kills == 0


def test_a_child_goes_on_as_the_process_of_its_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys\n"
        "i = sys.argv.index('--hold-fd') + 1 if '--hold-fd' in sys.argv else 0\n"
        "import os\n"
        "print(os.read(int(sys.argv[i]), 1) if i else '')\n"
    )
    monkeypatch.setattr(processes, "_command", lambda *_: [sys.executable, "-c", code])
    child = Child("worker", 3, dict(os.environ), model="m")
    child.start(time.monotonic())
    spare = child.spare()
    assert (spare.label, spare.environment) == ("worker 3 m, prepared", child.environment)
    spare.start(time.monotonic())
    child.reap(time.monotonic())
    assert child.restart_at is not None
    prepared = spare.pid
    child.go_on_as(spare, time.monotonic())
    assert (child.pid, child.restart_at, spare.alive, spare.pidfd) == (prepared, None, False, -1)
    select.select([child.pidfd], [], [], 60)
    assert child.reap(time.monotonic()) == 0
    assert child.last_words() == "b'1'", "it was told that it is wanted"


def test_a_spare_that_has_ended_is_prepared_without_its_device_the_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = "import sys; print(' '.join(sys.argv[1:]))"
    monkeypatch.setattr(processes, "_command", lambda *_: [sys.executable, "-c", code])
    worker = Child("worker", 0, dict(os.environ))
    spare, flags = worker.spare(), list[str]()
    for _ in range(2):
        spare.start(time.monotonic())
        select.select([spare.pidfd], [], [], 60)
        spare.reap(time.monotonic())
        flags.append(spare.last_words())
    assert "--on-device 1" in flags[0] and "--hold-fd" in flags[1]
    assert "--on-device" not in flags[1]
    assert worker.spare().on_device and not worker.on_device


def test_memory_of_a_stopped_process_is_free_before_its_replacement_loads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The memory of a device is stood for by the lock of a file, which ends with its process."""
    memory, loaded = tmp_path / "memory", tmp_path / "loaded"
    code = (
        "import fcntl, os, signal\n"
        f"memory = open({str(memory)!r}, 'w')\n"
        "fcntl.flock(memory, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        f"open({str(loaded)!r}, 'a').write('loaded\\n')\n"
        "os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    monkeypatch.setattr(processes, "_command", lambda *_: [sys.executable, "-c", code])
    child = Child("worker", 0, dict(os.environ))
    for times in (1, 2):
        child.start(time.monotonic())
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert loaded.read_text() == "loaded\n" * times
        child.kill()
        assert child.restart_at is None, "nothing is started while the old process is there"
        assert select.select([child.pidfd], [], [], 60)[0]
        assert child.reap(time.monotonic()) == -signal.SIGKILL
        assert child.restart_at is not None
        with memory.open() as free:
            fcntl.flock(free, fcntl.LOCK_EX | fcntl.LOCK_NB)
