"""Where requests go: by load, back to where they were, held, turned away, cancelled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from support.counted import calls

from penstock.protocol.wire import codec
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.membership import (
    Beat,
    BeatAnswer,
    Capacity,
    Demand,
    Hello,
    Identity,
    MetricsReport,
    Phase,
    Sleep,
    Sleeper,
)
from penstock.protocol.wire.messages.requests import (
    Cancel,
    Enqueue,
    Rejected,
    Submit,
    first_attempt,
)
from penstock.services.router.dispatch import (
    HOLD_SECONDS,
    LOADING_HOLD_SECONDS,
    YOUNG_SECONDS,
    Dispatcher,
)
from penstock.services.router.held_requests import (
    MAX_HELD,
    MAX_HELD_BYTES,
    MAX_HELD_BYTES_IN_ALL,
    OVERHEAD_BYTES,
)
from penstock.services.router.placement import ROUTE_SECONDS
from penstock.services.router.roster import Roster

FRONTEND, TOKENIZER = "ipc:///run/f.sock", "ipc:///run/t.sock"
FIRST = first_attempt(1)
encode = msgspec.msgpack.encode


def address(number: int) -> str:
    return f"ipc:///run/{number}.sock"


class World:
    """A router's parts without its process: a roster, a dispatcher, a clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.sent: list[tuple[str, Any]] = []
        self.full: set[str] = set()
        self.roster = Roster(99, self.send, self.send, lambda _: None, lambda *_: None)
        self.dispatcher = Dispatcher(self.roster, self.send, self.now)

    def send(self, to: str, message: Message) -> bool:
        if to in self.full:
            return False
        self.sent.append((to, message))
        return True

    def add(
        self,
        number: int,
        service: str,
        load: int = 0,
        phase: str = Phase.READY,
        model: str = "",
    ) -> None:
        identity = encode(Identity(number, "host-a", model=model))
        hello = Hello(
            service, address(number), number, codec.PROTOCOL_VERSION, codec.SCHEMA_HASH, identity
        )
        self.roster.hello(hello, self.now)
        self.beat(number, load, phase)

    def beat(
        self,
        number: int,
        load: int = 0,
        phase: str = Phase.READY,
        note: str = "",
        capacity: Capacity = Capacity(),  # noqa: B008 - it is frozen
        *,
        slots: int = 0,
        served: Sequence[str] = (),
    ) -> None:
        metrics = encode(MetricsReport([]))
        beat = Beat(
            *(address(number), number, phase, note, 1, 0.0, 0.0, load),
            *(capacity, metrics, 10**6, [Demand(slots=slots)], list(served)),
        )
        self.roster.beat(beat, self.now)

    def grow_up(self) -> None:
        self.now += YOUNG_SECONDS + 0.1

    def submit(self, number: int, attempt: int = FIRST, model: str = "", choices: int = 1) -> None:
        submit = Submit(number, attempt, FRONTEND, b"work", model, choices)
        self.dispatcher.request(submit, self.now)

    def enqueue(
        self,
        number: int,
        attempt: int = FIRST,
        model: str = "",
        choices: int = 1,
        task: str = "generate",
    ) -> None:
        enqueue = Enqueue(number, attempt, TOKENIZER, b"work", model, choices=choices, task=task)
        self.dispatcher.request(enqueue, self.now)

    def cancel(self, number: int, attempt: int = FIRST, sender: int = 0, choice: int = -1) -> None:
        self.dispatcher.cancel(sender, Cancel([number], [attempt], [choice]), self.now)

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.dispatcher.tick(self.now)

    def take(self, *kinds: type) -> list[tuple[str, Any]]:
        """What was sent since the last call, of some kinds (by default requests)."""
        kinds = kinds or (Submit, Enqueue)
        found = [(to, m) for to, m in self.sent if isinstance(m, kinds)]
        self.sent.clear()
        return found

    def where(self) -> list[int]:
        """Numbers of the members that the newest requests went to."""
        return [int(to.removeprefix("ipc:///run/").removesuffix(".sock")) for to, _ in self.take()]


@pytest.fixture
def world() -> World:
    made = World()
    made.grow_up()
    return made


# --- choice


def test_submits_go_to_tokenizers_and_enqueues_to_schedulers(world: World) -> None:
    world.add(1, "tokenizer")
    world.add(2, "scheduler")
    world.add(3, "worker")
    world.submit(10)
    world.enqueue(10)
    assert world.take() == [
        (address(1), Submit(10, FIRST, FRONTEND, b"work")),
        (address(2), Enqueue(10, FIRST, TOKENIZER, b"work")),
    ]
    assert world.dispatcher.routed == 2


def test_the_least_loaded_is_chosen(world: World) -> None:
    world.add(1, "scheduler", load=5)
    world.add(2, "scheduler", load=3)
    world.add(3, "scheduler", load=4)
    world.enqueue(10)
    assert world.where() == [2]


def test_requests_since_the_last_beat_count_as_load(world: World) -> None:
    world.add(1, "scheduler", load=2)
    world.add(2, "scheduler")
    for number in range(6):
        world.enqueue(number)
    assert sorted(world.where()) == [1, 1, 2, 2, 2, 2]
    world.beat(2, load=10)
    world.enqueue(20)
    assert world.where() == [1]


def test_equal_load_is_shared_equally(world: World) -> None:
    for number in (1, 2, 3):
        world.add(number, "tokenizer")
    for number in range(300):
        world.submit(number)
    where = world.where()
    assert [where.count(number) for number in (1, 2, 3)] == [100, 100, 100]


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.LOADING, Phase.DRAINING])
def test_only_ready_members_get_requests(world: World, phase: str) -> None:
    world.add(1, "scheduler", load=0, phase=phase)
    world.add(2, "scheduler", load=99)
    world.enqueue(10)
    assert world.where() == [2]


def test_room_is_what_counts_not_the_number_of_requests(world: World) -> None:
    world.add(1, "scheduler")
    world.add(2, "scheduler")
    world.beat(1, load=5, capacity=Capacity(max_num_seqs=8))
    world.beat(2, load=20, capacity=Capacity(max_num_seqs=64))
    world.enqueue(10)
    assert world.where() == [2]
    for number in range(20, 27):
        world.enqueue(number)
    assert set(world.where()) == {2}
    world.beat(2, load=20, capacity=Capacity(max_num_seqs=64), slots=24)
    world.enqueue(30)
    assert world.where() == [1], "its KV memory lets no more than 24 run"


# --- the choices of a request


@pytest.mark.parametrize("service", ["tokenizer", "scheduler"])
def test_a_request_weighs_as_many_as_it_has_open_choices(world: World, service: str) -> None:
    send = world.submit if service == "tokenizer" else world.enqueue
    world.add(1, service)
    world.add(2, service)
    send(1, choices=8)
    for number in range(2, 10):
        send(number)
    where = world.where()
    assert where[0] not in where[1:], "eight sequences run there already"
    send(10)
    send(11)
    assert sorted(world.where()) == [1, 2]


def test_a_request_goes_where_all_of_its_choices_find_room(world: World) -> None:
    world.add(1, "scheduler")
    world.add(2, "scheduler")
    world.beat(1, load=1, capacity=Capacity(max_num_seqs=8))
    world.beat(2, load=24, capacity=Capacity(max_num_seqs=64))
    world.enqueue(10)
    world.enqueue(11, choices=8)
    assert world.where() == [1, 2]


def test_choices_that_went_elsewhere_are_no_load_where_they_were(world: World) -> None:
    world.add(1, "scheduler")
    world.add(2, "scheduler", load=1)
    world.enqueue(10, choices=8)
    assert world.where() == [1]
    world.enqueue(10, FIRST + 1, choices=8)
    world.enqueue(11)
    assert world.where() == [2, 1], "it was refused at once, ahead of any beat"
    members = world.roster.members
    assert (members[1].routed, members[2].routed) == (1, 8)


def test_choices_that_are_cancelled_are_no_load(world: World) -> None:
    world.add(1, "scheduler")
    member = world.roster.members[1]
    world.add(3, "tokenizer")
    world.enqueue(10, choices=8)
    world.cancel(10, sender=3, choice=2)
    assert member.routed == 7
    world.cancel(10, FIRST - 1, sender=3)
    assert member.routed == 7, "it is an earlier attempt that nobody wants"
    world.cancel(10, sender=3)
    world.cancel(10, sender=3)
    assert member.routed == 0


def test_what_a_beat_has_counted_is_taken_back_by_beats_alone(world: World) -> None:
    world.add(1, "scheduler")
    world.add(2, "scheduler", load=100)
    member = world.roster.members[1]
    world.enqueue(10, choices=8)
    world.beat(1, load=8)
    world.enqueue(11, choices=2)
    world.cancel(10)
    world.enqueue(10, FIRST + 1)
    assert (member.load, member.routed) == (8, 2)
    world.beat(1, load=2)
    assert (member.load, member.routed) == (2, 0)


def test_a_request_that_is_sent_again_weighs_once(world: World) -> None:
    world.add(1, "scheduler")
    member = world.roster.members[1]
    for _ in range(3):
        world.enqueue(10, choices=8)
    assert member.routed == 8
    world.beat(1, load=8)
    world.enqueue(10, choices=8)
    assert (member.load, member.routed) == (8, 0)


def test_what_cannot_be_sent_is_no_load(world: World) -> None:
    world.add(1, "scheduler")
    world.full.add(address(1))
    world.enqueue(10, choices=8)
    assert world.roster.members[1].routed == 0


# --- what an engine can hold


def test_a_request_goes_to_an_engine_that_can_hold_it_to_its_end(world: World) -> None:
    for number, length in ((1, 2048), (2, 8192), (3, 4096)):
        world.add(number, "scheduler")
        world.beat(number, load=number, capacity=Capacity(max_model_len=length))

    def place(tokens: int, number: int, attempt: int = FIRST) -> list[int]:
        enqueue = Enqueue(number, attempt, TOKENIZER, b"work", tokens=tokens)
        world.dispatcher.request(enqueue, world.now)
        return world.where()

    assert place(2048, 10) == [1]
    assert place(2049, 11) == [2]
    assert place(2049, 11, FIRST + 1) == [3], "one that holds it too, and has not refused it"
    assert place(2049, 11, FIRST + 2) == [2], "both have refused it: the others hold too little"
    assert place(9000, 12) == [2], "the largest, which will say where it ends"
    world.roster.bury(world.roster.members[2], "a test")
    world.roster.bury(world.roster.members[3], "a test")
    assert place(9000, 12, FIRST + 1) == [1]


# --- the same request again


def test_a_resent_request_goes_where_it_went_before(world: World) -> None:
    world.add(1, "scheduler")
    world.add(2, "scheduler", load=1)
    world.enqueue(10)
    assert world.where() == [1]
    world.beat(1, load=50)
    world.enqueue(10)
    assert world.where() == [1], "elsewhere it would run twice"
    world.enqueue(11)
    assert world.where() == [2]


@pytest.mark.parametrize("phase", [Phase.DRAINING, "lost"])
def test_a_resent_request_goes_elsewhere_when_its_place_is_gone(world: World, phase: str) -> None:
    world.add(1, "scheduler")
    world.add(2, "scheduler", load=1)
    world.enqueue(10)
    world.where()
    if phase == "lost":
        world.roster.bury(world.roster.members[1], "a test")
    else:
        world.beat(1, phase=phase)
    world.enqueue(10)
    assert world.where() == [2]
    world.add(3, "scheduler")
    world.enqueue(10)
    assert world.where() == [2]


def test_a_new_attempt_is_placed_by_load_again(world: World) -> None:
    """Its last place turned it away, or forgot it: that place is not better for being known."""
    world.add(1, "scheduler")
    world.add(2, "scheduler", load=1)
    world.enqueue(10, FIRST)
    assert world.where() == [1]
    world.beat(1, load=50)
    world.enqueue(10, FIRST + 1)
    assert world.where() == [2]
    world.beat(2, load=99)
    world.enqueue(10, FIRST + 1)
    assert world.where() == [2]


def test_who_refused_a_request_is_not_asked_again_while_there_are_others(world: World) -> None:
    for number, load in ((1, 0), (2, 10), (3, 20)):
        world.add(number, "scheduler", load=load)
    for attempt in range(FIRST, FIRST + 3):
        world.enqueue(10, attempt)
    assert world.where() == [1, 2, 3]
    world.enqueue(11)
    assert world.where() == [1], "it has refused another request, not this one"
    world.enqueue(10, FIRST + 3)
    world.enqueue(10, FIRST + 4)
    assert world.where() == [1, 2], "all have refused it: from the beginning"
    world.beat(3, phase=Phase.LOADING)
    world.roster.bury(world.roster.members[2], "a test")
    world.enqueue(10, FIRST + 5)
    assert world.where() == [1], "there is nobody else"


def test_who_refused_is_remembered_while_a_request_waits(world: World) -> None:
    world.add(1, "scheduler")
    world.enqueue(10)
    world.beat(1, phase=Phase.LOADING)
    world.enqueue(10, FIRST + 1)
    for _ in range(int(ROUTE_SECONDS) + 5):
        world.tick(1.0)
    assert world.where() == [1]
    world.beat(1, load=0)
    world.add(2, "scheduler", load=50)
    world.tick(0.25)
    assert world.where() == [2]


def test_a_route_is_remembered_for_a_minute(world: World) -> None:
    world.add(1, "scheduler")
    world.add(2, "scheduler", load=1)
    world.enqueue(10)
    world.where()
    world.beat(1, load=50)
    world.tick(ROUTE_SECONDS - 1)
    world.enqueue(10)
    assert world.where() == [1]
    world.tick(ROUTE_SECONDS + 1)
    world.enqueue(10)
    assert world.where() == [2]
    assert len(world.dispatcher.placement) == 1


def test_routes_of_tokenizers_and_engines_are_kept_apart(world: World) -> None:
    world.add(1, "tokenizer")
    world.add(2, "scheduler")
    for _ in range(2):
        world.submit(10)
        world.enqueue(10)
    assert world.where() == [1, 2, 1, 2]


# --- holding and turning away


def test_a_new_request_is_turned_away_at_once_when_nobody_is_ready(world: World) -> None:
    world.submit(10)
    ((to, rejected),) = world.take(Rejected)
    assert to == FRONTEND
    assert (rejected.id, rejected.attempt, rejected.status) == (10, FIRST, 503)
    assert rejected.kind == "overloaded_error"
    assert rejected.message == "no tokenizer is running; try again"
    assert rejected.retry_after > 0
    world.add(1, "scheduler", phase=Phase.LOADING)
    world.beat(1, phase=Phase.LOADING, note="weights 45 %")
    world.enqueue(11)
    ((to, rejected),) = world.take(Rejected)
    assert to == TOKENIZER
    assert rejected.message == "no engine is ready (loading weights 45 %); try again"
    assert len(world.dispatcher.held) == 0


def test_a_new_request_waits_where_somebody_was_ready_before(world: World) -> None:
    world.add(1, "tokenizer")
    world.add(2, "scheduler")
    for number in (1, 2):
        world.roster.bury(world.roster.members[number], "a test")
    world.submit(10)
    world.enqueue(11)
    assert world.sent == [] or world.take(Rejected) == []
    world.add(3, "tokenizer")
    world.add(4, "scheduler")
    world.tick(0.25)
    assert world.where() == [3, 4]


def test_a_new_router_learns_from_those_that_are_left_that_the_server_was_ready() -> None:
    world = World()
    world.grow_up()
    world.add(1, "frontend")
    world.submit(10)
    assert [m.id for _, m in world.take(Rejected)] == [10]
    world.beat(1, served=["m"])
    world.submit(11)
    assert world.take(Rejected) == []
    world.add(2, "tokenizer")
    world.tick(0.25)
    assert world.where() == [2]


@pytest.mark.parametrize("attempt", [FIRST + 1, first_attempt(2)])
def test_a_continuation_waits_until_somebody_is_ready(world: World, attempt: int) -> None:
    world.enqueue(10, attempt)
    world.tick(0.25)
    world.enqueue(10, attempt)
    world.tick(0.75)
    assert world.sent == []
    assert len(world.dispatcher.held) == 1
    world.add(1, "scheduler")
    world.tick(0.25)
    assert world.where() == [1]
    assert len(world.dispatcher.held) == 0
    world.tick(0.25)
    assert world.sent == []


@pytest.mark.parametrize("service", ["tokenizer", "scheduler"])
def test_a_request_that_nobody_had_accepted_waits_when_its_place_is_lost(
    world: World, service: str
) -> None:
    send = world.submit if service == "tokenizer" else world.enqueue
    world.add(1, service)
    send(10)
    assert world.where() == [1]
    world.roster.bury(world.roster.members[1], "a test")
    world.add(2, service, phase=Phase.LOADING)
    send(10)  # its owner sends it again each second
    send(11)
    assert [m.id for _, m in world.take(Rejected)] == [11], "what comes now had no place"
    for _ in range(int(2 * ROUTE_SECONDS)):
        world.tick(1.0)
    assert world.sent == []
    world.beat(2)
    world.tick(0.25)
    assert world.where() == [2]
    assert len(world.dispatcher.held) == 0


def test_a_request_without_its_place_does_not_wait_for_ever(world: World) -> None:
    world.add(1, "scheduler")
    world.enqueue(10)
    world.where()
    world.roster.bury(world.roster.members[1], "a test")
    world.enqueue(10)
    world.tick(HOLD_SECONDS)
    assert world.take(Rejected) == []
    world.tick(0.25)
    ((to, rejected),) = world.take(Rejected)
    assert (to, rejected.status, rejected.attempt) == (TOKENIZER, 503, FIRST)
    world.tick(ROUTE_SECONDS)
    assert len(world.dispatcher.placement) == 0


def test_a_continuation_does_not_wait_for_ever(world: World) -> None:
    world.enqueue(10, FIRST + 1)
    for _ in range(int(HOLD_SECONDS)):
        world.tick(1.0)
        world.enqueue(10, FIRST + 1)  # its owner sends it again each second
        assert world.take(Rejected) == []
    world.tick(1.0)
    ((to, rejected),) = world.take(Rejected)
    assert (to, rejected.status, rejected.attempt) == (TOKENIZER, 503, FIRST + 1)


def test_a_continuation_waits_for_an_engine_as_long_as_it_loads(world: World) -> None:
    world.enqueue(10, FIRST + 1)
    world.add(1, "scheduler", phase=Phase.LOADING)
    for _ in range(int(LOADING_HOLD_SECONDS)):
        world.tick(1.0)
        world.beat(1, phase=Phase.LOADING)
    assert world.take(Rejected, Enqueue) == []
    world.tick(1.0)
    ((to, rejected),) = world.take(Rejected)
    assert (to, rejected.status, rejected.attempt) == (TOKENIZER, 503, FIRST + 1)


def test_a_held_request_goes_out_even_when_its_time_is_over_by_then(world: World) -> None:
    world.enqueue(10, FIRST + 1)
    world.now += HOLD_SECONDS + 1.0
    world.add(1, "scheduler")
    world.tick()
    assert [message.attempt for _, message in world.take(Enqueue, Rejected)] == [FIRST + 1]


def test_a_newer_attempt_replaces_the_held_one_and_an_older_does_not(world: World) -> None:
    world.enqueue(10, FIRST + 2)
    world.enqueue(10, FIRST + 1)
    world.enqueue(10, FIRST + 3)
    world.add(1, "scheduler")
    world.tick(0.25)
    assert [message.attempt for _, message in world.take()] == [FIRST + 3]


def test_what_is_held_is_as_old_as_the_oldest_of_it_whatever_it_waits_for(world: World) -> None:
    held = world.dispatcher.held
    assert held.age(world.now) == 0
    world.submit(11, FIRST + 1)
    world.now += 2.0
    world.enqueue(12, FIRST + 1)
    world.submit(13, FIRST + 1)
    assert held.age(world.now) == 2
    world.now += 1.0
    world.cancel(11, FIRST + 1)
    assert held.age(world.now) == 1
    world.submit(13, FIRST + 1)  # sent again: it keeps its age
    world.cancel(12, FIRST + 1)
    assert held.age(world.now) == 1


def test_what_is_held_is_bounded(world: World) -> None:
    for number in range(MAX_HELD):
        world.enqueue(number, FIRST + 1)
    assert world.sent == []
    world.enqueue(MAX_HELD, FIRST + 1)
    assert [m.id for _, m in world.take(Rejected)] == [MAX_HELD]
    world.enqueue(5, FIRST + 1)
    world.enqueue(5, FIRST + 2)
    assert world.take(Rejected) == []
    assert len(world.dispatcher.held) == MAX_HELD


def test_what_is_held_is_bounded_in_bytes(world: World) -> None:
    big = b"x" * (MAX_HELD_BYTES // 4)

    def enqueue(number: int, work: bytes, attempt: int = FIRST + 1) -> None:
        world.dispatcher.request(Enqueue(number, attempt, TOKENIZER, work), world.now)

    for number in range(4):
        enqueue(number, big)
    assert world.take(Rejected) == []
    enqueue(5, b"one more")
    ((to, rejected),) = world.take(Rejected)
    assert (to, rejected.id, rejected.status) == (TOKENIZER, 5, 503)
    assert f"{MAX_HELD_BYTES >> 20} MiB" in rejected.message
    enqueue(3, big)
    enqueue(3, b"small", FIRST + 2)
    enqueue(5, b"one more")
    assert world.take(Rejected) == [], "a newer attempt is held in the place of the older one"
    world.cancel(2, FIRST + 1)
    enqueue(6, b"x" * (len(big) // 2))
    assert world.take(Rejected) == []
    world.add(1, "scheduler")
    world.tick(0.25)
    assert len(world.take(Enqueue)) == 5
    assert world.dispatcher.held.bytes == 0


def test_a_young_router_holds_what_comes_until_it_knows_everybody() -> None:
    world = World()
    world.add(1, "tokenizer", load=10)
    world.submit(10)
    world.submit(11)
    assert world.take(Submit, Rejected) == []
    world.now += 0.5
    world.add(2, "tokenizer")
    world.tick()
    assert world.take(Submit, Rejected) == []
    world.grow_up()
    world.tick()
    assert world.where() == [2, 2]


def test_a_young_router_without_anybody_turns_new_requests_away_when_grown() -> None:
    world = World()
    world.submit(10)
    world.enqueue(11, FIRST + 1)
    world.grow_up()
    world.tick()
    assert [m.id for _, m in world.take(Rejected)] == [10]
    assert len(world.dispatcher.held) == 1


def test_a_full_outbox_is_an_error_at_once_and_no_load(world: World) -> None:
    world.add(1, "tokenizer")
    world.full.add(address(1))
    world.submit(10)
    ((to, rejected),) = world.take(Rejected)
    assert (to, rejected.status) == (FRONTEND, 503)
    assert "tokenizer" in rejected.message
    assert "does not keep up" in rejected.message
    assert world.dispatcher.routed == 0


# --- cancelling


def test_a_cancellation_follows_its_request(world: World) -> None:
    for number, service in ((1, "tokenizer"), (2, "tokenizer"), (3, "scheduler"), (4, "frontend")):
        world.add(number, service)
    world.submit(10)
    world.submit(11)
    where = {message.id: to for to, message in world.take(Submit)}
    world.cancel(11, sender=4)
    world.cancel(10, sender=4, choice=2)
    assert world.take(Cancel) == [
        (where[11], Cancel([11], [FIRST], [-1])),
        (where[10], Cancel([10], [FIRST], [2])),
    ]


def test_the_cancellation_of_a_tokenizer_follows_to_the_engine(world: World) -> None:
    world.add(1, "tokenizer")
    world.add(2, "scheduler")
    world.submit(10)
    world.enqueue(10)
    world.take()
    world.cancel(10, sender=1)
    assert world.take(Cancel) == [(address(2), Cancel([10], [FIRST], [-1]))]


def test_a_cancellation_without_a_route_goes_to_all_who_might_get_the_request(
    world: World,
) -> None:
    for number, service in ((1, "tokenizer"), (2, "tokenizer"), (3, "scheduler")):
        world.add(number, service)
    world.cancel(10)
    assert [to for to, _ in world.take(Cancel)] == [address(1), address(2)]


def test_a_request_that_its_cancellation_overtook_goes_nowhere(world: World) -> None:
    world.add(1, "tokenizer")
    world.cancel(10)
    world.take(Cancel)
    world.submit(10)
    assert world.take(Submit, Rejected) == []
    world.submit(10, first_attempt(2))
    assert world.where() == [1], "a later attempt was not meant"
    world.tick(61.0)
    world.submit(10)
    assert world.where() == [1], "a tombstone lasts a minute"


def test_the_cancellation_of_one_choice_does_not_bury_the_request(world: World) -> None:
    world.add(1, "tokenizer")
    world.cancel(10, choice=0)
    world.submit(10)
    assert world.where() == [1]


def test_a_cancelled_request_is_held_no_longer(world: World) -> None:
    world.submit(10, FIRST + 1)
    world.submit(11, FIRST + 2)
    world.cancel(10, FIRST + 1)
    world.cancel(11, FIRST + 1)  # of an attempt before the one that is held
    world.add(1, "tokenizer")
    world.tick(0.25)
    assert [message.id for _, message in world.take(Submit)] == [11]


def test_many_cancellations_in_one_message_each_find_their_way(world: World) -> None:
    world.add(1, "tokenizer")
    world.add(2, "tokenizer")
    for number in range(10):
        world.submit(number)
    where = {message.id: to for to, message in world.take(Submit)}
    world.dispatcher.cancel(0, Cancel(list(range(10)), [FIRST] * 10, [-1] * 10), world.now)
    sent = world.take(Cancel)
    assert {(i, to) for to, message in sent for i in message.ids} == set(where.items())


def test_columns_of_different_length_cancel_nothing(world: World) -> None:
    world.add(1, "tokenizer")
    with pytest.raises(ValueError, match="differ in length"):
        world.dispatcher.cancel(0, Cancel([1, 2], [FIRST], [-1]), world.now)
    assert world.take(Cancel) == []


# --- several models


@pytest.fixture
def two_models() -> World:
    world = World()
    world.grow_up()
    for number, model in enumerate("ab"):
        world.add(10 * number + 1, "tokenizer", model=model)
        world.add(10 * number + 2, "scheduler", model=model)
    world.sent.clear()
    return world


def test_a_request_goes_to_members_of_its_model(two_models: World) -> None:
    world = two_models
    for number in range(3):
        world.submit(number, model="a")
        world.enqueue(number, model="a")
        world.submit(10 + number, model="b")
        world.enqueue(10 + number, model="b")
    assert world.where() == [1, 2, 11, 12] * 3


def test_a_request_waits_for_its_own_model_and_others_do_not(two_models: World) -> None:
    world = two_models
    world.roster.died(12, "host-a")
    world.enqueue(1, model="a")
    world.enqueue(2, model="b")
    assert world.where() == [2]
    world.add(13, "scheduler", model="a")
    world.tick(0.25)
    assert world.where() == []
    world.add(14, "scheduler", model="b")
    world.tick(0.25)
    assert world.where() == [14]


def sleeps(world: World, name: str, reason: str = "", launcher: int = 50) -> None:
    """A launcher says that the model sleeps, and its engine has left."""
    world.add(launcher, "launcher")
    sleeper = Sleeper(name, [], Sleep.ASLEEP, Capacity(), 5.0, reason)
    world.roster.beat(
        Beat(
            *(address(launcher), launcher, Phase.READY, "", 1, 0.0, 0.0, 0, Capacity()),
            *(encode(MetricsReport([])), 10**6, [], ["a", "b", name]),
            sleepers=[sleeper],
        ),
        world.now,
    )
    world.sent.clear()


def test_a_request_for_a_model_that_sleeps_waits_and_its_launcher_hears_at_once(
    two_models: World,
) -> None:
    world = two_models
    world.roster.held = world.dispatcher.held.counts
    world.roster.goodbye(12)
    sleeps(world, "b")
    for number in (1, 2):
        world.enqueue(number, model="b")
    ((to, told),) = world.take(BeatAnswer)
    assert to == address(50)
    assert [(one.model, one.held) for one in told.others if one.held] == [("b", 1)]
    beats = LOADING_HOLD_SECONDS - 1.0
    world.tick(beats)
    assert world.take(Rejected) == [], "it is waited for as if it were loading"
    world.tick(2.0)
    assert len(world.take(Rejected)) == 2


def test_a_model_that_cannot_be_woken_is_waited_for_as_any_lost_engine(two_models: World) -> None:
    world = two_models
    world.roster.goodbye(12)
    sleeps(world, "b", reason="worker 1 ended")
    world.enqueue(1, model="b")
    assert world.take(BeatAnswer) == []
    world.tick(HOLD_SECONDS + 0.1)
    assert len(world.take(Rejected)) == 1


def test_a_model_that_sleeps_since_the_start_is_served(two_models: World) -> None:
    world = two_models
    world.add(31, "tokenizer", model="c")
    sleeps(world, "c")
    world.submit(1, model="c")
    world.enqueue(1, model="c")
    assert world.where() == [31]
    assert len(world.dispatcher.held) == 1


@pytest.mark.parametrize("heard", [True, False])
def test_a_model_that_falls_asleep_without_a_tokenizer_is_not_withdrawn(
    two_models: World, heard: bool
) -> None:
    world = two_models
    for number in (1, 2, 11, 12):
        world.beat(number)
    world.roster.died(11, "host-a")
    if heard:
        sleeps(world, "b")
    world.roster.goodbye(12)
    assert ("b" in world.roster.models) == heard
    if not heard:
        sleeps(world, "b")
    assert world.roster.models.served == ["a", "b"]
    assert world.roster.models.withdrawn == []


def test_models_sleep_on_while_their_launcher_joins_anew_and_not_when_it_is_gone(
    two_models: World,
) -> None:
    roster = two_models.roster
    sleeps(two_models, "b")
    assert set(roster.asleep) == {"b"}
    roster.died(50, "host-a")
    roster.members.clear()
    roster.tick(two_models.now)
    roster.tick(two_models.now + 0.9)
    sleeps(two_models, "b", "its launcher is there again", launcher=51)
    roster.tick(two_models.now + 1.8)
    assert roster.asleep["b"].reason
    roster.members.clear()
    for second in range(13):
        roster.tick(two_models.now + 2.0 + 0.9 * second)
        assert (not roster.asleep) == (second > 11)


def test_a_request_for_a_model_that_was_never_ready_is_turned_away(two_models: World) -> None:
    world = two_models
    world.add(21, "tokenizer", model="c")
    world.submit(1, model="c")
    world.enqueue(1, model="c")
    ((_, rejected),) = world.take(Rejected)
    assert "no engine of the model 'c' is running" in rejected.message


def test_what_waits_for_one_model_does_not_fill_the_room_of_another(two_models: World) -> None:
    world = two_models
    world.roster.died(2, "host-a")
    world.roster.died(12, "host-a")
    big = b"x" * (MAX_HELD_BYTES - 2 * OVERHEAD_BYTES)
    for number, model in ((1, "a"), (2, "b"), (3, "a")):
        enqueue = Enqueue(number, FIRST, TOKENIZER, big, model=model)
        world.dispatcher.request(enqueue, world.now)
    ((_, rejected),) = world.take(Rejected)
    assert rejected.id == 3
    assert "no engine of the model 'a' is running" in rejected.message


def test_what_waits_for_all_models_together_is_bounded(two_models: World) -> None:
    world = two_models
    names = [f"model-{number}" for number in range(5)]
    world.beat(1, served=names)  # they were ready before this router
    big = b"x" * (MAX_HELD_BYTES_IN_ALL // 4)
    for number, model in enumerate(names):
        enqueue = Enqueue(number, FIRST + 1, TOKENIZER, big, model=model)
        world.dispatcher.request(enqueue, world.now)
    assert len(world.dispatcher.held) == 3, "what they take beside their prompts counts as well"
    refused = [rejected for _, rejected in world.take(Rejected)]
    assert [(one.id, one.status) for one in refused] == [(3, 503), (4, 503)]
    assert f"{MAX_HELD_BYTES_IN_ALL >> 20} MiB wait for all models together" in refused[0].message
    world.cancel(0, FIRST + 1)
    again = Enqueue(3, FIRST + 1, TOKENIZER, big, model=names[3])
    world.dispatcher.request(again, world.now)
    assert world.take(Rejected) == []


def test_a_tick_costs_the_same_however_many_requests_wait(two_models: World) -> None:
    world = two_models
    world.roster.died(2, "host-a")
    world.enqueue(1, FIRST + 1, model="a")
    world.tick(0.25)
    few = calls(lambda: world.tick(0.25))
    for number in range(2, 1000):
        world.enqueue(number, FIRST + 1, model="a")
    world.tick(0.25)
    assert calls(lambda: world.tick(0.25)) <= few
    world.add(3, "scheduler", model="a")
    world.tick(0.25)
    assert len(world.take(Enqueue)) == 999


def test_a_request_that_waits_is_known_when_its_wait_is_over(world: World) -> None:
    world.add(1, "scheduler")
    world.add(2, "scheduler", phase=Phase.LOADING)
    world.enqueue(10)
    world.roster.bury(world.roster.members[1], "a test")
    world.enqueue(10)
    for _ in range(int(LOADING_HOLD_SECONDS) + 1):
        world.tick(1.0)
        world.beat(2, phase=Phase.LOADING)
    assert len(world.take(Rejected)) == 1
    world.tick(ROUTE_SECONDS - 2.0)
    world.enqueue(10, FIRST)
    assert world.take(Rejected) == [], "it is no new request that nobody was ever ready for"


def test_a_request_without_a_model_goes_to_anyone(two_models: World) -> None:
    two_models.roster.died(1, "host-a")
    two_models.submit(1)
    assert two_models.where() == [11]


# --- tasks

GENERATOR = Capacity(max_model_len=64, vocab_size=99)
ENCODER = Capacity(max_model_len=64, vocab_size=99, tasks=["embed"], generates=False)


def served_by(*capacities: Capacity) -> World:
    """A model with a tokenizer and these engines, numbered from 2 on, whose router is not young."""
    world = World()
    world.add(1, "tokenizer")
    for number, capacity in enumerate(capacities, 2):
        world.add(number, "scheduler", phase=Phase.LOADING)
        world.beat(number, capacity=capacity)
    world.tick(HOLD_SECONDS + 1.0)
    world.sent.clear()
    return world


def test_a_request_goes_only_to_an_engine_that_does_its_task() -> None:
    world = served_by(GENERATOR, ENCODER)
    for number in range(4):
        world.enqueue(number, task="embed")
        world.enqueue(10 + number)
    assert world.where() == [3, 2] * 4
    world.enqueue(0, attempt=FIRST + 1, task="embed")  # not elsewhere, though it came back from 3
    assert world.where() == [3]


def test_a_task_that_no_engine_does_is_refused_by_name() -> None:
    world = served_by(ENCODER)
    world.enqueue(10)
    world.enqueue(11, task="fold")
    for (_, refused), task in zip(world.take(Rejected), ("generate", "fold"), strict=True):
        assert (refused.status, refused.kind, refused.param) == (
            400,
            "invalid_request_error",
            "task",
        )
        assert f"task is {task!r}" in refused.message and "they do: embed" in refused.message
    assert not len(world.dispatcher.held)


def test_a_request_waits_for_engines_that_do_its_task_and_are_away() -> None:
    world = served_by(GENERATOR, ENCODER)
    world.roster.bury(world.roster.members[3], "it was killed")
    world.enqueue(10, task="embed")
    assert not world.take(Enqueue, Rejected)
    world.add(4, "scheduler", phase=Phase.LOADING)
    world.tick(HOLD_SECONDS + 1.0)
    assert not world.take(Enqueue, Rejected)
    world.beat(4, capacity=ENCODER)
    world.tick(0.1)
    assert world.where() == [4]
    world.roster.bury(world.roster.members[4], "it was killed")
    world.enqueue(11, task="embed")
    world.tick(HOLD_SECONDS + 1.0)
    ((_, refused),) = world.take(Rejected)
    assert refused.status == 503 and "that does the task 'embed'" in refused.message


def test_what_waits_is_refused_once_the_last_engine_has_said_that_it_does_not_do_it() -> None:
    world = served_by(GENERATOR)
    world.add(3, "scheduler", phase=Phase.LOADING)
    world.enqueue(10, task="embed")
    world.enqueue(11, attempt=FIRST + 1, task="embed")  # one that an engine had: it waits
    world.tick(0.1)
    assert not world.take(Enqueue, Rejected)
    world.beat(3, capacity=GENERATOR)
    world.tick(0.1)
    ((_, refused),) = world.take(Rejected)
    assert (refused.id, refused.status) == (10, 400)


def test_a_young_router_does_not_know_what_those_do_that_are_away() -> None:
    world = World()
    world.add(1, "tokenizer")
    world.add(2, "scheduler")
    world.beat(2, capacity=GENERATOR)
    world.grow_up()
    world.enqueue(10, task="embed")
    assert not world.take(Enqueue, Rejected)
    world.add(3, "scheduler")
    world.beat(3, capacity=ENCODER)
    world.tick(0.1)
    assert world.where() == [3]


def test_a_request_waits_for_a_model_that_sleeps_as_long_as_it_may_and_then_hears_of_its_time(
    two_models: World,
) -> None:
    world, longest = two_models, 2 * LOADING_HOLD_SECONDS
    world.dispatcher = Dispatcher(
        world.roster, world.send, world.now - HOLD_SECONDS, wake_wait_s=longest
    )
    world.roster.goodbye(12)
    sleeps(world, "b")
    for number in range(MAX_HELD + 1):
        world.enqueue(number, model="b")
    ((_, full),) = world.take(Rejected)
    assert full.retry_after == 5.0, "as long as the model takes to wake"
    world.tick(longest - 1.0)
    assert world.take(Rejected) == []
    world.tick(2.0)
    assert {told.retry_after for _, told in world.take(Rejected)} == {5.0}
