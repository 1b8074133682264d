"""What becomes of a request while a part of the server is not ready: it waits, or it is refused."""

from __future__ import annotations

import time
from array import array
from typing import Any

import msgspec
import pytest
from support.client.remembered_wire import LastError, Wire

from penstock.client.gateway import PipelineGateway
from penstock.client.gateway_interface import Overloaded
from penstock.client.parts import FAILED_STARTS, JOIN_SECONDS, Parts
from penstock.protocol.config.fields import AdmissionConfig
from penstock.protocol.process.participant import UNREACHABLE_SECONDS, Participant
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.tasks import TOKENIZE
from penstock.protocol.wire.messages.membership import (
    Capacity,
    Identity,
    Members,
    Peer,
    Phase,
    Sleep,
    Sleeper,
)
from penstock.protocol.wire.messages.requests import (
    Accepted,
    Cancel,
    ChoiceState,
    PoolingParams,
    PromptText,
    RequestHead,
    Submit,
    Tokens,
    Work,
)

ROUTER = "ipc:///run/router.sock"
CAPACITY = Capacity(1000, 16, 8, 2048, 4096, 32_000)
WAIT = 30.0
SERVICES = {1: "router", 2: "tokenizer", 3: "scheduler", 4: "worker"}


class World:
    """A frontend's view of a server, and the time."""

    def __init__(self, wait_s: float = WAIT) -> None:
        self.now = time.monotonic()
        self.wire: Any = Wire()
        self.participant = Participant("frontend", self.wire, ROUTER, Identity(1, "host"))
        self.parts = Parts(self.participant, wait_s, self.now)
        self.participant.on_change = lambda gone: self.parts.lost(gone.values())
        self._version = 0

    def members(self, phases: dict[int, str], *, served: bool = True) -> None:
        """By number who is there; numbers above 10 are others of the service of number % 10."""
        peers = [
            Peer(
                SERVICES[number % 10], ROUTER if number == 1 else f"ipc:///run/{number}.sock",
                number, Identity(number, "host", "0", model="m"), phase, "", CAPACITY, 0,
            )
            for number, phase in phases.items()
        ]  # fmt: skip
        self._version += 1
        members = Members(1, self._version, peers, [], served=["m"] if served else [])
        self.participant.handle(1, members, self.now)
        self.parts.look(self.now)

    def ready(self, *without: int) -> None:
        self.members({n: Phase.READY for n in SERVICES if n not in without})

    def after(self, seconds: float) -> str:
        self.now += seconds
        if self.participant.silence(self.now) > WAIT:
            self.participant._heard(self.now)  # the router beats all the time
        self.parts.look(self.now)
        return self.parts.hopeless(self.now)


@pytest.fixture
def world() -> World:
    return World()


# --- a model that sleeps


def asleep(state: str = Sleep.ASLEEP, reason: str = "") -> list[Sleeper]:
    return [Sleeper("m", [], state, CAPACITY, 8.0, reason)]


def of_sleeper(phases: dict[int, str], sleepers: list[Sleeper]) -> World:
    world = World()
    world.parts = Parts(world.participant, WAIT, world.now, "m", wake_wait_s=120.0)
    peers = [
        Peer(SERVICES[n], f"ipc:///run/{n}.sock", n, Identity(n, "host", "0", model="m"), phase, "",
             CAPACITY, 0)
        for n, phase in phases.items()
    ]  # fmt: skip
    told = Members(1, 1, peers, [], served=["m"], sleepers=sleepers)
    world.participant.handle(1, told, world.now)
    return world


@pytest.mark.parametrize("state", [Sleep.FALLING, Sleep.ASLEEP, Sleep.WAKING])
def test_a_model_that_sleeps_is_waited_for_as_long_as_a_request_may(state: str) -> None:
    world = of_sleeper({1: Phase.READY, 2: Phase.READY}, asleep(state))
    began = world.now
    assert world.after(0.0) == ""
    assert world.parts.states()["engine"] == state
    for _ in range(3):
        assert world.after(WAIT) == ""
    assert not world.parts.waited_too_long(began, began + 120.0)
    assert world.parts.waited_too_long(began, began + 120.1)
    assert "--wake-wait-s" in world.parts.too_late(began)


def test_a_model_that_sleeps_has_no_hope_without_tokenizers() -> None:
    world = of_sleeper({1: Phase.READY}, asleep())
    assert world.after(0.0) == ""
    assert "no tokenizer has come" in world.after(WAIT + 0.1)


def test_a_model_that_cannot_be_woken_is_not_waited_for() -> None:
    world = of_sleeper({1: Phase.READY, 2: Phase.READY}, asleep(reason="worker 1 ended"))
    assert "it could not be woken" in world.after(0.0)


def test_what_a_tokenizer_answers_alone_needs_no_engine() -> None:
    world = of_sleeper({1: Phase.READY, 2: Phase.READY}, asleep(reason="worker 1 ended"))
    assert world.parts.hopeless(world.now, TOKENIZE) == ""
    world = World()
    world.ready()
    world.ready(3, 4)
    assert "no engine has come" in world.after(WAIT + 1)
    assert world.parts.hopeless(world.now, TOKENIZE) == ""
    world.ready(2)
    world.after(WAIT + 1)
    assert "no tokenizer has come" in world.parts.hopeless(world.now, TOKENIZE)


def test_the_waits_for_restarts_and_for_waking_are_two() -> None:
    world = of_sleeper({1: Phase.READY, 2: Phase.READY}, asleep())
    world.parts = Parts(world.participant, 0.0, world.now, "m", wake_wait_s=120.0)
    assert world.after(0.5) == ""
    world.parts = Parts(world.participant, WAIT, world.now, "m", wake_wait_s=0.0)
    assert "--wake-wait-s 0 lets no request wait" in world.after(0.5)


def test_who_comes_again_does_so_when_the_model_is_likely_awake() -> None:
    world = of_sleeper({1: Phase.READY, 2: Phase.READY}, asleep())
    world.after(5.0)
    assert world.parts.retry_after(world.now) == 8.0, "it has not begun to wake"
    world = of_sleeper({1: Phase.READY, 2: Phase.READY}, asleep(Sleep.WAKING))
    world.after(0.0)
    world.after(5.0)
    assert world.parts.retry_after(world.now) == pytest.approx(3.0)
    world.after(60.0)
    assert world.parts.retry_after(world.now) == 1.0


# --- whether there is hope


def test_a_server_that_was_never_ready_gives_no_hope(world: World) -> None:
    world.members({1: Phase.READY, 2: Phase.LOADING, 3: Phase.LOADING}, served=False)
    assert "tokenizer: loading" in world.after(0.0)
    assert "it has not been ready yet" in world.after(0.0)
    world.ready()
    assert world.after(0.0) == ""
    assert world.parts.out_since is None


def test_a_frontend_that_was_just_started_waits_for_the_router_s_word(world: World) -> None:
    assert world.after(JOIN_SECONDS - 0.1) == ""
    assert "not been ready" in world.after(0.2)


def test_a_frontend_that_comes_while_a_part_restarts_has_hope() -> None:
    world = World()
    world.members({1: Phase.READY, 2: Phase.READY})
    assert world.after(1.0) == ""


@pytest.mark.parametrize("part", [2, 3])
def test_a_lost_part_may_come_back_for_as_long_as_a_request_would_wait(
    world: World, part: int
) -> None:
    world.ready()
    world.ready(part)
    assert world.after(WAIT - 0.1) == ""
    assert f"no {'tokenizer' if part == 2 else 'engine'} has come for 30 s" in world.after(0.2)
    world.ready()
    assert world.after(0.0) == ""


def test_what_loads_is_coming_however_long_it_takes(world: World) -> None:
    world.ready()
    ready = dict.fromkeys(SERVICES, Phase.READY)
    world.members({**ready, 3: Phase.LOADING, 4: Phase.LOADING})
    for _ in range(20):
        assert world.after(WAIT) == ""
    world.members({**{n: p for n, p in ready.items() if n != 2}, 12: Phase.STARTING})
    for _ in range(20):
        assert world.after(WAIT) == ""


def test_an_engine_without_a_worker_is_not_coming_for_ever(world: World) -> None:
    world.ready()
    world.members({1: Phase.READY, 2: Phase.READY, 3: Phase.LOADING})
    assert world.after(WAIT - 0.1) == ""
    assert "engine: loading" in world.after(0.2)


def test_a_part_that_fails_to_start_again_and_again_gives_no_hope(world: World) -> None:
    world.ready()
    ready = dict.fromkeys((1, 2), Phase.READY)
    for number in range(FAILED_STARTS):
        assert world.after(0.1) == ""
        world.members({**ready, 3: Phase.LOADING, 10 * number + 14: Phase.LOADING})
    assert world.after(0.1) == ""
    world.members({**ready, 3: Phase.LOADING})
    assert "3 processes of the engine ended before they were ready" in world.after(0.0)
    world.members({**ready, 3: Phase.READY, 94: Phase.READY})
    world.members({**ready, 3: Phase.LOADING})
    assert world.after(0.0) == "", "it has been ready meanwhile"


def test_a_router_that_is_silent_for_too_long_gives_no_hope(world: World) -> None:
    world.ready()
    world.ready(2)
    assert UNREACHABLE_SECONDS < WAIT
    world.now += WAIT + 1.0
    assert "the router has been silent for 31 s" in world.parts.hopeless(world.now)


def test_what_a_tokenizer_does_alone_waits_for_a_silent_router_once(world: World) -> None:
    world.ready()
    world.ready(3)
    assert world.parts.hopeless(world.now, TOKENIZE) == ""
    world.now += WAIT - 1.0
    assert world.parts.hopeless(world.now, TOKENIZE) == "", "it may be started again"
    world.now += 2.0
    assert "the router has been silent for 31 s" in world.parts.hopeless(world.now, TOKENIZE)
    too_late = world.parts.too_late(world.now)
    assert "waited 30 s (--restart-wait-s), and the router has been silent for 31 s" in too_late


def test_nothing_waits_where_nothing_may() -> None:
    world = World(wait_s=0.0)
    world.ready()
    world.ready(2)
    assert "--restart-wait-s 0" in world.after(0.0)


def test_a_request_waits_no_longer_than_allowed_and_only_for_a_part(world: World) -> None:
    world.ready()
    came = world.now
    world.after(100.0)
    assert not world.parts.waited_too_long(came, world.now), "everything is there"
    world.ready(2)
    world.after(WAIT)
    assert not world.parts.waited_too_long(came, world.now), "the outage counts, not its age"
    world.after(0.1)
    assert world.parts.waited_too_long(came, world.now)
    assert not world.parts.waited_too_long(world.now - WAIT, world.now), "it came later"


# --- requests


def work(time_left: float | None = None) -> Work:
    prompt = Tokens(array("i", [1, 2, 3]).tobytes())
    return Work(RequestHead(time_left=time_left), prompt, SamplingParams(seed=1), [ChoiceState(0)])


class Frontend(World):
    """The same with the gateway that opens requests."""

    def __init__(self, **limits: Any) -> None:
        super().__init__()
        self.gateway = PipelineGateway(self.wire, self.participant, AdmissionConfig(**limits))
        self.participant.on_change = lambda gone: self.gateway.peers_gone(gone, self.now)

    def members(self, phases: dict[int, str], *, served: bool = True) -> None:
        super().members(phases, served=served)
        self.gateway.tick(self.now)

    def tick(self, seconds: float = 0.0) -> None:
        self.after(seconds)
        self.gateway.tick(self.now)

    def take(self, kind: type) -> list[Any]:
        found = [message for message in self.wire.sent if isinstance(message, kind)]
        self.wire.sent.clear()
        return found


def test_a_request_goes_on_its_way_while_a_part_restarts_and_counts_as_waiting() -> None:
    frontend = Frontend(max_waiting_requests=3)
    frontend.ready()
    frontend.tick()
    frontend.ready(3)
    frontend.tick()
    ears = [LastError() for _ in range(11)]
    for ear in ears:
        frontend.gateway.open(work(), ear)
    assert len(frontend.take(Submit)) == 11
    with pytest.raises(Overloaded, match="3 requests are waiting already"):
        frontend.gateway.open(work(), LastError())  # 8 would run in the engine that was there
    assert not frontend.gateway.ready().ready
    frontend.tick(WAIT / 2)
    assert all(ear.rejected is None for ear in ears)
    frontend.ready()
    frontend.tick(WAIT / 4)
    assert frontend.gateway.ready().ready
    assert all(ear.rejected is None for ear in ears)


def test_a_request_that_has_waited_too_long_is_cancelled_and_its_client_told() -> None:
    frontend = Frontend()
    frontend.ready()
    frontend.ready(2)
    frontend.members({1: Phase.READY, 12: Phase.LOADING, 3: Phase.READY})
    ear, late = LastError(), LastError()
    number = frontend.gateway.open(work(), ear)
    hurried = LastError()
    frontend.gateway.open(work(time_left=5.0), hurried)
    frontend.tick(WAIT - 1.0)
    assert ear.rejected is None
    assert hurried.rejected is not None, "its own time was over"
    assert hurried.rejected.status == 504
    frontend.wire.sent.clear()
    frontend.gateway.ledger.submit(work(), late, frontend.now)
    frontend.tick(2.0)
    assert ear.rejected is not None
    assert (ear.rejected.status, ear.rejected.retry_after) == (503, 1.0)
    assert "waited 30 s (--restart-wait-s)" in ear.rejected.message
    assert [c.ids for c in frontend.take(Cancel)] == [[number]]
    assert late.rejected is None


def test_when_hope_is_lost_those_that_wait_are_told_at_once() -> None:
    frontend = Frontend()
    frontend.ready()
    frontend.ready(3)
    ear = LastError()
    frontend.gateway.open(work(), ear)
    for number in range(FAILED_STARTS):
        frontend.members({1: Phase.READY, 2: Phase.READY, 10 * number + 14: Phase.LOADING})
    frontend.members({1: Phase.READY, 2: Phase.READY})
    frontend.tick()
    assert ear.rejected is not None
    assert "ended before they were ready" in ear.rejected.message
    with pytest.raises(Overloaded, match="engine: absent"):
        frontend.gateway.open(work(), LastError())


def test_a_server_that_was_never_ready_refuses_at_once() -> None:
    frontend = Frontend()
    frontend.members({1: Phase.READY, 2: Phase.LOADING}, served=False)
    with pytest.raises(Overloaded, match="not been ready yet") as refused:
        frontend.gateway.open(work(), LastError())
    assert refused.value.rejected.status == 503
    assert refused.value.rejected.retry_after


def test_a_text_with_a_folders_prompt_goes_on_as_ids_that_have_it_already() -> None:
    frontend = Frontend()
    frontend.ready()
    pooling = PoolingParams(dimensions=8, prompt_name="query", input_type="query")
    asked = Work(
        RequestHead(), PromptText("weir"), SamplingParams(), [ChoiceState(0)], pooling=pooling
    )
    number = frontend.gateway.open(asked, LastError())
    (first,) = frontend.take(Submit)
    assert msgspec.msgpack.decode(first.work, type=Work).pooling == pooling
    ids = array("i", [7, 8, 9]).tobytes()
    frontend.gateway.ledger.handle(2, Accepted(number, first.attempt, ids, 0), frontend.now)
    frontend.members({1: Phase.READY, 12: Phase.READY, 3: Phase.READY, 4: Phase.READY})
    frontend.tick()
    (again,) = frontend.take(Submit)
    work = msgspec.msgpack.decode(again.work, type=Work)
    assert again.attempt > first.attempt
    assert (work.prompt, work.pooling) == (Tokens(ids), PoolingParams(dimensions=8))


def test_who_comes_again_to_a_model_that_could_not_be_woken_waits_no_longer_than_it_rests() -> None:
    world = of_sleeper({1: Phase.READY, 2: Phase.READY}, asleep(reason="worker 1 ended"))
    world.after(0.0)
    world.after(5.0)
    assert world.parts.retry_after(world.now) == pytest.approx(3.0)
