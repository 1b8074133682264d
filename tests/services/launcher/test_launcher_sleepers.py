"""What the launcher does with models that sleep: with injected time, and no processes."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_launcher_models import FakeChild

from penstock.loadtest.models.make_model import make_model
from penstock.protocol.config import Config
from penstock.protocol.config.fields import ModelConfig
from penstock.protocol.config.process_fields import LaunchConfig
from penstock.protocol.process import logs
from penstock.protocol.process.metrics import Registry
from penstock.protocol.wire.messages.administration import (
    MODEL_STATES,
    SLEEP_MODEL,
    WAKE_MODEL,
    Ask,
    ModelAnswer,
)
from penstock.protocol.wire.messages.membership import (
    Capacity,
    Demand,
    Identity,
    Peer,
    Phase,
    Sleep,
    Sleeper,
)
from penstock.services.launcher.children import ModelChildren, ServerChildren
from penstock.services.launcher.model_set import ModelSet
from penstock.services.launcher.processes import Child
from penstock.services.launcher.residency import IDLE_SECONDS
from penstock.services.launcher.sleepers import MAX_FAILED_STARTS, REST_SECONDS, RETRY_SECONDS

DRAIN, STARTUP = 30.0, 100.0
NAMES = ("a", "b", "c")


class World:
    """All that a ``ModelSet`` sees and does, of three models of which two are awake."""

    def __init__(self, folder: Path, **launch: Any) -> None:
        given = {"resident": 2, "drain_timeout_s": DRAIN, "startup_timeout_s": STARTUP} | launch
        base = Config(launch=LaunchConfig(**given))
        self.now = 100.0
        self.processes: list[Child] = []
        self.peers: dict[int, Peer] = {}
        self.demands: dict[str, Demand] = {}
        self.sleepers: dict[str, Sleeper] = {}
        self.served: list[str] = []
        self.metrics = Registry()
        configs = [
            msgspec.structs.replace(
                base, model=ModelConfig(model=str(folder), served_model_name=[name, f"{name}-too"])
            )
            for name in NAMES
        ]
        self.engines: dict[str, list[Any]] = {
            name: [FakeChild("worker", at), FakeChild("scheduler", at)]
            for at, name in enumerate(NAMES)
        }
        self.tokenizers = {name: FakeChild("tokenizer", at) for at, name in enumerate(NAMES)}
        own = [ModelChildren(self.engines[name], [self.tokenizers[name]]) for name in NAMES]
        children = ServerChildren(FakeChild("router", 0), own, [], [])
        log = logs.set_up("launcher", "error", "json")
        self.models = ModelSet(configs, children, self, self, log, self.now)  # type: ignore[arg-type]
        self.models.processes = self
        for name in NAMES:
            self.joined(self.tokenizers[name], name)
            for child in self.engines[name]:
                child.lives = child not in self.models.asleep
                if child.lives:
                    self.joined(child, name)
        self.now += 7.0
        self.models.begin(self.now)

    # the supervisor and the membership

    def add(self, children: Sequence[Child]) -> None:
        self.processes += children
        for child in children:
            assert isinstance(child, FakeChild)
            child.lives, child.sent = True, []

    def remove(self, children: Sequence[Child]) -> None:
        self.processes = [child for child in self.processes if child not in children]

    def own(self) -> Mapping[int, Peer]:
        return self.peers

    def everybody(self) -> Sequence[Peer]:
        return list(self.peers.values())

    def open_requests(self, model: str) -> int:
        return self.demand(model).open

    def unload(self, models: Sequence[str]) -> None:
        assert not models

    def demand(self, model: str) -> Demand:
        return self.demands.get(model, Demand())

    def sleep(self, sleepers: Sequence[Sleeper]) -> None:
        self.sleepers = {one.model: one for one in sleepers}

    def serve(self, models: Sequence[str]) -> None:
        self.served = list(models)

    def report(self, metrics: Registry) -> None:
        self.metrics = metrics

    # what the tests do

    def joined(self, child: Child, name: str, phase: str = Phase.READY) -> None:
        capacity = Capacity(max_model_len=64, max_num_seqs=4)
        identity = Identity(child.pid, "host", model=name)
        self.peers[child.pid] = Peer(child.service, "", child.pid, identity, phase, "", capacity, 0)

    def died(self, child: Any, *, excused: bool = False) -> bool:
        """Returns whether it stays dead."""
        self.peers.pop(child.pid, None)
        child.lives = False
        return self.models.ended(child, f"{child.label} ended", excused=excused, now=self.now)

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.models.tick(self.now)

    def wants(self, name: str, held: int = 1) -> None:
        self.demands[name] = Demand(open=held, held=held)

    def ask(self, what: str, name: str = "") -> ModelAnswer:
        told = self.models.answer(Ask("ipc:///f", 7, what, name.encode()), self.now)
        return msgspec.msgpack.decode(told.answer, type=ModelAnswer)

    def states(self) -> dict[str, str]:
        return {one.name: one.state for one in self.ask(MODEL_STATES).models}

    def fallen(self, name: str) -> None:
        """Its engine ends as it is told to."""
        worker, scheduler = self.engines[name]
        assert scheduler.sent == [signal.SIGTERM]
        assert worker.sent == []
        assert self.died(scheduler)
        self.tick()
        assert worker.sent == [signal.SIGTERM]
        assert self.died(worker)
        self.tick()

    def woken(self, name: str) -> None:
        for child in self.engines[name]:
            self.joined(child, name)
        self.tick()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found: Path = make_model(tmp_path_factory.mktemp("sleepers") / "m", max_position_embeddings=128)
    return found


@pytest.fixture
def world(folder: Path) -> World:
    return World(folder)


def test_the_first_models_are_awake_and_the_others_are_told_of_by_their_folders(
    world: World,
) -> None:
    assert world.states() == {"a": "ready", "b": "ready", "c": "asleep"}
    assert world.models.asleep == world.engines["c"]
    told = world.sleepers["c"]
    assert (told.state, told.aliases, told.capacity.max_model_len) == (Sleep.ASLEEP, ["c-too"], 128)
    assert told.wake_s == 7.0, "as long as the others took to start"
    assert world.served == ["a", "b", "c"]


def test_a_request_puts_the_least_used_model_to_sleep_and_wakes_its_own(world: World) -> None:
    world.demands["a"] = Demand(open=1)
    world.tick(1.0)
    world.wants("c")
    world.demands["a"] = Demand()
    world.tick(IDLE_SECONDS)
    assert world.states() == {"a": "ready", "b": "falling asleep", "c": "asleep"}
    assert world.processes == [], "its memory is not free yet"
    world.fallen("b")
    assert world.states() == {"a": "ready", "b": "asleep", "c": "waking"}
    assert world.processes == world.engines["c"]
    assert world.sleepers["b"].capacity.max_model_len == 64, "what its engine has said"
    world.now += 2.5
    world.woken("c")
    assert world.states()["c"] == "ready"
    assert set(world.sleepers) == {"b"}
    samples = {(s.name, *s.labels): s.values[0] for s in world.metrics.report().samples}
    assert samples["model_awake", "b"] == 0.0
    assert samples["model_awake", "c"] == samples["model_wakes_total", "c", "awake"] == 1.0
    assert samples["model_sleeps_total", "b", "wanted"] == 1.0
    world.demands = {}
    world.wants("b")
    world.tick(IDLE_SECONDS)
    assert world.sleepers["a"].wake_s == pytest.approx(9.0), "with the time to fall asleep"
    world.fallen("a")
    assert world.sleepers["a"].wake_s == pytest.approx(7.0)


def test_whoever_dies_while_a_model_falls_asleep_does_not_come_back(world: World) -> None:
    world.ask(SLEEP_MODEL, "a")
    worker, scheduler = world.engines["a"]
    assert world.died(worker)
    assert not world.died(world.tokenizers["a"]), "tokenizers stay"
    world.tick()
    assert world.died(scheduler)
    world.tick()
    assert world.states()["a"] == "asleep"


def test_an_engine_that_does_not_end_is_killed_behind_its_drain(world: World) -> None:
    world.ask(SLEEP_MODEL, "a-too")
    _, scheduler = world.engines["a"]
    world.tick(DRAIN + 4.0)
    assert scheduler.sent == [signal.SIGTERM]
    world.tick(60.0)
    assert scheduler.sent[-1] == signal.SIGKILL


def test_an_engine_that_dies_while_it_wakes_is_started_again_a_few_times(world: World) -> None:
    world.ask(SLEEP_MODEL, "a")
    world.fallen("a")
    world.wants("c", held=3)
    world.tick()
    worker, scheduler = world.engines["c"]
    for _ in range(MAX_FAILED_STARTS - 1):
        assert not world.died(worker), "the supervisor starts it again"
        worker.lives = True
    assert not world.died(worker, excused=True)
    assert world.states()["c"] == "waking"
    worker.lives = True
    assert world.died(worker)
    assert "worker 2 ended" in world.sleepers["c"].reason, "who waits is told so"
    assert world.sleepers["c"].wake_s == pytest.approx(RETRY_SECONDS + 7.0)
    world.tick()
    assert scheduler.sent == [signal.SIGKILL]
    assert world.died(scheduler)
    world.tick()
    (state,) = [one for one in world.ask(MODEL_STATES).models if one.name == "c"]
    assert (state.state, state.reason) == ("asleep", "worker 2 ended")
    world.tick(RETRY_SECONDS - 1.0)
    assert world.states()["c"] == "asleep"
    world.tick(1.0)
    assert world.states()["c"] == "waking"
    assert world.sleepers["c"].reason == ""


def test_a_model_that_takes_too_long_to_wake_has_failed(world: World) -> None:
    world.ask(SLEEP_MODEL, "a")
    world.fallen("a")
    world.wants("c")
    world.tick()
    world.tick(STARTUP + 0.1)
    reason = world.sleepers["c"].reason
    assert "not ready within 100 s (worker 2 is silent" in reason
    assert "--startup-timeout-s" in reason


def test_administrators_put_models_to_sleep_and_wake_them(world: World) -> None:
    assert world.ask(SLEEP_MODEL, "a").models[0].state == "falling asleep"
    world.fallen("a")
    assert world.ask(SLEEP_MODEL, "a").models[0].state == "asleep", "it does already"
    assert world.ask(WAKE_MODEL, "a").models[0].state == "asleep"
    world.tick()
    assert world.states()["a"] == "waking"
    answer = world.ask(SLEEP_MODEL, "a")
    assert (answer.status, answer.code) == (409, "model_waking")
    world.woken("a")
    assert world.ask(WAKE_MODEL, "a").models[0].state == "ready"
    assert world.ask(SLEEP_MODEL, "nobody").code == "model_not_found"


def test_an_administrator_who_wants_a_model_asleep_again_takes_back_that_it_is_to_wake(
    world: World,
) -> None:
    world.demands = {name: Demand(open=1) for name in ("a", "b")}
    world.tick()
    assert world.ask(WAKE_MODEL, "c").models[0].state == "asleep", "others have the places"
    assert world.ask(SLEEP_MODEL, "c").models[0].state == "asleep"
    world.demands = {}
    world.tick(60.0)
    world.tick(60.0)
    assert world.states() == {"a": "ready", "b": "ready", "c": "asleep"}


def test_a_server_that_ends_wakes_no_model_that_only_an_administrator_wants(world: World) -> None:
    world.ask(SLEEP_MODEL, "a")
    world.fallen("a")
    world.ask(WAKE_MODEL, "a")
    world.wants("c")
    world.models.close()
    world.tick()
    assert world.states() == {"a": "asleep", "b": "ready", "c": "waking"}


def test_a_model_with_a_keep_alive_falls_asleep_though_it_is_the_only_one_in_use(
    folder: Path,
) -> None:
    world = World(folder, resident=None, keep_alive=["10m", "-1", "0"])
    assert world.states() == dict.fromkeys(NAMES, "ready")
    world.tick(IDLE_SECONDS)
    assert world.states() == {"a": "ready", "b": "ready", "c": "falling asleep"}
    world.tick(599.0)
    assert world.states()["a"] == "falling asleep"
    assert world.states()["b"] == "ready"


def test_without_its_flags_no_model_sleeps_and_the_refusal_names_them(folder: Path) -> None:
    world = World(folder, resident=None)
    for what in (SLEEP_MODEL, WAKE_MODEL):
        answer = world.ask(what, "a")
        assert (answer.status, answer.code) == (403, "model_sleep_off")
        assert "--resident" in answer.message
    assert world.models.asleep == []
    assert world.served == []


def test_a_server_that_ends_puts_nothing_to_sleep(world: World) -> None:
    world.models.close()
    assert world.ask(SLEEP_MODEL, "a").status == 503


def test_engines_of_models_that_sleep_are_started_ahead_and_let_go(folder: Path) -> None:
    world = World(folder, prepare_engines=True)
    released: list[Any] = []
    for name in NAMES:
        for child in world.engines[name]:
            child.release = lambda child=child: released.append(child)
    world.tick()
    worker, scheduler = world.engines["c"]
    assert (world.processes, worker.held, scheduler.held) == ([worker, scheduler], True, True)
    world.wants("c")
    world.tick(IDLE_SECONDS)
    assert world.states()["a"] == "falling asleep"
    world.fallen("a")
    assert world.states()["c"] == "waking"
    assert world.processes == [worker, scheduler]
    assert released == [worker, scheduler]
    assert not world.engines["a"][0].held, "not while another one wakes"
    worker.held = scheduler.held = False
    world.woken("c")
    world.tick()
    assert world.processes[2:] == world.engines["a"]
    world.tick()
    assert len(world.processes) == 4, "once"


def test_a_process_that_ends_while_it_is_held_is_started_when_it_is_wanted(folder: Path) -> None:
    released: list[Any] = []
    world = World(folder, prepare_engines=True)
    world.tick()
    worker, scheduler = world.engines["c"]
    assert world.died(worker)
    world.tick()
    assert not worker.alive, "it may be that there is no memory for it"
    scheduler.release = lambda: released.append(scheduler)
    world.ask(SLEEP_MODEL, "a")
    world.fallen("a")
    world.wants("c")
    world.tick()
    assert world.processes.count(worker) == 1
    assert worker.alive
    assert not worker.held
    assert released == [scheduler]


def test_a_worker_that_keeps_its_weights_stays_and_comes_back(folder: Path) -> None:
    world = World(folder, sleep_level=1)
    worker, scheduler = world.engines["a"]
    world.ask(SLEEP_MODEL, "a")
    assert scheduler.sent == [signal.SIGTERM]
    assert world.sleepers["a"].keeps_workers
    world.died(scheduler)
    world.tick(1.0)
    assert world.states()["a"] == "falling asleep", "its weights are on the device"
    world.joined(worker, "a", Phase.ASLEEP)
    world.tick()
    assert (world.states()["a"], worker.sent) == ("asleep", [])
    world.wants("a")
    world.tick()
    assert world.states()["a"] == "waking"
    assert scheduler in world.processes, "it was started ahead"
    assert worker not in world.processes, "the worker need not be started"
    world.woken("a")
    assert world.states()["a"] == "ready"


def test_where_workers_stay_the_schedulers_of_all_that_sleep_are_started_ahead(
    folder: Path,
) -> None:
    world = World(folder, sleep_level=1)
    world.tick()
    worker, scheduler = world.engines["c"]
    assert scheduler.held and scheduler in world.processes
    assert not worker.held and worker not in world.processes, "it would have to load"


def test_a_worker_that_does_not_leave_its_device_is_killed(folder: Path) -> None:
    world = World(folder, sleep_level=1)
    worker, scheduler = world.engines["a"]
    world.ask(SLEEP_MODEL, "a")
    world.died(scheduler)
    world.tick(DRAIN + REST_SECONDS)
    assert not worker.killed
    world.tick(1.0)
    world.tick()
    assert worker.killed
    assert world.died(worker)
    world.tick()
    assert world.states()["a"] == "asleep"


def test_a_worker_that_ends_while_its_model_sleeps_is_started_when_that_wakes(
    folder: Path,
) -> None:
    world = World(folder, sleep_level=1, prepare_engines=True)
    for child in world.engines["a"]:
        child.release = lambda: None
    worker, scheduler = world.engines["a"]
    world.ask(SLEEP_MODEL, "a")
    world.died(scheduler)
    world.joined(worker, "a", Phase.ASLEEP)
    world.tick()
    world.tick()
    assert scheduler.held and not worker.held, "what has ended is prepared"
    assert world.died(worker), "nobody wants it now"
    world.wants("a")
    world.tick()
    assert worker in world.processes
