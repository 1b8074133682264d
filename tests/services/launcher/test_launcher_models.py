"""What the launcher does with models that come and go: with injected time, and no processes."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.protocol.config import ClusterConfig, Config, ConfigError
from penstock.protocol.config.complete import AnotherModel
from penstock.protocol.config.fields import ModelConfig
from penstock.protocol.config.process_fields import LaunchConfig
from penstock.protocol.process import logs
from penstock.protocol.wire.messages.administration import (
    LOAD_MODEL,
    MODEL_STATES,
    UNLOAD_MODEL,
    Ask,
    LoadModel,
    ModelAnswer,
)
from penstock.protocol.wire.messages.engine import Adapter
from penstock.protocol.wire.messages.membership import Capacity, Identity, Members, Peer, Phase
from penstock.services.launcher.children import ModelChildren, ServerChildren
from penstock.services.launcher.cluster_view import HOST, ClusterView
from penstock.services.launcher.model_set import MAX_FAILED, MAX_MODELS, ModelSet
from penstock.services.launcher.processes import Child
from penstock.services.launcher.running_model import STOP_SECONDS, WITHDRAWAL_SECONDS

SERVICES = ("worker", "scheduler", "tokenizer")
DRAIN, STARTUP = 30.0, 100.0


class FakeChild(Child):
    """A process that is only said to live."""

    last_pid = 1000

    def __init__(self, service: str, number: int) -> None:
        super().__init__(service, number, {})
        self.sent: list[int] = []
        FakeChild.last_pid += 1
        self._pid = FakeChild.last_pid
        self.lives = True

    @property
    def pid(self) -> int:
        return self._pid if self.lives else 0

    @property
    def alive(self) -> bool:
        return self.lives

    def signal(self, number: int) -> None:
        self.sent.append(number)


class World:
    """All that a ``ModelSet`` sees and does."""

    def __init__(self, dirs: Path, models: Sequence[str] = ("first",)) -> None:
        launch = LaunchConfig(
            model_dirs=[str(dirs)], drain_timeout_s=DRAIN, startup_timeout_s=STARTUP
        )
        self.base = Config(launch=launch)
        self.now = 100.0
        self.processes: list[Any] = []
        self.peers: list[Peer] = []
        self.unloading: list[str] = []
        self.open: dict[str, int] = {}
        self.serving: list[str] = []
        self.refusal: Exception | None = None
        configs = [self._config(name, f"/m/{name}") for name in models]
        children = ServerChildren(
            FakeChild("router", 0), [ModelChildren(self.some(), []) for _ in models], [], []
        )
        log = logs.set_up("launcher", "error", "json")
        self.models = ModelSet(configs, children, self, self, log, self.now)
        self.models.processes = self

    def _config(self, name: str, folder: str) -> Config:
        model = ModelConfig(model=folder, served_model_name=[name, f"{name}-alias"])
        return msgspec.structs.replace(self.base, model=model)

    def some(self) -> list[Any]:
        return [FakeChild(service, 1) for service in SERVICES]

    # what new models are made with

    def configure(self, another: AnotherModel, running: list[Config]) -> Config:
        if self.refusal is not None:
            raise self.refusal
        return self._config(another.name or Path(another.folder).name, another.folder)

    def children(self, config: Config, place: int) -> Sequence[Child]:
        return self.some()

    def changed(self, models: Sequence[Any]) -> None:
        self.serving = [model.name for model in models]

    # the supervisor

    def add(self, children: Sequence[Child]) -> None:
        self.processes += children

    def remove(self, children: Sequence[Child]) -> None:
        self.processes = [child for child in self.processes if child not in children]

    # the membership

    def own(self) -> Mapping[int, Peer]:
        return {peer.identity.pid: peer for peer in self.peers}

    def everybody(self) -> Sequence[Peer]:
        return self.peers

    def open_requests(self, model: str) -> int:
        return self.open.get(model, 0)

    def unload(self, models: Sequence[str]) -> None:
        self.unloading = list(models)

    # what the tests do

    def ask(self, what: str, about: bytes = b"") -> ModelAnswer:
        told = self.models.answer(Ask("ipc:///f", 7, what, about), self.now)
        assert told.number == 7
        return msgspec.msgpack.decode(told.answer, type=ModelAnswer)

    def load(self, folder: str, name: str = "") -> ModelAnswer:
        return self.ask(LOAD_MODEL, msgspec.msgpack.encode(LoadModel(folder, name)))

    def states(self) -> dict[str, str]:
        return {one.name: one.state for one in self.ask(MODEL_STATES).models}

    def joined(self, *children: Child, phase: str = Phase.READY, model: str = "") -> None:
        for child in children:
            identity = Identity(child.pid, "host", model=model)
            self.peers.append(Peer("", "", child.pid, identity, phase, "", Capacity(), 0))

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.models.tick(self.now)

    def died(self, child: Child, *, excused: bool = False) -> bool:
        """Returns whether it stays dead."""
        assert isinstance(child, FakeChild)
        child.lives = False
        return self.models.ended(child, f"{child.label} ended", excused=excused, now=self.now)

    def ready(self, name: str) -> list[Any]:
        """Load a model to the end. Returns its processes."""
        before = list(self.processes)
        assert self.load(name).status == 200
        new = [child for child in self.processes if child not in before]
        self.joined(*new)
        self.tick()
        assert self.states()[name] == "ready"
        return new


@pytest.fixture
def world(tmp_path: Path) -> World:
    for name in ("second", "third"):
        (tmp_path / name).mkdir()
    world = World(tmp_path)
    world.models.begin()
    return world


def refused(answer: ModelAnswer) -> tuple[int, str]:
    assert answer.models == []
    assert answer.message
    return answer.status, answer.code


def test_a_model_is_ready_when_all_its_processes_are(world: World) -> None:
    (state,) = world.load("second").models
    assert (state.name, state.aliases, state.state) == ("second", ["second-alias"], "loading")
    worker, scheduler, tokenizer = world.processes
    world.joined(worker, scheduler)
    world.joined(tokenizer, phase=Phase.LOADING)
    world.tick(5.0)
    assert world.states() == {"first": "ready", "second": "loading"}
    state = world.ask(MODEL_STATES).models[1]
    assert (state.seconds, state.note) == (5.0, "tokenizer 1: loading")
    assert world.serving == []
    world.peers.pop()
    world.joined(tokenizer)
    world.tick()
    assert world.states() == {"first": "ready", "second": "ready"}
    assert world.serving == ["first", "second"]
    assert not world.died(worker), "what was ready is started again"


def test_a_load_of_which_a_process_ends_fails_as_a_whole_and_for_good(world: World) -> None:
    world.load("second")
    worker, *others = list(world.processes)
    assert world.died(worker)
    world.tick()
    assert [child.sent for child in others] == [[signal.SIGKILL]] * 2
    assert world.unloading == ["second"], "whoever was ready already gets no request"
    assert world.processes
    assert [world.died(child) for child in others] == [True, True]
    world.tick(1.0)
    assert (world.processes, world.unloading) == ([], [])
    state = world.ask(MODEL_STATES).models[1]
    assert (state.state, state.reason) == ("failed", "worker 1 ended")
    assert world.load("second").models[0].state == "loading", "it may be tried again"
    assert list(world.states()) == ["first", "second"]


def test_a_failed_load_is_forgotten_when_its_processes_have_ended(world: World) -> None:
    world.load("second")
    worker, *others = list(world.processes)
    world.died(worker)
    assert world.ask(UNLOAD_MODEL, b"second").models[0].state == "draining"
    world.tick()
    assert [child.sent for child in others] == [[signal.SIGKILL]] * 2
    for child in others:
        world.died(child)
    world.tick()
    assert (world.states(), world.processes, world.unloading) == ({"first": "ready"}, [], [])


def test_a_process_that_a_busy_machine_kept_from_its_beats_fails_no_load(world: World) -> None:
    world.load("second")
    assert not world.died(world.processes[0], excused=True)
    assert world.states()["second"] == "loading"


def test_a_load_that_takes_too_long_fails(world: World) -> None:
    world.load("second")
    world.joined(world.processes[0], phase=Phase.LOADING)
    world.tick(STARTUP)
    assert world.states()["second"] == "loading"
    world.tick(0.1)
    reason = world.ask(MODEL_STATES).models[1].reason
    assert "not ready within 100 s (worker 1: loading, scheduler 1 is silent" in reason
    assert all(child.sent == [signal.SIGKILL] for child in world.processes)


def test_a_model_that_goes_finishes_what_runs_and_ends_in_order(world: World) -> None:
    worker, scheduler, tokenizer = own = world.ready("second")
    world.open["second"] = 2
    (state,) = world.ask(UNLOAD_MODEL, b"second-alias").models
    assert state.state == "draining"
    assert world.unloading == ["second"]
    world.tick(DRAIN - 1.0)
    assert not any(child.sent for child in own)
    assert world.died(scheduler), "nothing of it is started again"
    scheduler.lives = True
    world.open["second"] = 0
    world.tick()
    later = [tokenizer, scheduler, worker]
    while later:
        child = later.pop(0)
        assert (child.sent, [one.sent for one in later]) == ([signal.SIGTERM], [[] for _ in later])
        assert world.died(child)
        world.tick()
    assert world.states() == {"first": "ready"}
    assert (world.processes, world.unloading, world.serving) == ([], [], ["first"])


def test_requests_that_do_not_end_hold_an_unloading_up_for_the_time_of_a_drain(
    world: World,
) -> None:
    *_, tokenizer = world.ready("second")
    world.open["second"] = 1
    world.ask(UNLOAD_MODEL, b"second")
    world.tick(DRAIN)
    assert tokenizer.sent == [signal.SIGTERM]
    world.tick(STOP_SECONDS)
    assert tokenizer.sent == [signal.SIGTERM]
    world.tick(0.1)
    assert tokenizer.sent[1:] == [signal.SIGKILL]


def test_an_unloading_waits_until_what_the_frontends_have_is_known(world: World) -> None:
    *_, tokenizer = world.ready("second")
    world.ask(UNLOAD_MODEL, b"second")
    world.tick(WITHDRAWAL_SECONDS - 0.1)
    assert tokenizer.sent == []
    world.tick(0.1)
    assert tokenizer.sent == [signal.SIGTERM]


def test_what_is_loading_can_be_unloaded(world: World) -> None:
    world.load("second")
    assert world.ask(UNLOAD_MODEL, b"second").models[0].state == "draining"
    for child in list(world.processes):
        assert world.died(child)
    world.tick(WITHDRAWAL_SECONDS)
    assert world.states() == {"first": "ready"}


def test_the_last_model_that_is_ready_is_not_unloaded(world: World) -> None:
    assert refused(world.ask(UNLOAD_MODEL, b"first")) == (409, "last_model")
    world.load("second")
    assert refused(world.ask(UNLOAD_MODEL, b"first")) == (409, "last_model"), "it is not ready"
    world.joined(*world.processes)
    world.tick()
    assert world.ask(UNLOAD_MODEL, b"first").models[0].state == "draining"
    assert refused(world.ask(UNLOAD_MODEL, b"second")) == (409, "last_model")
    assert refused(world.ask(UNLOAD_MODEL, b"nobody")) == (404, "model_not_found")


@pytest.mark.parametrize("name", ["first", "first-alias"])
def test_a_name_that_is_taken_is_refused_until_its_model_is_gone(world: World, name: str) -> None:
    world.ready("second")
    assert refused(world.load("third", name)) == (409, "model_exists")
    world.ask(UNLOAD_MODEL, b"first")
    assert refused(world.load("third", name)) == (409, "model_exists"), "it still ends"


def test_a_name_of_processes_that_were_started_by_hand_is_taken(world: World) -> None:
    world.joined(FakeChild("scheduler", 9), model="third")
    answer = world.load("third")
    assert refused(answer) == (409, "model_exists")
    assert "has not started" in answer.message


@pytest.mark.parametrize("name", ["x" * 257, "a\nb"])
def test_a_name_that_lists_could_not_show_is_refused(world: World, name: str) -> None:
    assert refused(world.load("second", name)) == (400, "bad_name")


def test_what_contradicts_a_setting_is_refused_with_the_reason(world: World) -> None:
    world.refusal = ConfigError("--dtype float16 does not go with it")
    answer = world.load("second")
    assert refused(answer) == (400, "model_refused")
    assert "--dtype float16" in answer.message


def test_models_and_failed_loads_are_bounded_in_number(world: World) -> None:
    for number in range(MAX_FAILED + 3):
        world.load("second", f"failed-{number}")
        for child in list(world.processes):
            world.died(child)
        world.tick()
    assert len(world.states()) == 1 + MAX_FAILED
    assert "failed-2" not in world.states()
    assert world.ask(UNLOAD_MODEL, b"failed-3").models == [], "it is forgotten"
    assert "failed-3" not in world.states()
    for number in range(MAX_MODELS - 1):
        assert world.load("second", f"model-{number}").status == 200
    assert refused(world.load("second", "more")) == (409, "too_many_models")


def test_a_server_that_starts_or_ends_loads_nothing(tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    world = World(tmp_path)
    assert refused(world.load("second")) == (503, "not_ready")
    world.models.begin()
    world.models.close()
    world.tick()
    assert refused(world.load("second")) == (503, "not_ready")


def test_without_model_dirs_the_refusal_names_the_flag(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.models._dirs = []
    world.tick()
    for answer in (world.load("second"), world.ask(UNLOAD_MODEL, b"first")):
        assert refused(answer) == (403, "model_loading_off")
        assert "--model-dirs" in answer.message
    assert world.states() == {"first": "ready"}


def test_a_question_that_cannot_be_read_is_refused_and_another_is_left_alone(world: World) -> None:
    assert refused(world.ask(LOAD_MODEL, b"\xc1")) == (400, "bad_question")
    assert refused(world.ask(UNLOAD_MODEL, b"\xff")) == (400, "bad_question")
    assert world.models.answer(Ask("", 1, "log_level"), world.now).answer == b""


def test_who_ended_while_the_router_was_away_holds_no_name(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    cluster = ClusterConfig(router=f"ipc://{tmp_path}/router.sock")
    view = ClusterView(cluster, logs.set_up("launcher", "error", "json"))
    try:
        peers = [
            Peer("worker", f"ipc://{tmp_path}/{pid}.sock", pid, Identity(pid, HOST), "ready", "",
                 Capacity(), 0)
            for pid in (50, 51)
        ]  # fmt: skip
        now = time.monotonic()
        view._participant.handle(1, Members(1, 1, peers, []), now)
        view.died(50)
        view._participant.handle(2, Members(2, 1, [], []), now)  # the next router knows nobody yet
        assert len(view.own()) == 2, "they are kept for a while"
        assert [peer.identity.pid for peer in view.everybody()] == [51]
    finally:
        view.close()


def test_a_model_does_not_take_the_name_of_an_adapter(world: World) -> None:
    world.models.begin()
    capacity = Capacity(adapters=[Adapter("third", "d1")])
    identity = Identity(1, "host", model="first")
    world.peers.append(Peer("scheduler", "", 1, identity, Phase.READY, "", capacity, 0))
    found = world.load("third")
    assert (found.status, found.code) == (409, "adapter_exists")
    assert "'third'" in found.message
    assert world.load("third", "another").status == 200
