"""A member's conversation with the router: joining, beats, lost peers, a restarted router."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from support.polling import until
from support.protocol.mailbox_process import short_folder

from penstock.protocol.process import participant as participant_module
from penstock.protocol.process.participant import (
    CARRY_SECONDS,
    HELLO_SECONDS,
    UNREACHABLE_SECONDS,
    BeatThread,
    Ended,
    Participant,
)
from penstock.protocol.wire import codec
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.mailbox import Mailbox
from penstock.protocol.wire.messages.membership import (
    Beat,
    BeatAnswer,
    Capacity,
    Fenced,
    Goodbye,
    Hello,
    Identity,
    Members,
    Peer,
    Phase,
    Refused,
    Sleeper,
    WhoAreYou,
)
from penstock.protocol.wire.messages.requests import Taken

ROUTER = "ipc:///run/router.sock"
OWN = "ipc:///run/own.sock"
ME = 1000


class Wire:
    """The mailbox that a participant talks through: remembers what was said."""

    def __init__(self) -> None:
        self.incarnation = ME
        self.address = OWN
        self.sent: list[tuple[str, Message]] = []
        self.forgotten: list[str] = []
        self.waiting = 0

    def send(self, address: str, message: Message) -> bool:
        if address in self.forgotten:
            return False
        self.sent.append((address, message))
        return True

    def forget(self, address: str) -> None:
        self.forgotten.append(address)

    def reopen(self, address: str) -> None:
        if address in self.forgotten:
            self.forgotten.remove(address)

    def outbox_bytes(self, address: str) -> int:
        return self.waiting

    def hellos(self) -> int:
        return sum(isinstance(message, Hello) for _, message in self.sent)


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def member(wire: Wire) -> Participant:
    made = Participant("worker", wire, ROUTER, Identity(4242, "host-a"))  # type: ignore[arg-type]
    made.gone = []  # type: ignore[attr-defined]
    made.on_change = lambda gone: made.gone.append(set(gone))  # type: ignore[attr-defined]
    return made


def gone(member: Participant) -> list[set[int]]:
    """Peers reported gone, change by change, without the changes that lost nobody."""
    return [each for each in member.gone if each]  # type: ignore[attr-defined]


def peer(number: int, service: str = "tokenizer", phase: str = Phase.READY) -> Peer:
    address = ROUTER if service == "router" else f"ipc:///run/{number}.sock"
    return Peer(service, address, number, Identity(number, "host-a"), phase, "", Capacity(), 0)


def members(router: int, version: int, *numbers: int, lost: list[int] | None = None) -> Members:
    return Members(router, version, [peer(n) for n in (*numbers, ME)], lost or [])


def tick_until(member: Participant, start: float, end: float) -> list[str]:
    """Ticks as a service does; returns the complaints."""
    said = []
    now = start
    while now <= end:
        said.append(member.tick(now))
        now += 0.25
    return [each for each in said if each]


# --- joining


def test_it_says_hello_until_the_router_answers(member: Participant, wire: Wire) -> None:
    tick_until(member, 100.0, 102.0)
    assert wire.hellos() == 1 + int(2.0 / HELLO_SECONDS)
    address, hello = wire.sent[0]
    assert address == ROUTER
    assert isinstance(hello, Hello)
    assert (hello.service, hello.address, hello.incarnation) == ("worker", OWN, ME)
    assert (hello.protocol_version, hello.schema_hash) == (
        codec.PROTOCOL_VERSION,
        codec.SCHEMA_HASH,
    )
    assert msgspec.msgpack.decode(hello.identity, type=Identity).pid == 4242
    assert not member.joined
    assert member.handle(7, members(7, 1), 102.1)
    assert member.joined
    tick_until(member, 102.25, 104.0)
    assert wire.hellos() == 5


def test_hellos_do_not_pile_up_for_an_absent_router(member: Participant, wire: Wire) -> None:
    tick_until(member, 100.0, 100.0)
    wire.waiting = 200
    tick_until(member, 100.25, 160.0)
    assert wire.hellos() == 1
    wire.waiting = 0
    tick_until(member, 160.25, 160.5)
    assert wire.hellos() == 2


def test_it_complains_once_after_five_seconds_and_names_both_addresses(
    member: Participant,
) -> None:
    assert tick_until(member, 100.0, 100.0 + UNREACHABLE_SECONDS) == []
    (complaint,) = tick_until(member, 105.25, 130.0)
    for part in (ROUTER, OWN, "5 s", "--advertise", "--secret"):
        assert part in complaint
    member.handle(7, BeatAnswer(7), 130.0)
    assert tick_until(member, 130.25, 135.0) == []
    assert len(tick_until(member, 135.25, 140.0)) == 1, "a second outage is a second complaint"


def test_its_own_long_pause_is_not_blamed_on_the_router(member: Participant) -> None:
    """A worker that loads weights for a minute finds the router's answers when it looks."""
    member.tick(100.0)
    assert member.tick(160.0) is None
    member.handle(7, members(7, 1), 160.1)
    assert tick_until(member, 160.25, 164.0) == []


def test_a_refusal_ends_the_process_with_reason_and_remedy(member: Participant) -> None:
    with pytest.raises(Ended, match=r"speaks protocol 0.*; run the same version"):
        member.handle(7, Refused("worker speaks protocol 0", "run the same version"), 1.0)


def test_fencing_ends_the_process_but_not_another(member: Participant) -> None:
    assert member.handle(7, Fenced(ME + 1), 1.0)
    with pytest.raises(Ended, match="declared this process lost"):
        member.handle(7, Fenced(ME), 1.0)


def test_a_router_that_does_not_know_it_hears_hello_at_once(
    member: Participant, wire: Wire
) -> None:
    member.handle(7, members(7, 3), 1.0)
    assert member.joined
    assert member.handle(8, WhoAreYou(8), 2.0)
    assert not member.joined
    assert wire.hellos() == 1
    member.handle(8, members(8, 1), 2.1)
    assert member.joined


def test_the_answer_of_another_router_makes_it_join_anew(member: Participant, wire: Wire) -> None:
    member.handle(7, members(7, 3, 1, 2), 1.0)
    member.handle(7, BeatAnswer(7), 1.5)
    assert member.joined
    member.handle(8, BeatAnswer(8), 2.0)
    assert not member.joined
    assert member.peers.keys() == {1, 2}, "its peers are not forgotten for that"
    member.tick(2.1)
    assert wire.hellos() == 1


def test_it_says_goodbye_to_the_router(member: Participant, wire: Wire) -> None:
    member.goodbye()
    assert wire.sent == [(ROUTER, Goodbye(ME))]


# --- who is there


def test_it_knows_the_others_and_not_itself(member: Participant) -> None:
    found = Members(7, 1, [peer(1), peer(2, "worker"), peer(3, phase=Phase.LOADING), peer(ME)], [])
    member.handle(7, found, 1.0)
    assert member.peers.keys() == {1, 2, 3}
    assert [p.incarnation for p in member.of("tokenizer")] == [1, 3]
    assert [p.incarnation for p in member.of("tokenizer", ready_only=True)] == [1]
    assert member.address_of(2) == "ipc:///run/2.sock"
    assert member.address_of(ME) is None
    assert member.address_of(99) is None


def test_an_older_snapshot_of_the_same_router_is_ignored(member: Participant) -> None:
    member.handle(7, members(7, 5, 1, 2), 1.0)
    member.handle(7, members(7, 4, 1), 1.1)
    assert member.peers.keys() == {1, 2}
    assert member.membership_version == 5
    assert gone(member) == []


def test_a_change_is_applied_to_what_it_is_a_change_of(member: Participant) -> None:
    member.handle(7, members(7, 5, 1, 2, 3), 1.0)
    draining = peer(2, phase=Phase.DRAINING)
    member.handle(7, Members(7, 6, [draining, peer(4)], [], since=5), 1.1)
    assert member.membership_version == 6
    assert {i: p.phase for i, p in member.peers.items()} == {
        1: Phase.READY,
        2: Phase.DRAINING,
        3: Phase.READY,
        4: Phase.READY,
    }
    member.handle(7, Members(7, 7, [], [3], since=6, gone=[1, 3]), 1.2)
    assert member.peers.keys() == {2, 4}
    assert gone(member) == [{1, 3}]
    assert member.lost == {3}, "the other one left"


@pytest.mark.parametrize(("router", "since"), [(7, 6), (7, 4), (8, 5)])
def test_a_change_of_what_was_missed_changes_nothing(
    member: Participant, router: int, since: int
) -> None:
    member.handle(7, members(7, 5, 1, 2), 1.0)
    member.handle(router, Members(router, 8, [peer(3)], [], since=since, gone=[1]), 1.1)
    assert member.peers.keys() == {1, 2}
    assert (member.router_incarnation, member.membership_version) == (7, 5), "its beats say so"
    member.handle(7, members(7, 8, 2, 3), 1.2)
    assert member.peers.keys() == {2, 3}


def test_a_change_keeps_whom_the_new_router_has_not_named_yet(member: Participant) -> None:
    member.tick(0.0)
    member.handle(7, members(7, 5, 1, 2, 3), 1.0)
    member.handle(8, members(8, 1, 1), 2.0)
    member.handle(8, Members(8, 2, [peer(2)], [], since=1), 2.1)
    assert member.peers.keys() == {1, 2, 3}
    assert gone(member) == []
    tick_until(member, 2.25, 2.0 + CARRY_SECONDS + 0.5)
    assert member.peers.keys() == {1, 2}
    assert gone(member) == [{3}]


def test_that_the_server_was_ready_once_is_never_forgotten(member: Participant) -> None:
    assert not member.served
    member.handle(7, msgspec.structs.replace(members(7, 1, 1), served=["m"]), 1.0)
    member.handle(8, members(8, 1, 1), 2.0)
    assert member.served


def test_peers_that_are_gone_are_reported_once_and_never_dialled_again(
    member: Participant, wire: Wire
) -> None:
    member.handle(7, members(7, 1, 1, 2, 3), 1.0)
    member.handle(7, members(7, 2, 3, lost=[1]), 2.0)
    assert gone(member) == [{1, 2}]
    assert sorted(wire.forgotten) == ["ipc:///run/1.sock", "ipc:///run/2.sock"]
    member.handle(7, members(7, 3, 3, lost=[1]), 3.0)
    assert gone(member) == [{1, 2}]


def test_messages_of_lost_peers_are_dropped_and_of_leavers_are_not(member: Participant) -> None:
    member.handle(7, members(7, 1, 1, 2, 3), 1.0)
    member.handle(7, members(7, 2, 3, lost=[1]), 2.0)
    assert member.handle(1, Taken(1, 1), 2.1), "fenced"
    assert not member.handle(2, Taken(1, 1), 2.1), "left with Goodbye: its last words count"
    assert not member.handle(3, Taken(1, 1), 2.1)
    assert not member.handle(99, Taken(1, 1), 2.1), "not known yet"
    member.handle(8, members(8, 1, 3), 3.0)
    assert member.handle(1, Taken(1, 1), 3.1), "a new router makes nobody alive again"


# --- a restarted router


def test_a_new_router_may_take_its_time_to_learn_the_peers(member: Participant, wire: Wire) -> None:
    member.handle(7, members(7, 9, 1, 2, 3), 10.0)
    tick_until(member, 10.0, 11.0)
    member.handle(8, members(8, 1), 11.0)
    assert member.peers.keys() == {1, 2, 3}
    member.handle(8, members(8, 2, 2), 11.5)
    assert member.peers.keys() == {1, 2, 3}
    tick_until(member, 11.25, 11.0 + CARRY_SECONDS)
    assert gone(member) == []
    assert member.peers.keys() == {1, 2, 3}
    tick_until(member, 14.25, 14.25)
    assert member.peers.keys() == {2}
    assert gone(member) == [{1, 3}]
    assert sorted(wire.forgotten) == ["ipc:///run/1.sock", "ipc:///run/3.sock"]


def test_models_sleep_on_until_a_new_router_has_heard_of_their_launcher(
    member: Participant,
) -> None:
    def told(router: int, version: int, *names: str) -> None:
        sleepers = [Sleeper(name, [], "asleep", Capacity()) for name in names]
        found = Members(router, version, [peer(1)], [], served=["a", "b"], sleepers=sleepers)
        member.handle(0, found, 10.0 + version)

    member.tick(10.0)
    told(1, 4, "a", "b")
    told(1, 5, "a")
    assert set(member.sleepers) == {"a"}
    told(2, 1)
    assert set(member.sleepers) == {"a"}, "it does not know yet"
    told(2, 2, "b")
    assert set(member.sleepers) == {"b"}
    told(3, 1)
    tick_until(member, 11.0, 11.0 + CARRY_SECONDS + 0.5)
    assert member.sleepers == {}, "there is none"


def test_a_peer_that_the_new_router_declares_lost_is_not_carried(member: Participant) -> None:
    member.handle(7, members(7, 9, 1, 2), 10.0)
    member.handle(8, members(8, 1), 11.0)
    member.handle(8, members(8, 2, 2, lost=[1]), 11.5)
    assert gone(member) == [{1}]
    assert member.peers.keys() == {2}


def test_a_peer_that_rejoins_after_its_time_can_be_reached_again(
    member: Participant, wire: Wire
) -> None:
    """Its main thread was busy longer than it was carried; its address never changed."""
    member.handle(7, members(7, 9, 1), 10.0)
    member.handle(8, members(8, 1), 11.0)
    tick_until(member, 11.25, 15.0)
    assert gone(member) == [{1}]
    assert not wire.send("ipc:///run/1.sock", Taken(1, 1))
    member.handle(8, members(8, 2, 1), 16.0)
    assert wire.send("ipc:///run/1.sock", Taken(1, 1))
    assert not member.handle(1, Taken(1, 1), 16.1)


def test_a_busy_process_does_not_drop_peers_whose_names_wait_in_its_inbox(
    member: Participant,
) -> None:
    member.handle(7, members(7, 9, 1), 10.0)
    tick_until(member, 10.0, 11.0)
    member.handle(8, members(8, 1), 11.1)
    member.tick(20.0)  # the first tick after a long step; the inbox is read next
    assert gone(member) == []
    member.handle(8, members(8, 2, 1), 20.0)
    tick_until(member, 20.25, 30.0)
    assert member.peers.keys() == {1}


def test_a_second_restart_carries_again(member: Participant) -> None:
    member.handle(7, members(7, 9, 1), 10.0)
    tick_until(member, 10.0, 11.0)
    member.handle(8, members(8, 1), 11.0)
    tick_until(member, 11.25, 13.5)
    member.handle(9, members(9, 1), 13.5)
    tick_until(member, 13.75, 16.25)
    assert member.peers.keys() == {1}
    tick_until(member, 16.5, 17.0)
    assert member.peers.keys() == set()


def test_a_former_router_that_comes_back_late_is_not_believed(member: Participant) -> None:
    """It was cut off, and now takes everybody for dead."""
    member.handle(7, members(7, 1, 1, 2), 100.0)
    member.handle(8, members(8, 1, 1, 2), 101.0)
    assert member.handle(7, Fenced(ME), 102.0)
    assert member.handle(7, members(7, 9, lost=[1, 2]), 102.0)
    assert member.handle(7, WhoAreYou(7), 102.0)
    assert member.router_incarnation == 8
    assert member.joined
    assert set(member.peers) == {1, 2}


def test_a_former_router_counts_again_when_the_later_one_is_silent(member: Participant) -> None:
    member.handle(7, members(7, 1, 1), 100.0)
    member.handle(8, members(8, 1, 1), 101.0)
    member.handle(7, WhoAreYou(7), 101.0 + UNREACHABLE_SECONDS)
    assert not member.joined
    member.handle(7, members(7, 2, 1), 101.1 + UNREACHABLE_SECONDS)
    assert member.joined
    assert member.router_incarnation == 7
    member.handle(8, Fenced(ME), 102.0 + UNREACHABLE_SECONDS)


def test_the_router_s_own_address_is_never_forgotten(member: Participant, wire: Wire) -> None:
    member.handle(7, Members(7, 1, [peer(7, "router"), peer(1)], []), 1.0)
    tick_until(member, 1.0, 2.0)
    member.handle(8, Members(8, 1, [peer(8, "router"), peer(1)], []), 2.0)
    tick_until(member, 2.25, 6.0)
    assert gone(member) == [{7}]
    assert wire.forgotten == []
    assert member.address_of(8) == ROUTER


# --- beats, on real threads and sockets


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


PATIENCE = 30.0
"""Seconds for anything that is to come, on a busy machine."""


def beat_that(router: Mailbox, holds: Callable[[Beat], object]) -> Beat:
    """The first beat of which that is true; those before it are forgotten."""
    deadline = time.monotonic() + PATIENCE
    while True:
        for beat in beats_of(router, 0.01):
            if holds(beat):
                return beat
        assert time.monotonic() < deadline, "no such beat came"


def beats_of(router: Mailbox, seconds: float) -> list[Beat]:
    found: list[Beat] = []
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        router.wait(left)
        found += [message for _, message in router.drain() if isinstance(message, Beat)]
    return found


@contextlib.contextmanager
def beating(folder: Path, router: str) -> Iterator[tuple[Participant, BeatThread]]:
    own = Mailbox(f"ipc://{folder}")
    joined = Participant("worker", own, router, Identity(1, "host-a"))
    thread = BeatThread(joined, own)
    thread.start()
    try:
        yield joined, thread
    finally:
        thread.stop()
        assert not thread.is_alive()
        own.close(0)


def test_a_process_beats_while_its_main_thread_is_busy(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(participant_module, "BEAT_SECONDS", 0.05)
    router = Mailbox(f"ipc://{folder}/router.sock")
    with beating(folder, router.address) as (member, thread):
        assert beats_of(router, 0.2) == [], "nobody beats before it has joined"
        made: list[Beat] = []
        beat = thread.beat
        monkeypatch.setattr(thread, "beat", lambda: made.append(beat()) or made[-1])
        member.handle(7, members(7, 4), time.monotonic())
        member.status.phase = Phase.LOADING
        member.status.note = "weights"
        member.status.begin(60.0)
        thread.now()
        began = time.monotonic()
        while len(made) < 6:  # Python code that never waits
            assert time.monotonic() - began < PATIENCE
        last = beat_that(router, lambda beat: beat.item_age >= made[4].item_age)
        assert (last.address, last.incarnation) == (member._address, member.incarnation)
        assert (last.phase, last.note, last.item_limit) == (Phase.LOADING, "weights", 60.0)
        assert 0.1 <= last.item_age < time.monotonic() - began + 0.1
        assert last.membership_version == 4
        member.status.done()
        last = beat_that(router, lambda beat: beat.progress == last.progress + 1)
        assert last.item_age == 0.0
    router.close(0)


def test_a_change_is_told_and_waits_for_no_beat(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(participant_module, "BEAT_SECONDS", 3600.0)
    router = Mailbox(f"ipc://{folder}/router.sock")
    with beating(folder, router.address) as (member, thread):
        member.handle(7, members(7, 1), time.monotonic())
        thread.now()
        assert beat_that(router, lambda beat: beat.phase != Phase.READY)
        member.status.phase = Phase.READY
        thread.now()
        assert beat_that(router, lambda beat: beat.phase == Phase.READY)
    router.close(0)


def test_a_router_that_was_away_gets_no_pile_of_old_beats(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(participant_module, "BEAT_SECONDS", 0.002)
    address = f"ipc://{folder}/router.sock"
    with beating(folder, address) as (member, thread):
        tries: list[bool] = []
        flush = thread._sender.flush
        monkeypatch.setattr(thread._sender, "flush", lambda: tries.append(flush()) or tries[-1])
        member.handle(7, members(7, 1), time.monotonic())
        thread.now()
        until(lambda: tries.count(False) > 20, told="there was no time for a pile")
        member.status.progress = 77
        monkeypatch.setattr(participant_module, "BEAT_SECONDS", 10.0)
        router = Mailbox(address)
        early: list[Beat] = []
        beat_that(router, lambda beat: beat.progress == 77 or early.append(beat))
        member.status.progress = 78
        thread.now()
        beat_that(router, lambda beat: beat.progress == 78 or early.append(beat))
        assert len(early) <= 2, "one waits, some may be under way"
        router.close(0)


def test_an_address_without_meaning_does_not_end_the_beats(folder: Path) -> None:
    with beating(folder, "nonsense") as (member, thread):
        member.handle(7, members(7, 1), time.monotonic())
        thread.now()
        time.sleep(0.1)
        assert thread.is_alive()
