"""Services as real processes with the real router: joining, draining, dying, idling."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from support.counted import cpu_seconds, wakes
from support.polling import until
from support.protocol.forks import Forks
from support.protocol.mailbox_process import short_folder
from support.protocol.tiny_services import TOLD, WORKING, Running, started

from penstock.protocol.process.participant import BeatThread, Participant
from penstock.protocol.wire import codec
from penstock.protocol.wire.mailbox import Mailbox
from penstock.protocol.wire.messages.membership import Identity, Members, Peer, Phase
from penstock.protocol.wire.messages.requests import Accepted, Holding, Taken
from penstock.protocol.wire.security import CurveKeys
from penstock.services.router.member import SILENCE_SECONDS

SECRET = "correct horse battery staple"
PATIENCE = 30.0
"""Seconds for anything that is to come, on a busy machine."""
SOON = 10.0
"""Seconds for what others wait for, where without it they wait for longer than ``PATIENCE``."""
MISSED_SECONDS = SILENCE_SECONDS + 0.5
"""After so long a router would miss a member that is silent."""


class Observer:
    """This process as a member: it sees what the router tells everybody."""

    def __init__(self, router: str, secret: str = "") -> None:
        bind = router.rpartition("/")[0] if router.startswith("ipc") else "tcp://127.0.0.1"
        self.mailbox = Mailbox(bind, keys=CurveKeys(secret) if secret else None)
        self.member = Participant("frontend", self.mailbox, router, Identity(1, "test"))
        self.member.on_change = lambda gone: self.gone.update(
            {peer.identity.pid: time.monotonic() for peer in gone.values()}
        )
        self.gone: dict[int, float] = {}
        self.answers: list[Holding] = []
        self.phases: dict[int, list[str]] = {}
        self.beats = BeatThread(self.member, self.mailbox)
        self.beats.start()

    def pump(self, seconds: float = 0.02) -> None:
        self.member.tick(time.monotonic())
        self.mailbox.flush()
        self.mailbox.wait(seconds)
        for sender, message in self.mailbox.drain(100_000):
            if not self.member.handle(sender, message, time.monotonic()):
                assert isinstance(message, Holding)
                self.answers.append(message)
            elif isinstance(message, Members):
                for peer in message.peers:
                    seen = self.phases.setdefault(peer.identity.pid, [])
                    if peer.phase not in seen:
                        seen.append(peer.phase)

    def until(self, condition: Callable[[], object], seconds: float = PATIENCE) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, (self.phases, self.gone, self.member.peers)
            self.pump()

    def peers(self, *running: Running) -> list[Peer]:
        """Those that the router has told of."""
        pids = {each.pid for each in running}
        return [peer for peer in self.member.peers.values() if peer.identity.pid in pids]

    def peer(self, running: Running) -> Peer:
        (peer,) = self.peers(running)
        return peer

    def is_ready(self, *running: Running) -> bool:
        peers = self.peers(*running)
        return len(peers) == len(running) and all(peer.phase == Phase.READY for peer in peers)

    def joined(self, running: Running) -> Peer:
        """Waits until it is ready."""
        self.until(lambda: self.is_ready(running))
        return self.peer(running)

    def ask(self, running: Running, number: int) -> None:
        peer = self.peer(running)
        assert self.mailbox.send(peer.address, Holding(self.mailbox.address, [number], [0]))

    def is_answered(self, running: Running, number: int) -> None:
        self.ask(running, number)
        self.until(lambda: any(answer.ids == [number] for answer in self.answers))

    def close(self) -> None:
        self.beats.stop()
        self.mailbox.close(0)


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as opened:
        yield opened


Start = Callable[..., Running]


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    found = Forks("support.protocol.tiny_services", "penstock.services.router.service")
    yield found
    found.close()


@pytest.fixture
def start(stack: contextlib.ExitStack, forks: Forks) -> Start:
    return lambda *arguments, **options: stack.enter_context(started(forks, *arguments, **options))


@pytest.fixture
def address(folder: Path) -> str:
    return f"ipc://{folder}/router.sock"


@pytest.fixture
def observe(stack: contextlib.ExitStack) -> Callable[..., Observer]:
    def make(*arguments: str) -> Observer:
        observer = Observer(*arguments)
        stack.callback(observer.close)
        return observer

    return make


def errors(log: str) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in log.splitlines()]
    return [line for line in lines if line["level"] in ("warning", "error", "critical")]


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_services_join_are_seen_ready_and_leave_when_told(
    address: str, folder: Path, start: Start, observe: Callable[..., Observer], transport: str
) -> None:
    secret = ""
    if transport == "tcp":
        with contextlib.closing(Mailbox("tcp://127.0.0.1")) as free:
            address = free.address
        secret = SECRET
    observer = observe(address, secret)
    both = [start("async", address, secret=secret), start("loop", address, secret=secret)]
    router = start("router", address, secret=secret)
    observer.until(lambda: observer.is_ready(*both, router))
    for running, service in zip([*both, router], ["tokenizer", "worker", "router"], strict=True):
        peer = observer.peer(running)
        assert (peer.service, peer.identity.pid) == (service, running.pid)
        assert peer.address.startswith(f"{transport}://")
    for number, running in enumerate(both):
        observer.is_answered(running, number)
        running.process.send_signal(signal.SIGTERM)
        observer.until(lambda: running.pid in observer.gone)  # noqa: B023
        code, log = running.ended()
        assert (code, errors(log)) == (0, [])
    assert not observer.member.lost, "they left with Goodbye"
    router.process.send_signal(signal.SIGTERM)
    assert router.ended()[0] == 0
    assert [p.name for p in folder.iterdir() if "inbox" not in p.name] == []


@pytest.mark.parametrize("kind", ["async", "loop"])
def test_sigterm_waits_for_open_work_and_a_second_one_does_not(
    address: str, start: Start, observe: Callable[..., Observer], kind: str
) -> None:
    start("router", address)
    observer = observe(address)
    busy = start(kind, address, busy=True)
    observer.until(lambda: observer.is_ready(busy))
    busy.process.send_signal(signal.SIGTERM)
    observer.until(lambda: Phase.DRAINING in observer.phases[busy.pid])
    observer.is_answered(busy, 1)
    assert busy.process.poll() is None
    busy.process.send_signal(signal.SIGTERM)
    assert busy.ended(SOON)[0] == 0


@pytest.mark.parametrize("kind", ["async", "loop"])
def test_draining_has_a_limit(
    address: str, start: Start, observe: Callable[..., Observer], kind: str
) -> None:
    start("router", address)
    busy = start(kind, address, busy=True, drain_timeout_s=0.3)
    observe(address).joined(busy)
    busy.process.send_signal(signal.SIGINT)
    assert busy.ended(SOON)[0] == 0


@pytest.mark.parametrize("kind", ["async", "loop"])
def test_a_service_told_to_end_while_it_starts_does_so_at_once(
    address: str, start: Start, observe: Callable[..., Observer], kind: str
) -> None:
    start("router", address)
    observer = observe(address)
    loading = start(kind, address, start_s=60.0)
    observer.until(lambda: catches(loading, signal.SIGTERM))
    loading.process.send_signal(signal.SIGTERM)
    assert loading.ended(SOON)[0] == 0


def catches(running: Running, number: signal.Signals) -> bool:
    """The process has installed a handler for the signal."""
    with contextlib.suppress(FileNotFoundError):
        status = Path(f"/proc/{running.pid}/status").read_text()
        (mask,) = re.findall(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
        return bool(int(mask, 16) & 1 << (number - 1))
    return False


def test_a_second_sigterm_ends_a_loop_in_the_middle_of_its_work(
    address: str, start: Start, observe: Callable[..., Observer]
) -> None:
    start("router", address)
    observer = observe(address)
    working = start("loop", address, work_s=0.0)
    peer = observer.joined(working)
    observer.is_answered(working, 1)
    observer.mailbox.send(peer.address, Taken(1, 60_000))
    observer.until(observer.mailbox.flush)
    said = iter(working.process.output.readline, b"")
    assert WORKING in said
    working.process.send_signal(signal.SIGTERM)
    assert TOLD in said
    assert WORKING in said, "the first signal ends it in the middle"
    working.process.send_signal(signal.SIGTERM)
    assert working.ended(SOON)[0] == 0


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_router_restarted_at_its_address_finds_its_members_again(
    address: str, start: Start, observe: Callable[..., Observer], number: signal.Signals
) -> None:
    first = start("router", address)
    observer = observe(address)
    both = [start("async", address), start("loop", address)]
    observer.until(lambda: observer.is_ready(*both))
    first.process.send_signal(number)
    first.ended()
    observer.is_answered(both[0], 1)
    second = start("router", address)
    observer.until(lambda: observer.is_ready(*both, second))
    deadline = time.monotonic() + MISSED_SECONDS
    while time.monotonic() < deadline:
        observer.pump()
    assert observer.gone.keys() <= {first.pid}, "a restarted router costs nobody a peer"
    for each, running in enumerate(both):
        observer.is_answered(running, 10 + each)
        running.process.send_signal(signal.SIGTERM)
        code, log = running.ended()
        assert (code, errors(log)) == (0, [])


@pytest.mark.parametrize("kind", ["async", "loop"])
def test_a_killed_process_is_reported_gone_within_a_second(
    address: str, start: Start, observe: Callable[..., Observer], kind: str
) -> None:
    """Of those that a router misses by their silence, each is reported later. Another process may
    hold up the report of one."""
    start("router", address)
    observer = observe(address)
    witness = start("async", address)
    observer.until(lambda: observer.is_ready(witness))
    seconds: list[float] = []
    while len(seconds) < 4 and min(seconds, default=1.0) >= 1.0:
        victim = start(kind, address)
        peer = observer.joined(victim)
        victim.process.kill()
        killed = time.monotonic()
        observer.until(lambda: victim.pid in observer.gone)  # noqa: B023
        seconds.append(observer.gone[victim.pid] - killed)
        assert peer.incarnation in observer.member.lost
    assert min(seconds) < 1.0
    assert observer.is_ready(witness)


def test_a_process_stopped_too_long_is_fenced_and_ends_with_the_reason(
    address: str, start: Start, observe: Callable[..., Observer]
) -> None:
    start("router", address)
    observer = observe(address)
    stopped = start("loop", address)
    observer.until(lambda: observer.is_ready(stopped))
    stopped.process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    observer.until(lambda: stopped.pid in observer.gone)
    assert 2 < time.monotonic() - began < 15  # a little more than 3 s on an idle machine
    stopped.process.send_signal(signal.SIGCONT)
    code, log = stopped.ended()
    assert code == 5
    assert "declared this process lost" in log


def test_another_protocol_version_is_refused_on_both_sides(address: str, start: Start) -> None:
    router = start("router", address)
    skewed = start("async", address, version=0)
    code, log = skewed.ended()
    assert code == 5
    (line,) = errors(log)
    assert "refused by the router" in str(line["event"])
    assert f"0/{codec.SCHEMA_HASH}" in str(line["event"])
    assert f"{codec.PROTOCOL_VERSION}/{codec.SCHEMA_HASH}" in str(line["event"])
    assert "same version of penstock" in str(line["event"])
    router.process.send_signal(signal.SIGTERM)
    assert "refused" in str(errors(router.ended()[1])[0]["event"])


@pytest.mark.parametrize("kind", ["async", "loop"])
def test_a_fault_in_one_message_or_tick_costs_nothing_else(
    address: str, start: Start, observe: Callable[..., Observer], kind: str
) -> None:
    start("router", address)
    observer = observe(address)
    faulty = start(kind, address, failing_tick=True)
    peer = observer.joined(faulty)
    observer.mailbox.send(peer.address, Accepted(1, 1))
    observer.is_answered(faulty, 1)
    faulty.process.send_signal(signal.SIGTERM)
    code, log = faulty.ended()
    assert code == 0
    events = [line["event"] for line in errors(log)]
    assert events.count("message failed") == 1
    assert "tick failed" in events
    assert "cannot handle it" in log


def test_a_loop_works_between_the_messages_of_a_burst(
    address: str, start: Start, observe: Callable[..., Observer]
) -> None:
    start("router", address)
    observer = observe(address)
    service = start("loop", address)
    peer = observer.joined(service)
    observer.is_answered(service, 1)
    for _ in range(100):
        assert observer.mailbox.send(peer.address, Taken(0, attempt=2))
    observer.is_answered(service, 2)
    before, after = (answer.attempts[0] for answer in observer.answers)
    assert after - before > 50, "a message of 2 ms ends a turn"


def test_an_event_loop_that_is_held_up_knows_by_how_long(
    address: str, start: Start, observe: Callable[..., Observer]
) -> None:
    start("router", address)
    observer = observe(address)
    service = start("async", address, tells_delay=True)
    peer = observer.joined(service)
    assert observer.mailbox.send(peer.address, Taken(0, attempt=2000))
    numbers = itertools.count(1)

    def latest() -> int:
        """Milliseconds, as it knows them now: the tick that comes late may be still to come."""
        observer.is_answered(service, next(numbers))
        return observer.answers[-1].attempts[0]

    until(lambda: latest() > 1500)
    assert latest() < 10_000


# --- the inbox's edge-triggered descriptor


@pytest.mark.slow
def test_a_hundred_thousand_messages_in_random_bursts_never_stall(
    address: str, start: Start, observe: Callable[..., Observer]
) -> None:
    """Without timers to save it, a service that stops draining early would be silent for good."""
    start("router", address)
    observer = observe(address)
    service = start("async", address, tick_s=3600.0)
    peer = observer.joined(service)
    draw = random.Random(7)
    sent = 0
    slowest = 0.0
    empty = Holding("ipc:///nobody-listens.sock", [], [])
    while sent < 100_000:
        burst = draw.choice([1, 1, 2, 7, 100, 255, 256, 257, 512, 3000])
        for _ in range(burst - 1):
            while not observer.mailbox.send(peer.address, Taken(0, 0)):
                observer.mailbox.flush()
        sent += burst
        began = time.monotonic()
        observer.is_answered(service, sent)
        slowest = max(slowest, time.monotonic() - began)
        observer.answers.clear()
        if draw.random() < 0.1:
            time.sleep(draw.random() * 0.003)
        if draw.random() < 0.02:
            observer.mailbox.send(peer.address, empty)
    assert slowest < 1.0


def test_frames_that_are_no_messages_do_not_stall_what_follows(
    address: str, start: Start, observe: Callable[..., Observer]
) -> None:
    start("router", address)
    observer = observe(address)
    service = start("async", address, tick_s=3600.0)
    peer = observer.joined(service)
    for number, count in enumerate([255, 256, 257, 1024, 1500, 2000, 3000]):
        seconds: list[float] = []
        while len(seconds) < 3 and min(seconds, default=1.2) >= 1.2:  # what wakes it comes later
            for _ in range(count):
                observer.mailbox.send_frame(peer.address, b"\0" * 8 + b"\xc1")
            began = time.monotonic()
            observer.is_answered(service, 10 * number + len(seconds))
            seconds.append(time.monotonic() - began)
        assert min(seconds) < 1.2, f"answers after {count} such frames waited for a beat"


def test_random_bytes_from_a_stranger_do_not_end_a_service(
    address: str, start: Start, observe: Callable[..., Observer]
) -> None:
    router = start("router", address)
    observer = observe(address)
    both = [start("async", address), start("loop", address)]
    observer.until(lambda: observer.is_ready(*both, router))
    noise = random.Random(3)
    context = zmq.Context()
    with contextlib.closing(context.socket(zmq.PUSH)) as rude:
        rude.linger = 1000
        for running in (*both, router):
            peer = observer.peer(running)
            rude.connect(peer.address)
        for _ in range(3000):
            rude.send(noise.randbytes(noise.randrange(60)))
    context.term()
    for number, running in enumerate(both):
        observer.is_answered(running, number)
    assert observer.is_ready(*both, router)
    assert not observer.gone


# --- idle


MOST_WAKES = 60
"""A second. Between 10 and 30 are beats and ticks; each costs some 50 µs of a core."""
ALONE_SECONDS = 1.5
"""All have noticed by then that the router is gone."""


@pytest.mark.slow  # the launcher's tests look at a whole idle server in the quick run
def test_idle_processes_use_less_than_a_hundredth_of_a_core(
    address: str, start: Start, observe: Callable[..., Observer]
) -> None:
    processes = {kind: start(kind, address) for kind in ("router", "async", "loop")}
    observer = observe(address)
    observer.until(lambda: observer.is_ready(*processes.values()))
    observer.pump(0.5)
    are_idle(processes, 3.0)
    os.kill(processes.pop("router").pid, signal.SIGKILL)
    time.sleep(ALONE_SECONDS)
    are_idle(processes, 3.0)  # waiting for the router costs as little


def are_idle(processes: dict[str, Running], seconds: float) -> None:
    """For some seconds they seldom wake, and do little then: one that never sleeps uses all of a
    core that it gets. How long the little takes is the machine's affair; where others interrupt a
    thread, another of its process wakes in vain, so it is the least of three tries."""
    for _ in range(3):
        woke = {kind: wakes(each.pid) for kind, each in processes.items()}
        used = {kind: cpu_seconds(each.pid) for kind, each in processes.items()}
        time.sleep(seconds)
        woken = {kind: wakes(each.pid) - woke[kind] for kind, each in processes.items()}
        spent = {kind: cpu_seconds(each.pid) - used[kind] for kind, each in processes.items()}
        if max(woken.values()) < MOST_WAKES * seconds and max(spent.values()) < 0.2 * seconds:
            break
    assert min(woken.values()) > 0 and max(woken.values()) < MOST_WAKES * seconds, woken
    assert max(spent.values()) < 0.2 * seconds, spent
