"""The router's record of who is alive, with injected time."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.protocol.wire import codec
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.membership import (
    Beat,
    BeatAnswer,
    Capacity,
    Demand,
    Fenced,
    Hello,
    Identity,
    Members,
    MetricSample,
    MetricsReport,
    Phase,
    Refused,
    WhoAreYou,
)
from penstock.services.router.member import (
    LOADING_SILENCE_SECONDS,
    REPAIR_SECONDS,
    SILENCE_SECONDS,
    TCP_SILENCE_SECONDS,
)
from penstock.services.router.roster import (
    GOODBYE_SECONDS,
    MAX_LOST,
    NOTE_SECONDS,
    PAUSE_SECONDS,
    Roster,
)
from penstock.services.router.served_models import MAX_ABSENT

OWN = 99
encode = msgspec.msgpack.encode


class Wire:
    """What the router said, in order, and to whom it will never talk again."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Message]] = []
        self.last_words: list[tuple[str, Message]] = []
        self.forgotten: list[str] = []
        self.log: list[tuple[str, str]] = []

    def send(self, to: str, message: Message) -> bool:
        self.sent.append((to, message))
        return to not in self.forgotten

    def take(self, kind: type) -> list[tuple[str, Any]]:
        found = [(to, message) for to, message in self.sent if isinstance(message, kind)]
        self.sent = [(to, message) for to, message in self.sent if not isinstance(message, kind)]
        return found


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def roster(wire: Wire) -> Roster:
    return Roster(
        OWN,
        wire.send,
        lambda to, message: wire.last_words.append((to, message)),
        wire.forgotten.append,
        lambda level, text: wire.log.append((level, text)),
    )


def address(number: int) -> str:
    return f"ipc:///run/{number}.sock"


def hello(number: int, service: str = "worker", **changes: Any) -> Hello:
    identity = encode(Identity(number, "host-a"))
    plain = Hello(
        service, address(number), number, codec.PROTOCOL_VERSION, codec.SCHEMA_HASH, identity
    )
    return msgspec.structs.replace(plain, **changes)


def beat(number: int, phase: str = Phase.READY, version: int = 10**6, **changes: Any) -> Beat:
    metrics = encode(MetricsReport([]))
    plain = Beat(address(number), number, phase, "", 1, 0.0, 10.0, 0, Capacity(), metrics, version)
    return msgspec.structs.replace(plain, **changes)


def join(roster: Roster, *numbers: int, now: float = 100.0, service: str = "worker") -> None:
    for number in numbers:
        roster.hello(hello(number, service), now)
        roster.beat(beat(number), now)
    roster.publish(101.0)


def counter(value: float) -> bytes:
    return encode(MetricsReport([MetricSample("steps_total", [], [value])]))


def total(roster: Roster) -> float:
    reports = [process.report for process in roster.metrics()]
    return sum(sample.values[0] for report in reports for sample in report.samples)


# --- joining


def test_everybody_hears_of_a_new_member_once(roster: Roster, wire: Wire) -> None:
    roster.hello(hello(1, "tokenizer"), 100.0)
    roster.hello(hello(2), 100.0)
    roster.publish(101.0)
    roster.publish(101.0)
    snapshots = wire.take(Members)
    assert [to for to, _ in snapshots] == [address(1), address(2)]
    (_, snapshot) = snapshots[0]
    assert (snapshot.router, snapshot.version, snapshot.lost) == (OWN, 1, [])
    assert [(p.service, p.incarnation, p.address, p.phase) for p in snapshot.peers] == [
        ("tokenizer", 1, address(1), Phase.STARTING),
        ("worker", 2, address(2), Phase.STARTING),
    ]
    assert snapshot.peers[0].identity == Identity(1, "host-a")


def test_a_second_hello_of_a_member_is_answered_to_it_alone(roster: Roster, wire: Wire) -> None:
    join(roster, 1, 2)
    wire.sent.clear()
    roster.hello(hello(1), 101.0)
    roster.publish(101.0)
    assert [to for to, _ in wire.take(Members)] == [address(1)]
    assert len(roster.members) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"protocol_version": codec.PROTOCOL_VERSION + 1},
        {"protocol_version": 0},
        {"schema_hash": "0" * 16},
        {"protocol_version": codec.PROTOCOL_VERSION + 1, "identity": b"\xc1 another layout"},
    ],
)
def test_another_version_is_refused_with_both_versions_and_a_remedy(
    roster: Roster, wire: Wire, changes: dict[str, Any]
) -> None:
    theirs = hello(1, "tokenizer", **changes)
    roster.hello(theirs, 100.0)
    roster.publish(101.0)
    assert roster.members == {}
    assert wire.sent == []
    ((to, refused),) = wire.last_words
    assert to == address(1)
    assert isinstance(refused, Refused)
    assert f"{theirs.protocol_version}/{theirs.schema_hash}" in refused.reason
    assert f"{codec.PROTOCOL_VERSION}/{codec.SCHEMA_HASH}" in refused.reason
    assert refused.remedy
    ((level, text),) = wire.log
    assert level == "warning"
    assert address(1) in text


def of(number: int, model: str, fingerprint: str = "") -> bytes:
    return encode(Identity(number, "host-a", model=model, fingerprint=fingerprint))


def test_a_process_with_other_files_of_a_model_is_refused_and_both_are_named(
    roster: Roster, wire: Wire
) -> None:
    roster.hello(hello(1, "scheduler", identity=of(1, "big", "aa")), 100.0)
    roster.hello(hello(2, "frontend"), 100.0)
    roster.hello(hello(3, "tokenizer", identity=of(3, "moved", "aa")), 100.0)
    roster.hello(hello(4, "tokenizer", identity=of(4, "big", "bb")), 100.0)
    roster.hello(hello(5, "tokenizer", identity=of(5, "small", "bb")), 100.0)
    assert set(roster.members) == {1, 2, 3, 5}, "another model has another name"
    ((to, refused),) = wire.last_words
    assert to == address(4)
    assert isinstance(refused, Refused)
    assert "'big' (files bb)" in refused.reason
    assert "the scheduler of this server 'big' (files aa)" in refused.reason
    assert "MODEL" in refused.remedy


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1)])
def test_a_process_has_the_name_that_the_scheduler_gives_to_its_files(
    roster: Roster, wire: Wire, order: tuple[int, ...]
) -> None:
    hellos = {
        1: hello(1, "scheduler", identity=of(1, "big", "aa")),
        2: hello(2, "scheduler", identity=of(2, "small", "bb")),
        3: hello(3, "tokenizer", identity=of(3, "snapshots", "aa")),
    }
    for number in order:
        roster.hello(hellos[number], 100.0)
        roster.publish(100.0)
    assert [m.address for m in roster.of("tokenizer", "big")] == [address(3)]
    assert roster.of("tokenizer", "small") == []
    told = {
        peer.incarnation: peer.identity.model for _, m in wire.take(Members) for peer in m.peers
    }
    assert told == {1: "big", 2: "small", 3: "big"}


def test_each_model_is_served_once_its_own_parts_are_ready(roster: Roster, wire: Wire) -> None:
    def add(number: int, service: str, model: str, phase: str = Phase.READY) -> None:
        roster.hello(hello(number, service, identity=of(number, model)), 100.0)
        roster.beat(beat(number, phase), 100.0)

    add(1, "tokenizer", "a")
    add(2, "scheduler", "b")
    roster.publish(100.0)
    assert roster.models.served == []
    add(3, "scheduler", "a")
    assert roster.models.served == ["a"]
    add(4, "tokenizer", "b", Phase.LOADING)
    assert roster.models.served == ["a"]
    roster.beat(beat(4), 101.0)
    roster.publish(101.0)
    assert {tuple(m.served) for _, m in wire.take(Members) if m.served} == {("a", "b")}


def test_who_is_ready_is_what_the_latest_beats_say(roster: Roster) -> None:
    def ready() -> list[int]:
        return [member.incarnation for member in roster.ready("scheduler")]

    join(roster, 1, 2, service="scheduler")
    assert ready() == [1, 2]
    roster.beat(beat(1, Phase.DRAINING), 101.0)
    assert ready() == [2]
    roster.beat(beat(1), 102.0)
    assert ready() == [1, 2]
    found = roster.ready_members("scheduler").that_hold(500)
    assert len(found.members) == 2, "neither says how long a sequence may be"
    roster.beat(beat(2, capacity=Capacity(max_model_len=100)), 103.0)
    found = roster.ready_members("scheduler").that_hold(500)
    assert [member.incarnation for member in found.members] == [1]
    roster.bury(roster.members[1], "a test")
    assert ready() == [2]


def serve_for_a_while(roster: Roster, number: int, model: str, *, lost: bool) -> None:
    """A tokenizer and an engine of a model come, are ready and go."""
    parts = ((number, "tokenizer"), (number + 1, "scheduler"))
    for incarnation, service in parts:
        identity = encode(Identity(incarnation, "host-a", model=model, fingerprint=f"of {model}"))
        roster.hello(hello(incarnation, service, identity=identity), 100.0)
    for incarnation, _ in parts:
        roster.beat(beat(incarnation), 100.0)
    for incarnation, _ in parts:
        if lost:
            roster.bury(roster.members[incarnation], "a test")
        else:
            roster.goodbye(incarnation)


@pytest.mark.parametrize("lost", [False, True])
def test_models_that_come_and_go_for_ever_are_not_all_remembered(
    roster: Roster, wire: Wire, lost: bool
) -> None:
    named = Identity(1, "host-a", model="stays", fingerprint="of stays")
    for incarnation, service in ((1, "tokenizer"), (2, "scheduler")):
        roster.hello(hello(incarnation, service, identity=encode(named)), 100.0)
    roster.beat(beat(1), 100.0)
    roster.beat(beat(2), 100.0)
    for number in range(2 * MAX_ABSENT):
        serve_for_a_while(roster, 1000 + 2 * number, f"model-{number}", lost=lost)
        roster.publish(101.0)
    models = roster.models
    assert "stays" in models, "who is there is remembered, however long it has been"
    assert len(models.served) == 1 + (MAX_ABSENT if lost else 0)
    assert len(models.withdrawn) == MAX_ABSENT
    latest = f"model-{2 * MAX_ABSENT - 1}"
    assert latest in (models.served if lost else models.withdrawn)
    assert models.names_known == len(models.served)
    (*_, (_, told)) = wire.take(Members)
    assert len(told.served) + len(told.withdrawn) <= 2 * MAX_ABSENT + 1


def test_engines_that_never_get_ready_under_ever_new_names_are_not_remembered(
    roster: Roster,
) -> None:
    for number in range(50):
        identity = encode(Identity(number, "host-a", model=f"m-{number}", fingerprint=f"f{number}"))
        roster.hello(hello(number, "scheduler", identity=identity), 100.0)
        roster.bury(roster.members[number], "a test")
    assert roster.models.names_known == 0


def test_a_model_that_its_launcher_ends_is_withdrawn_while_its_processes_are_ready(
    wire: Wire, roster: Roster
) -> None:
    def everybody_beats(now: float, unloading: list[str]) -> list[str]:
        for number, model in ((1, "a"), (2, "a"), (3, "b"), (4, "b")):
            service = "tokenizer" if number % 2 else "scheduler"
            roster.hello(hello(number, service, identity=of(number, model)), now)
            roster.beat(beat(number, served=["a"]), now)
        roster.hello(hello(5, "launcher"), now)
        roster.beat(beat(5, served=["a"], unloading=unloading), now)
        for number in range(1, 5):
            roster.beat(beat(number, served=["a", "b"] if number == 3 else ["a"]), now)
        return roster.models.served

    assert everybody_beats(100.0, []) == ["a", "b"]
    assert everybody_beats(101.0, ["b"]) == ["a"]
    roster.publish(101.0)
    (*_, (_, told)) = wire.take(Members)
    assert (told.served, told.withdrawn) == (["a"], ["b"])
    for number in (3, 4):
        roster.goodbye(number)
    assert roster.models.served == ["a"]
    assert everybody_beats(102.0, []) == ["a", "b"], "it was loaded again"
    assert roster.models.withdrawn == []


def test_a_launcher_hears_what_frontends_have_open(roster: Roster, wire: Wire) -> None:
    join(roster, 1, 2, service="frontend")
    join(roster, 3, service="launcher")
    for number in (1, 2):
        roster.beat(beat(number, demands=[Demand(open=number, model="a")]), 101.0)
    roster.beat(beat(3), 101.0)
    (*_, (_, answer)) = wire.take(BeatAnswer)
    assert [(one.model, one.open) for one in answer.others] == [("a", 3)]


def test_a_model_is_withdrawn_when_its_last_process_has_left_but_not_when_it_is_lost(
    roster: Roster, wire: Wire
) -> None:
    for number, service, model in ((1, "tokenizer", "a"), (2, "scheduler", "a"),
                                   (3, "tokenizer", "b"), (4, "scheduler", "b")):  # fmt: skip
        roster.hello(hello(number, service, identity=of(number, model)), 100.0)
        roster.beat(beat(number), 100.0)
    roster.died(3, "host-a")
    roster.died(4, "host-a")
    assert roster.models.served == ["a", "b"], "what was lost may come back"
    roster.hello(hello(5, "scheduler", identity=of(5, "b")), 101.0)
    roster.hello(hello(6, "tokenizer", identity=of(6, "b")), 101.0)
    roster.goodbye(5)
    assert roster.models.served == ["a", "b"], "one of it is there"
    roster.goodbye(6)
    roster.beat(beat(1, served=["a", "b"]), 102.0)  # it has not heard of that yet
    roster.publish(102.0)
    (_, told), *_ = wire.take(Members)[-2:]
    assert (told.served, told.withdrawn) == (["a"], ["b"])
    roster.goodbye(1)
    roster.goodbye(2)
    assert roster.models.served == ["a"], "the only one: the whole server is started again"


def test_demands_are_added_up_for_each_model(roster: Roster, wire: Wire) -> None:
    join(roster, 1, 2, 3, service="frontend")
    join(roster, 4, 5, service="scheduler")
    roster.beat(beat(2, demands=[Demand(5, 1, model="a"), Demand(7, 2, model="b")]), 101.0)
    roster.beat(beat(3, demands=[Demand(10, 3, model="b")]), 101.0)
    roster.beat(beat(4, demands=[Demand(slots=8, model="a")]), 101.0)
    roster.beat(beat(5, Phase.LOADING, demands=[Demand(slots=8, model="b")]), 101.0)
    wire.take(BeatAnswer)
    roster.beat(beat(1), 102.0)
    ((_, answer),) = wire.take(BeatAnswer)
    assert answer.others == [Demand(5, 1, slots=8, model="a"), Demand(17, 5, model="b")]


@pytest.mark.parametrize("identity", [b"", b"\xc1", b"\xff" * 9, encode([1, "h", "\x00"])[:-1]])
def test_an_identity_that_cannot_be_read_is_refused_and_not_asked_for_again(
    roster: Roster, wire: Wire, identity: bytes
) -> None:
    roster.hello(hello(1, identity=identity), 100.0)
    roster.hello(hello(2, identity=b"\x92\x01\xa2\xff\xfe"), 100.0)
    assert roster.members == {}
    assert all(isinstance(message, Refused) for _, message in wire.last_words)
    assert [to for to, _ in wire.last_words] == [address(1), address(2)]


def test_an_unknown_sender_of_beats_is_asked_who_it_is(roster: Roster, wire: Wire) -> None:
    roster.beat(beat(1), 100.0)
    assert wire.sent == [(address(1), WhoAreYou(OWN))]
    assert roster.members == {}


# --- beats


def test_a_beat_is_answered_with_the_router_s_incarnation(roster: Roster, wire: Wire) -> None:
    join(roster, 1)
    assert wire.take(BeatAnswer) == [(address(1), BeatAnswer(OWN))]


def test_a_frontend_hears_with_each_beat_what_others_have_open_and_what_engines_can_run(
    roster: Roster, wire: Wire
) -> None:
    join(roster, 1, 2, 3, service="frontend")
    join(roster, 4)
    for number in (1, 2, 3):
        roster.beat(beat(number, demands=[Demand(10 * number, number, 100 * number, 7)]), 101.0)
    roster.beat(beat(4, demands=[Demand(slots=64)]), 101.0)
    wire.take(BeatAnswer)
    roster.beat(beat(1, demands=[Demand(50, 50, 50, 50)]), 102.0)
    roster.beat(beat(4, demands=[Demand(slots=64)]), 102.0)
    assert wire.take(BeatAnswer) == [
        (address(1), BeatAnswer(OWN, [Demand(50, 5, 500, 14, 64)])),
        (address(4), BeatAnswer(OWN)),
    ]
    roster.died(3, "host-a")
    roster.beat(beat(1), 103.0)
    assert wire.take(BeatAnswer) == [(address(1), BeatAnswer(OWN, [Demand(20, 2, 200, 7, 64)]))]


@pytest.mark.parametrize(
    "changes", [{"phase": Phase.DRAINING}, {"capacity": Capacity(1000, 16, 64, 2048, 4096, 32000)}]
)
def test_a_change_of_phase_or_capacity_is_told_to_all_at_once_and_alone(
    roster: Roster, wire: Wire, changes: dict[str, Any]
) -> None:
    join(roster, 1, 2, 3)
    wire.sent.clear()
    for change in (changes, {}):
        version = roster.version
        roster.beat(beat(1, **change), 101.0)
        roster.publish(101.0)
        told = wire.take(Members)
        assert [to for to, _ in told] == [address(number) for number in (1, 2, 3)]
        for _, members in told:
            assert (members.since, members.version) == (version, version + 1)
            assert [(p.incarnation, p.phase) for p in members.peers] == [
                (1, change.get("phase", Phase.READY))
            ]
            assert (members.gone, members.lost) == ([], [])
    roster.beat(beat(1, load=55, progress=9), 101.0)
    roster.publish(101.0)
    assert wire.take(Members) == []
    assert roster.members[1].load == 55


def test_notes_of_many_that_load_go_out_together_and_once_a_second(
    roster: Roster, wire: Wire
) -> None:
    numbers = range(1, 33)
    join(roster, *numbers)
    wire.sent.clear()
    now = 101.0
    for turn in range(40):  # ten seconds of four beats each
        now += 0.25
        for number in numbers:
            note = f"reading weights {turn} %"
            roster.beat(beat(number, Phase.LOADING, roster.version, note=note), now)
            roster.publish(now)
    told = wire.take(Members)
    entries = sum(len(members.peers) for _, members in told)
    assert all(members.since for _, members in told), "nobody needs the whole"
    # The phase changed once for each; notes go out at most eleven times.
    assert entries <= (1 + 11) * len(numbers) ** 2
    assert all(m.note == "reading weights 39 %" for m in roster.members.values())
    roster.publish(now + NOTE_SECONDS)
    (_, last) = wire.take(Members)[-1]
    assert [p.note for p in last.peers] == ["reading weights 39 %"] * len(numbers)


def test_whoever_joins_hears_of_all_and_the_others_of_it_alone(roster: Roster, wire: Wire) -> None:
    join(roster, 1, 2)
    wire.sent.clear()
    join(roster, 3, now=102.0)
    told = dict(wire.take(Members))
    assert [p.incarnation for p in told[address(1)].peers] == [3]
    assert told[address(3)].since == 0
    assert [p.incarnation for p in told[address(3)].peers] == [1, 2, 3]


def test_whoever_is_gone_is_named_as_lost_or_not(roster: Roster, wire: Wire) -> None:
    join(roster, 1, 2, 3)
    wire.sent.clear()
    roster.goodbye(1)
    roster.died(2, "host-a")
    roster.publish(102.0)
    ((to, change),) = wire.take(Members)
    assert to == address(3)
    assert (change.peers, change.gone, change.lost) == ([], [1, 2], [2])


def test_who_missed_a_change_gets_the_whole_with_its_next_beats(roster: Roster, wire: Wire) -> None:
    join(roster, 1, 2)
    before = roster.version
    roster.beat(beat(1, version=before), 101.0)
    roster.beat(beat(2, Phase.DRAINING, version=before), 101.0)
    roster.publish(101.0)
    wire.sent.clear()
    roster.beat(beat(1, version=before), 101.5)
    assert wire.take(Members) == [], "the change may be on its way"
    roster.beat(beat(1, version=before), 102.0)
    ((to, whole),) = wire.take(Members)
    assert (to, whole.version, whole.since) == (address(1), roster.version, 0)
    assert [(p.incarnation, p.phase) for p in whole.peers] == [
        (1, Phase.READY),
        (2, Phase.DRAINING),
    ]
    roster.beat(beat(1, version=before), 102.5)
    assert wire.take(Members) == [], "it may only be too busy to read"
    roster.beat(beat(1, version=before), 102.0 + REPAIR_SECONDS)
    assert len(wire.take(Members)) == 1
    roster.beat(beat(1, version=roster.version), 110.0)
    assert wire.take(Members) == []


def test_who_could_not_be_sent_a_change_gets_the_whole(roster: Roster, wire: Wire) -> None:
    join(roster, 1, 2)
    wire.forgotten.append(address(1))  # its outbox is full
    roster.beat(beat(2, Phase.DRAINING), 101.0)
    roster.publish(101.0)
    wire.forgotten.clear()
    wire.sent.clear()
    roster.beat(beat(2), 102.0)
    roster.publish(102.0)
    told = dict(wire.take(Members))
    assert (told[address(1)].since, len(told[address(1)].peers)) == (0, 2)
    assert (told[address(2)].since, len(told[address(2)].peers)) == (roster.version - 1, 1)


def test_all_hear_that_the_server_has_been_ready_once(roster: Roster, wire: Wire) -> None:
    join(roster, 1, service="tokenizer")
    roster.hello(hello(2, "scheduler"), 100.0)
    roster.beat(beat(2, Phase.LOADING), 100.0)
    roster.publish(100.0)
    assert not any(members.served for _, members in wire.take(Members))
    roster.beat(beat(2), 101.0)
    roster.publish(101.0)
    assert [members.served for _, members in wire.take(Members)] == [[""], [""]]
    roster.died(1, "host-a")
    roster.publish(102.0)
    join(roster, 3, now=103.0)
    assert all(members.served for _, members in wire.take(Members)), "and it stays true"


def test_versions_only_grow(roster: Roster, wire: Wire) -> None:
    join(roster, 1)
    join(roster, 2)
    roster.goodbye(1)
    roster.publish(101.0)
    versions = [snapshot.version for _, snapshot in wire.take(Members)]
    assert versions == sorted(versions)
    assert roster.version == 3, "one for each change that was published"


# --- dying


def test_a_silent_member_is_lost_and_fenced(roster: Roster, wire: Wire) -> None:
    join(roster, 1, 2)
    now = 100.0
    while now < 100.0 + SILENCE_SECONDS:
        now += 0.25
        roster.beat(beat(2), now)
        roster.tick(now)
        assert 1 in roster.members
    roster.tick(now + 0.25)
    roster.publish(101.0)
    assert roster.members.keys() == {2}
    assert roster.lost == [1]
    assert wire.forgotten == [address(1)]
    assert wire.last_words == [(address(1), Fenced(1))]
    (_, snapshot) = wire.take(Members)[-1]
    assert (snapshot.lost, snapshot.gone) == ([1], [1])
    level, text = wire.log[-1]
    assert level == "warning"
    assert "no beat for 3 s" in text
    assert "pid 1" in text


def far(roster: Roster, number: int, phase: str = Phase.READY) -> str:
    """Let a member on another host join. Returns its address."""
    where = f"tcp://10.0.0.{number}:5000"
    roster.hello(hello(number, address=where), 100.0)
    roster.beat(beat(number, phase, address=where), 100.0)
    return where


def silent_until_lost(roster: Roster, number: int) -> float:
    """Seconds without a beat, after which the member is lost, to a quarter."""
    for quarters in range(1, 1000):
        roster.tick(100.0 + quarters / 4)
        if number not in roster.members:
            return quarters / 4
    raise AssertionError("never lost")


def test_between_hosts_silence_lasts_longer_while_the_connection_holds(
    roster: Roster, wire: Wire
) -> None:
    far(roster, 1)
    assert silent_until_lost(roster, 1) == TCP_SILENCE_SECONDS + 0.25
    assert "no beat for 5 s" in wire.log[-1][1]


def test_silence_counts_as_on_one_host_where_the_connection_broke(roster: Roster) -> None:
    roster.disconnected(far(roster, 1), 100.0)
    assert silent_until_lost(roster, 1) == SILENCE_SECONDS + 0.25


def test_a_member_that_still_loads_may_be_silent_for_long(roster: Roster, wire: Wire) -> None:
    """Importing torch from a cold disk lets none of its threads run."""
    roster.hello(hello(1), 100.0)
    roster.beat(beat(1, Phase.LOADING), 100.0)
    assert silent_until_lost(roster, 1) == LOADING_SILENCE_SECONDS + 0.25
    assert "no beat for 60 s" in wire.log[-1][1]


def test_a_member_that_has_nothing_to_load_is_judged_at_once(roster: Roster) -> None:
    roster.hello(hello(1, "launcher"), 100.0)
    assert silent_until_lost(roster, 1) == SILENCE_SECONDS + 0.25


def test_a_member_that_was_ready_once_is_judged_as_one_that_serves(roster: Roster) -> None:
    join(roster, 1)
    roster.beat(beat(1, Phase.LOADING), 100.0)
    assert silent_until_lost(roster, 1) == SILENCE_SECONDS + 0.25


def test_a_member_that_drains_is_judged_as_one_that_serves(roster: Roster) -> None:
    roster.hello(hello(1), 100.0)
    roster.beat(beat(1, Phase.DRAINING), 100.0)
    assert silent_until_lost(roster, 1) == SILENCE_SECONDS + 0.25


def test_a_member_that_loads_on_another_host_is_lost_soon_if_its_connection_breaks(
    roster: Roster,
) -> None:
    roster.disconnected(far(roster, 1, Phase.LOADING), 100.0)
    assert silent_until_lost(roster, 1) == SILENCE_SECONDS + 0.25


def test_a_beat_shows_that_a_broken_connection_was_no_death(roster: Roster) -> None:
    where = far(roster, 1)
    roster.disconnected(where, 100.0)
    roster.beat(beat(1, address=where), 100.0)
    assert silent_until_lost(roster, 1) == TCP_SILENCE_SECONDS + 0.25


def test_a_lost_member_that_comes_back_is_fenced_each_time(roster: Roster, wire: Wire) -> None:
    join(roster, 1)
    roster.bury(roster.members[1], "a test")
    wire.last_words.clear()
    roster.beat(beat(1), 101.0)
    roster.hello(hello(1), 101.0)
    assert wire.last_words == [(address(1), Fenced(1))] * 2
    assert roster.members == {}


def test_a_stuck_member_is_lost_although_it_beats(roster: Roster, wire: Wire) -> None:
    join(roster, 1)
    roster.tick(100.0)
    roster.beat(beat(1, item_age=9.9, item_limit=10.0), 100.5)
    roster.tick(100.5)
    assert 1 in roster.members
    roster.beat(beat(1, item_age=10.4, item_limit=10.0), 101.0)
    roster.tick(101.0)
    assert roster.members == {}
    assert "stuck: no progress for 10 s (limit 10 s)" in wire.log[-1][1]


def test_a_long_item_with_a_long_limit_is_not_stuck(roster: Roster) -> None:
    join(roster, 1, 2)
    now = 100.0
    for _ in range(1000):
        now += 0.5
        roster.beat(beat(1, item_age=now - 100.0, item_limit=600.0), now)
        roster.beat(beat(2, item_age=0.0, item_limit=0.0), now)
        roster.tick(now)
    assert roster.members.keys() == {1, 2}


def test_a_router_that_paused_itself_blames_nobody(roster: Roster) -> None:
    join(roster, 1, 2)
    roster.tick(100.0)
    roster.beat(beat(2, item_age=9.0, item_limit=10.0), 100.1)
    roster.tick(100.0 + PAUSE_SECONDS + 60.0)
    assert roster.members.keys() == {1, 2}
    now = 161.0
    while now < 161.0 + SILENCE_SECONDS:
        now += 0.25
        roster.tick(now)
    roster.tick(now + 0.25)
    assert roster.members == {}, "but their silence after the pause counts"


def test_the_router_does_not_judge_itself(roster: Roster) -> None:
    join(roster, OWN, 1, service="router")
    now = 100.0
    for _ in range(40):
        now += 0.25
        roster.tick(now)
    assert roster.members.keys() == {OWN}


def test_a_death_seen_by_the_launcher_counts_at_once(roster: Roster) -> None:
    join(roster, 1, 2)
    roster.died(1, "host-b")
    assert roster.members.keys() == {1, 2}, "the same pid on another host"
    roster.died(1, "host-a")
    assert roster.members.keys() == {2}
    assert roster.lost == [1]
    roster.died(1, "host-a")
    roster.died(77, "host-a")


def test_a_broken_connection_is_death_on_ipc_and_not_on_tcp(roster: Roster) -> None:
    join(roster, 1)
    roster.hello(hello(2, address="tcp://10.0.0.1:5000"), 100.0)
    for where in ("tcp://10.0.0.1:5000", address(77), address(1)):
        roster.disconnected(where, 100.0)
    roster.tick(100.0 + 2 * GOODBYE_SECONDS)
    assert roster.members.keys() == {2}
    assert roster.lost == [1]


def test_a_goodbye_that_is_heard_after_the_connection_broke_counts(
    roster: Roster, wire: Wire
) -> None:
    join(roster, 1, 2)
    for incarnation in (1, 2):
        roster.disconnected(address(incarnation), 100.0)
    roster.tick(100.0)
    roster.goodbye(1)
    roster.tick(100.25)
    assert roster.lost == [2]
    assert not roster.members
    assert [text.split(" (")[0] for _, text in wire.log[-2:]] == ["worker left", "worker lost"]


def test_who_says_goodbye_is_not_lost(roster: Roster, wire: Wire) -> None:
    join(roster, 1, 2)
    roster.goodbye(1)
    roster.goodbye(1)
    roster.goodbye(77)
    roster.publish(101.0)
    assert roster.lost == []
    assert wire.last_words == []
    assert wire.forgotten == [address(1)]
    (_, snapshot) = wire.take(Members)[-1]
    assert (snapshot.lost, snapshot.gone) == ([], [1])


def test_the_list_of_the_lost_is_bounded_and_keeps_the_newest(roster: Roster) -> None:
    for number in range(1, MAX_LOST + 51):
        join(roster, number)
        roster.bury(roster.members[number], "a test")
    assert roster.lost == list(range(51, MAX_LOST + 51))


# --- metrics


def test_the_counters_of_the_dead_are_kept(roster: Roster) -> None:
    join(roster, 1, 2, 3)
    for number in (1, 2, 3):
        roster.beat(beat(number, metrics=counter(number * 100.0)), 101.0)
    assert total(roster) == 600.0
    roster.bury(roster.members[1], "a test")
    roster.goodbye(2)
    assert total(roster) == 600.0
    dead = [process for process in roster.metrics() if process.incarnation == 0]
    assert [(process.service, process.report.samples[0].values) for process in dead] == [
        ("worker", [300.0])
    ]


@pytest.mark.parametrize(
    "metrics",
    [
        b"\xc1",
        b"\x91\x91\x93\xa2\xff\xfe\x90\x90",  # a name that is not UTF-8
        encode([[["steps_total", [], []]]]),
        encode([[["steps_total", ["unexpected"], [1.0, 2.0]]]]),
        encode([[["no_such_metric", [], [1.0]]]]),
    ],
)
def test_a_report_that_cannot_be_read_keeps_nobody_alive(
    roster: Roster, wire: Wire, metrics: bytes
) -> None:
    join(roster, 1, 2)
    roster.beat(beat(1, metrics=metrics), 101.0)
    roster.metrics()
    roster.bury(roster.members[1], "a test")
    roster.publish(101.0)
    assert roster.members.keys() == {2}
    assert wire.forgotten == [address(1)]
    (_, snapshot) = wire.take(Members)[-1]
    assert snapshot.lost == [1]
    roster.beat(beat(2, metrics=counter(5.0)), 101.0)
    roster.goodbye(2)
    assert total(roster) >= 5.0
