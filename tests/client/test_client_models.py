"""A frontend before several models: what concerns one does not concern the others."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from support.client.remembered_wire import LastError, Wire

from penstock.client.gateway import PipelineGateway
from penstock.client.gateway_interface import Overloaded
from penstock.client.served_engines import with_engine
from penstock.protocol.config.fields import AdmissionConfig
from penstock.protocol.process.participant import Participant
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.wire.messages.membership import (
    BeatAnswer,
    Capacity,
    Demand,
    Identity,
    Members,
    Peer,
    Phase,
    Sleeper,
)
from penstock.protocol.wire.messages.requests import (
    Accepted,
    ChoiceState,
    RequestHead,
    Submit,
    Taken,
    Tokens,
    Work,
)

ROUTER = "ipc:///run/router.sock"
SLOTS = 8
CAPACITY = Capacity(
    num_blocks=1000, block_size=16, max_num_seqs=SLOTS, max_model_len=4096, vocab_size=320
)
WAIT = 30.0
PARTS = {"router": 1, "a tokenizer": 2, "a scheduler": 3, "b tokenizer": 4, "b scheduler": 5}
VECTORS = msgspec.structs.replace(CAPACITY, max_model_len=512, tasks=["embed"], generates=False)


class Frontend:
    def __init__(self, expected: tuple[str, ...] = (), **limits: Any) -> None:
        self.now = time.monotonic()
        self.wire: Any = Wire()
        self.participant = Participant("frontend", self.wire, ROUTER, Identity(1, "host"))
        self.gateway = PipelineGateway(
            self.wire, self.participant, AdmissionConfig(**limits), expected
        )
        self.participant.on_change = lambda gone: self.gateway.peers_gone(gone, self.now)
        self._version = 0

    def members(
        self,
        *names: str,
        served: str = "ab",
        withdrawn: str = "",
        loading: str = "",
        beside: Sequence[Peer] = (),
        sleepers: Sequence[Sleeper] = (),
    ) -> None:
        """Who is there: ``names`` of ``PARTS``, ready, one that loads, and others."""
        peers = list(beside)
        for name in (*names, *([loading] if loading else [])):
            model, _, service = name.rpartition(" ")
            number = PARTS[name]
            phase = Phase.LOADING if name == loading else Phase.READY
            capacity = CAPACITY if service == "scheduler" and name != loading else Capacity()
            identity = Identity(number, "host", model=model, aliases=[f"{model}-alias"])
            address = ROUTER if service == "router" else f"ipc:///run/{number}.sock"
            peers.append(Peer(service, address, number, identity, phase, "", capacity, 0))
        self._version += 1
        message = Members(
            *(1, self._version, peers, []),
            served=list(served),
            withdrawn=list(withdrawn),
            sleepers=list(sleepers),
        )
        self.participant.handle(1, message, self.now)
        self.tick()

    def all_but(self, *without: str, **others: Any) -> None:
        self.members(*(name for name in PARTS if name not in without), **others)

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.participant._heard(self.now)
        self.gateway.tick(self.now)

    def open(self, model: str, task: str = "generate") -> LastError:
        ear = LastError()
        prompt = Tokens(array("i", [1, 2, 3]).tobytes())
        head = RequestHead(model=model, task=task)
        self.gateway.open(Work(head, prompt, SamplingParams(seed=1), [ChoiceState(0)]), ear)
        return ear


def test_a_request_says_which_model_it_is_for() -> None:
    frontend = Frontend()
    frontend.all_but()
    frontend.open("b")
    assert [m.model for m in frontend.wire.sent if isinstance(m, Submit)] == ["b"]


def test_what_a_tokenizer_answers_alone_takes_no_place_in_the_queue() -> None:
    frontend = Frontend(max_waiting_requests=3)
    frontend.all_but()
    for _ in range(SLOTS + 3):
        frontend.open("a")
    with pytest.raises(Overloaded, match="3 requests are waiting already"):
        frontend.open("a")
    frontend.wire.sent.clear()
    frontend.open("a", "tokenize")
    assert [type(message) for message in frontend.wire.sent] == [Submit]


def test_a_request_waits_for_its_own_model_and_others_are_not_refused() -> None:
    frontend = Frontend(max_waiting_requests=3)
    frontend.all_but()
    frontend.all_but("b scheduler")
    waiting = [frontend.open("b") for _ in range(SLOTS + 3)]
    with pytest.raises(Overloaded, match="3 requests are waiting already"):
        frontend.open("b")
    frontend.wire.sent.clear()
    others = [frontend.open("a") for _ in range(SLOTS)]
    for submit in frontend.wire.sent:
        accepted = Accepted(submit.id, submit.attempt, b"\1\0\0\0", 9)
        frontend.gateway.handle(PARTS["a tokenizer"], accepted, frontend.now)
    frontend.tick(WAIT + 1.0)
    assert all(ear.rejected is not None for ear in waiting)
    assert all(ear.rejected is None for ear in others)
    assert waiting[0].rejected is not None
    assert "the model 'b' is not ready" in waiting[0].rejected.message
    assert "engine: absent" in waiting[0].rejected.message
    frontend.open("a")


def test_others_hear_what_is_open_for_each_model() -> None:
    frontend = Frontend()
    frontend.all_but()
    for model in "aab":
        frontend.open(model)
    frontend.tick()
    told = {one.model: (one.open, one.waiting) for one in frontend.participant.status.demands}
    assert told == {"a": (2, 2), "b": (1, 1)}


def test_what_other_frontends_have_open_for_one_model_is_no_load_of_another() -> None:
    frontend = Frontend(max_waiting_requests=2)
    frontend.all_but()
    busy = Demand(open=SLOTS + 2, waiting=2, slots=SLOTS, model="b")
    answer = BeatAnswer(1, [busy, Demand(slots=SLOTS, model="a")])
    frontend.participant.handle(1, answer, frontend.now)
    frontend.tick()
    frontend.open("a")
    with pytest.raises(Overloaded, match="waiting already"):
        frontend.open("b")


def test_the_server_is_ready_when_every_model_that_ever_was_is_ready() -> None:
    frontend = Frontend()
    frontend.members("router", "a tokenizer", "a scheduler", "b tokenizer", served="a")
    assert frontend.gateway.ready().ready, "the other one has never been"
    frontend.all_but()
    assert frontend.gateway.ready().models == {"a": "ready", "b": "ready"}
    frontend.all_but("b scheduler")
    whole, one = frontend.gateway.ready(), frontend.gateway.ready("a")
    assert (whole.ready, whole.models) == (False, {"a": "ready", "b": "engine: absent"})
    assert (one.ready, one.models) == (True, {"a": "ready"})


def test_an_expected_model_is_waited_for_though_it_never_was_ready() -> None:
    frontend = Frontend(expected=("b", "a"))
    frontend.members("router", "a tokenizer", "a scheduler", served="a", loading="b scheduler")
    found = frontend.gateway.ready()
    assert (found.ready, found.models["b"]) == (False, "tokenizer: absent, engine: loading")
    frontend.all_but()
    assert frontend.gateway.ready().ready
    assert [model.name for model in frontend.gateway.models()] == ["b", "a"]


def test_a_model_is_listed_while_its_engine_restarts_and_until_it_is_withdrawn() -> None:
    frontend = Frontend()
    frontend.all_but()
    frontend.all_but("b scheduler", "b tokenizer")
    assert [model.name for model in frontend.gateway.models()] == ["a", "b"]
    frontend.all_but("b scheduler", "b tokenizer", served="a", withdrawn="b")
    assert [model.name for model in frontend.gateway.models()] == ["a"]
    assert frontend.gateway.ready().models == {"a": "ready"}


def asleep(state: str = "asleep", reason: str = "") -> list[Sleeper]:
    """The model b, which was never awake."""
    return [Sleeper("b", ["bee"], state, CAPACITY, 8.0, reason)]


def test_a_model_that_sleeps_is_listed_and_ready_though_it_never_was_awake() -> None:
    frontend = Frontend(expected=("a", "b"))
    frontend.all_but("b scheduler", sleepers=asleep())
    a, b = frontend.gateway.models()
    assert (a.sleep, b.sleep, b.aliases, b.max_model_len) == ("", "asleep", ["bee"], 4096)
    assert frontend.gateway.ready().ready
    assert frontend.gateway.ready("b").models == {"b": "asleep"}
    frontend.all_but()
    assert [one.sleep for one in frontend.gateway.models()] == ["", ""]


def test_all_models_may_sleep_at_a_time() -> None:
    frontend = Frontend()
    both = [*asleep(), Sleeper("a", [], "waking", CAPACITY, 8.0)]
    frontend.all_but("a scheduler", "b scheduler", sleepers=both)
    found = frontend.gateway.ready()
    assert (found.ready, found.models) == (True, {"a": "waking", "b": "asleep"})


def test_a_request_for_a_model_that_sleeps_waits_and_then_hears_when_to_come_again() -> None:
    frontend = Frontend(wake_wait_s=100.0, max_waiting_requests=3)
    frontend.all_but("b scheduler", sleepers=asleep("waking"))
    waiting = [frontend.open("b") for _ in range(4)]
    for submit in [one for one in frontend.wire.sent if isinstance(one, Submit)]:
        taken = Taken(submit.id, submit.attempt)
        frontend.gateway.handle(PARTS["b tokenizer"], taken, frontend.now)
    frontend.tick(2.0)
    with pytest.raises(Overloaded, match="3 requests are waiting already") as refused:
        frontend.open("b")
    assert 1.0 < refused.value.rejected.retry_after <= 8.0
    for _ in range(5):
        frontend.tick(19.0)
    assert all(ear.rejected is None for ear in waiting)
    frontend.tick(4.0)
    for ear in waiting:
        assert ear.rejected is not None
        assert (ear.rejected.status, ear.rejected.retry_after) == (503, 1.0)
        assert "--wake-wait-s" in ear.rejected.message


def test_who_waits_for_a_model_that_cannot_be_woken_hears_why() -> None:
    frontend = Frontend()
    frontend.all_but("b scheduler", sleepers=asleep("waking"))
    waiting = frontend.open("b")
    frontend.all_but("b scheduler", sleepers=asleep("falling asleep", "worker 1 ended"))
    assert waiting.rejected is not None
    assert "it could not be woken" in waiting.rejected.message
    assert "worker 1" not in waiting.rejected.message, "that is for the log and administrators"
    assert waiting.rejected.retry_after == 8.0
    with pytest.raises(Overloaded, match="could not be woken"):
        frontend.open("b")
    whole, one = frontend.gateway.ready(), frontend.gateway.ready("b")
    assert (whole.ready, one.ready) == (True, False)
    assert whole.models["b"] == "falling asleep: could not be woken"


def test_of_a_model_that_is_unloaded_only_what_runs_goes_on() -> None:
    frontend = Frontend(expected=("a", "b"))
    frontend.all_but()
    running = frontend.open("b")
    frontend.all_but(served="a", withdrawn="b")
    assert [model.name for model in frontend.gateway.models()] == ["a"]
    assert frontend.gateway.ready().models == {"a": "ready"}
    assert running.rejected is None
    frontend.open("b", "embed")  # a further input of a request that runs
    told = {one.model: one.open for one in frontend.participant.status.demands}
    assert told == {"a": 0, "b": 1}
    frontend.all_but("b scheduler", "b tokenizer", served="a", withdrawn="b")
    assert running.rejected is not None
    assert running.rejected.message == "the model 'b' was unloaded"


def test_an_unloaded_model_stays_so_under_a_new_router_until_it_is_loaded_again() -> None:
    frontend = Frontend(expected=("a", "b"))
    frontend.all_but()
    frontend.members("router", "a tokenizer", "a scheduler", served="a", withdrawn="b")
    frontend.members("router", "a tokenizer", "a scheduler", served="a")
    assert frontend.gateway.ready().models == {"a": "ready"}
    assert [model.name for model in frontend.gateway.models()] == ["a"]
    frontend.all_but()
    assert frontend.gateway.ready().models == {"a": "ready", "b": "ready"}
    assert [model.name for model in frontend.gateway.models()] == ["a", "b"]


def test_a_new_frontend_waits_to_hear_of_a_model_whose_engine_restarts() -> None:
    frontend = Frontend()
    frontend.all_but("b scheduler", loading="b scheduler")

    async def ask() -> tuple[bool, list[str]]:
        await asyncio.wait_for(frontend.gateway.known("a-alias"), 30.0)
        asked = asyncio.create_task(frontend.gateway.known("b-alias"))
        await asyncio.sleep(0.05)
        waited = not asked.done()
        frontend.all_but()
        await asyncio.wait_for(asked, 30.0)
        await asyncio.wait_for(frontend.gateway.known("nobody"), 30.0)
        return waited, [model.name for model in frontend.gateway.models()]

    assert asyncio.run(ask()) == (True, ["a", "b"])


def test_a_model_does_what_any_of_its_engines_does() -> None:
    identity = Identity(1, "host", model="a", aliases=["b"])
    labels = msgspec.structs.replace(VECTORS, tasks=["classify"], labels=["x"], max_model_len=256)
    for order in ((CAPACITY, VECTORS, labels), (labels, CAPACITY, VECTORS)):
        found = None
        for capacity in order:
            found = with_engine(found, identity, capacity)
        assert found is not None and found.generates and found.labels == ["x"]
        assert sorted(found.tasks) == ["classify", "embed"]
        assert found.longest_task_prompt == 255
        assert found.max_model_len == CAPACITY.max_model_len  # whoever else has come first


def engine(number: int, capacity: Capacity = VECTORS, phase: str = Phase.READY) -> Peer:
    """A second engine of the model a."""
    identity = Identity(number, "host", "1", model="a", aliases=["a-alias"])
    return Peer("scheduler", f"ipc:///run/{number}.sock", number, identity, phase, "", capacity, 0)


def test_what_only_a_lost_engine_does_is_still_done_until_it_is_back() -> None:
    frontend = Frontend(restart_wait_s=WAIT)
    frontend.all_but(beside=[engine(6)])
    frontend.all_but()
    frontend.wire.sent.clear()
    frontend.open("a", "embed")  # goes to the router, which holds it
    assert [type(message) for message in frontend.wire.sent] == [Submit]
    frontend.all_but(beside=[engine(7, Capacity(), Phase.LOADING)])
    frontend.tick(2 * WAIT)  # it takes long to load
    assert frontend.gateway.models()[0].tasks == ["embed"]
    frontend.all_but()
    frontend.tick(WAIT + 1.0)
    assert frontend.gateway.models()[0].tasks == []
    with pytest.raises(Overloaded, match="does not do the task 'embed'; it does: generate"):
        frontend.open("a", "embed")


def test_an_engine_that_comes_back_with_other_tasks_does_the_former_ones_no_more() -> None:
    frontend = Frontend(restart_wait_s=WAIT)
    frontend.all_but(beside=[engine(6)])
    frontend.all_but()
    labels = msgspec.structs.replace(VECTORS, tasks=["classify"], labels=["x"])
    frontend.all_but(beside=[engine(7, labels)])
    assert frontend.gateway.models()[0].tasks == ["classify"]
