"""Mailboxes over real sockets: delivery, order, bounds, ownership of addresses, endings."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import zmq
from support.polling import until
from support.protocol.mailbox_process import Peer, running, short_folder

from penstock.protocol.wire import codec
from penstock.protocol.wire import mailbox as mailbox_module
from penstock.protocol.wire.addresses import AddressError
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.mailbox import MAX_IPC_PATH, Mailbox
from penstock.protocol.wire.messages.requests import Submit, Taken
from penstock.protocol.wire.security import SecurityError

MIB = 1024 * 1024
PATIENCE = 30.0
"""Seconds for anything that is to come, on a busy machine."""
BLOCKED = 0.05
"""A send that takes longer than this has blocked, if its thread slept meanwhile."""


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


@pytest.fixture
def opened() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture(params=["ipc", "tcp"])
def bind(request: pytest.FixtureRequest, folder: Path) -> str:
    return f"ipc://{folder}" if request.param == "ipc" else "tcp://127.0.0.1"


Open = Callable[..., Mailbox]


@pytest.fixture
def mailbox(opened: contextlib.ExitStack) -> Open:
    """Opens mailboxes that are closed after the test."""

    def make(bind: str, **options: object) -> Mailbox:
        made = Mailbox(bind, **options)  # type: ignore[arg-type]
        opened.callback(made.close, 0)
        return made

    return make


def collect(
    receiver: Mailbox, count: int, *senders: Mailbox, seconds: float = PATIENCE
) -> list[Message]:
    """Up to ``count`` messages that arrive within the time, while ``senders`` flush."""
    found: list[Message] = []
    deadline = time.monotonic() + seconds
    while len(found) < count and time.monotonic() < deadline:
        for sender in senders:
            sender.flush()
        receiver.wait(0.002)
        found += [message for _, message in receiver.drain()]
    return found


@contextlib.contextmanager
def nothing_blocks(seconds: float = BLOCKED) -> Iterator[None]:
    """A thread that waits gives its processor up; from one that others hold up it is taken."""
    began, slept = time.perf_counter(), sleeps()
    yield
    took, slept = time.perf_counter() - began, sleeps() - slept
    assert took < seconds or not slept, f"a send blocked for {took:.2f} s"


def sleeps() -> int:
    """How often this thread has waited for something."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def exact(bind: str) -> str:
    """An address of that kind at which nobody listens."""
    return f"{bind}/exact.sock" if bind.startswith("ipc") else f"{bind}:{free_port()}"


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


# --- delivery


def test_messages_arrive_once_and_in_order(bind: str, mailbox: Open) -> None:
    receiver, sender = mailbox(bind), mailbox(bind)
    got: list[Message] = []
    for number in range(5000):
        assert sender.send(receiver.address, Taken(number, 1))
        if number % 500 == 499:
            got += collect(receiver, 10**9, sender, seconds=0.01)
    got += collect(receiver, 5000 - len(got), sender)
    assert got == [Taken(number, 1) for number in range(5000)]
    assert not collect(receiver, 1, sender, seconds=0.05)
    assert (sender.refused, receiver.malformed) == (0, 0)


def test_a_mailbox_sends_to_itself(bind: str, mailbox: Open) -> None:
    own = mailbox(bind)
    own.send(own.address, Taken(1, 2))
    assert collect(own, 1, own) == [Taken(1, 2)]


def test_each_frame_names_the_incarnation_of_its_sender(bind: str, mailbox: Open) -> None:
    receiver = mailbox(bind)
    senders = [mailbox(bind) for _ in range(3)]
    senders.append(mailbox(bind, incarnation=12345))
    assert len({each.incarnation for each in senders}) == 4
    assert all(0 < each.incarnation < 2**63 for each in senders)
    assert senders[-1].incarnation == 12345
    for number, each in enumerate(senders):
        each.send(receiver.address, Taken(number, 1))
    seen: dict[int, Message] = {}

    def all_seen() -> bool:
        for each in senders:
            each.flush()
        seen.update(receiver.drain())
        return len(seen) == 4

    until(all_seen)
    assert seen == {each.incarnation: Taken(n, 1) for n, each in enumerate(senders)}


def test_another_thread_sends_with_a_sender_of_its_own(bind: str, mailbox: Open) -> None:
    receiver, owner = mailbox(bind), mailbox(bind)
    second = owner.sender_only()
    assert second.incarnation == owner.incarnation

    def work() -> None:
        for number in range(200):
            second.send(receiver.address, Taken(number, 1))
        second.close()

    thread = threading.Thread(target=work)
    thread.start()
    got = collect(receiver, 200)
    thread.join()
    assert got == [Taken(number, 1) for number in range(200)]


def test_every_start_has_a_new_address(bind: str) -> None:
    addresses = set()
    for _ in range(5):
        with contextlib.closing(Mailbox(bind)) as opened:
            addresses.add(opened.address)
    assert len(addresses) == 5 or bind.startswith("tcp")
    if bind.startswith("ipc"):
        assert not list(Path(bind.removeprefix("ipc://")).iterdir()), "files are left behind"


# --- bounds


def test_sends_to_nobody_do_not_block_and_are_bounded(bind: str, mailbox: Open) -> None:
    sender = mailbox(bind, outbox_bytes=100_000)
    target = exact(bind)
    accepted = 0
    for number in range(5000):
        with nothing_blocks():
            accepted += sender.send(target, Submit(number, 256, "ipc:///f", b"x" * 100))
    assert 0 < accepted < 5000
    assert sender.refused == 5000 - accepted
    assert sender.outbox_bytes(target) == sender.outbox_bytes()
    assert 99_000 < sender.outbox_bytes() <= 100_000
    assert not sender.flush()


def test_a_full_outbox_hurts_no_other_peer(bind: str, mailbox: Open) -> None:
    receiver, sender = mailbox(bind), mailbox(bind, outbox_bytes=1000)
    absent = exact(bind)
    while sender.send(absent, Taken(1, 1)):
        pass
    for number in range(100):
        assert sender.send(receiver.address, Taken(number, 1)) or sender.refused
    assert len(collect(receiver, 20, sender)) >= 20
    assert sender.outbox_bytes(receiver.address) == 0


def test_what_waited_is_delivered_in_order_once_the_peer_is_there(bind: str, mailbox: Open) -> None:
    sender = mailbox(bind)
    target = exact(bind)
    for number in range(300):
        assert sender.send(target, Taken(number, 1))
    assert sender.outbox_bytes(target) > 0
    assert sender.outbox_bytes("ipc:///nobody") == 0
    dialling = sender._outboxes[target].socket
    assert dialling.get_monitor_socket(zmq.EVENT_CONNECT_RETRIED).poll(1000 * PATIENCE)
    dialling.disable_monitor()
    receiver = mailbox(target)
    assert collect(receiver, 300, sender) == [Taken(number, 1) for number in range(300)]
    assert sender.flush()
    assert sender.outbox_bytes() == 0


@pytest.mark.parametrize("size", [200, 300_000])
def test_memory_stays_bounded_when_the_receiver_is_stopped(
    bind: str, mailbox: Open, size: int
) -> None:
    limit = 8 * MIB
    sender = mailbox(bind, outbox_bytes=limit)
    with running("receive", bind) as peer:
        sender.send(peer.address, Taken(1, 1))
        until(sender.flush)
        peer.signal(signal.SIGSTOP)
        message = Submit(1, 256, "ipc:///f", b"x" * size)
        before = resident()
        sent, taken = 0, True
        while taken:
            with nothing_blocks(BLOCKED * 4):
                taken = sender.send(peer.address, message)
            sent += taken
            assert sent * size < 1024 * MIB, "nothing bounds the sender"
        grown = resident() - before
        assert grown < 8 * limit, f"{grown / MIB:.0f} MiB for an outbox of {limit / MIB:.0f} MiB"
        peer.signal(signal.SIGCONT)
        until(sender.flush, told="the outbox does not empty once the peer reads again")


def test_a_frame_over_the_limit_is_refused_by_the_sender(bind: str, mailbox: Open) -> None:
    """The receiver would cut the connection, and with it all that is under way."""
    receiver, sender = mailbox(bind), mailbox(bind, watch_disconnects=True)
    sender.send(receiver.address, Taken(1, 1))
    assert collect(receiver, 1, sender) == [Taken(1, 1)]
    big = Submit(1, 256, "ipc:///f", b"x" * codec.MAX_FRAME_BYTES)
    assert not sender.send(receiver.address, big)
    assert sender.refused == 1
    sender.send(receiver.address, Taken(2, 1))
    assert collect(receiver, 1, sender) == [Taken(2, 1)]
    assert sender.disconnected() == []


def test_a_peer_that_sends_too_much_at_once_harms_nobody(bind: str, mailbox: Open) -> None:
    receiver, honest = mailbox(bind), mailbox(bind)
    context = zmq.Context()
    with contextlib.closing(context.socket(zmq.PUSH)) as rude:
        rude.linger = 0
        rude.connect(receiver.address)
        rude.send(b"\0" * (codec.MAX_FRAME_BYTES + 1))
        honest.send(receiver.address, Taken(1, 1))
        assert collect(receiver, 1, honest) == [Taken(1, 1)]
        rude.send(codec.Encoder(5)(Taken(2, 1)))
        assert collect(receiver, 1) == [Taken(2, 1)]
    context.term()


def test_the_largest_frame_arrives(bind: str, mailbox: Open) -> None:
    receiver, sender = mailbox(bind), mailbox(bind, outbox_bytes=codec.MAX_FRAME_BYTES)
    work = b"\x07" * (codec.MAX_FRAME_BYTES - 64)
    assert sender.send(receiver.address, Submit(1, 256, "ipc:///f", work))
    (message,) = collect(receiver, 1, sender)
    assert message == Submit(1, 256, "ipc:///f", work)


# --- peers that go


def test_a_killed_receiver_costs_its_messages_and_nothing_else(bind: str, mailbox: Open) -> None:
    sender, other = mailbox(bind, outbox_bytes=MIB, watch_disconnects=True), mailbox(bind)
    with running("receive", bind) as peer:
        for number in range(20_000):
            with nothing_blocks(BLOCKED * 4):
                sender.send(peer.address, Taken(number, 1))
                if number % 10 == 0:
                    sender.send(other.address, Taken(number, 2))
                    list(other.drain())
            if number == 10_000:
                peer.kill()
        until(lambda: peer.address in sender.disconnected())
        sender.forget(peer.address)
    assert sender.outbox_bytes(peer.address) == 0
    list(other.drain(10**6))
    sender.send(other.address, Taken(7, 7))
    until(lambda: Taken(7, 7) in collect(other, 1, sender))


def test_a_broken_connection_is_reported_once(bind: str, mailbox: Open) -> None:
    sender = mailbox(bind, watch_disconnects=True)
    with running("receive", bind) as peer:
        sender.send(peer.address, Taken(1, 1))
        until(sender.flush)
        time.sleep(0.05)
        assert sender.disconnected() == []
        peer.kill()
        until(lambda: sender.disconnected() == [peer.address])
    successor = mailbox(peer.address)
    sender.send(peer.address, Taken(2, 1))
    assert collect(successor, 1, sender) == [Taken(2, 1)]
    assert sender.disconnected() == []


def test_a_forgotten_address_is_never_dialled_again(bind: str, mailbox: Open) -> None:
    sender = mailbox(bind)
    target = exact(bind)
    sender.send(target, Taken(1, 1))
    sender.forget(target)
    assert sender.outbox_bytes() == 0
    assert sender.flush()
    late, other = mailbox(target), mailbox(bind)
    assert not sender.send(target, Taken(2, 1))
    assert other.send(target, Taken(3, 1))
    assert collect(late, 1, sender, other) == [Taken(3, 1)]
    sender.forget("ipc:///never-known.sock")
    assert not sender.send("ipc:///never-known.sock", Taken(2, 1))


def test_the_memory_of_forgotten_addresses_is_bounded(folder: Path, mailbox: Open) -> None:
    sender = mailbox(f"ipc://{folder}")
    for number in range(10_000):
        sender.forget(f"ipc://{folder}/{number}.sock")
    assert not sender.send(f"ipc://{folder}/9999.sock", Taken(1, 1))
    assert len(sender._closed) <= 4096


def test_a_last_word_reaches_a_forgotten_address(bind: str, mailbox: Open) -> None:
    receiver, sender = mailbox(bind), mailbox(bind)
    sender.forget(receiver.address)
    sender.send_last(receiver.address, Taken(1, 1))
    assert collect(receiver, 1) == [Taken(1, 1)]
    assert not sender.send(receiver.address, Taken(2, 1))


@pytest.mark.parametrize(
    "address",
    ["", "nonsense", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:x", "ipc://" + "x" * 200],
)
def test_an_address_without_meaning_is_refused_like_a_full_outbox(
    folder: Path, mailbox: Open, address: str
) -> None:
    """It comes from another process: it must not end this one."""
    sender = mailbox(f"ipc://{folder}")
    assert not sender.send(address, Taken(1, 1))
    assert sender.refused == 1
    sender.send_last(address, Taken(1, 1))
    assert sender.flush()


# --- who owns an address


def test_a_second_owner_of_an_address_is_refused_and_steals_nothing(
    bind: str, mailbox: Open
) -> None:
    target = exact(bind)
    first, sender = mailbox(target), mailbox(bind)
    for _ in range(2):
        with pytest.raises(AddressError, match=r"in use|cannot listen"):
            Mailbox(target)
    code = f"from penstock.protocol.wire.mailbox import Mailbox; Mailbox({target!r})"
    again = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert again.returncode != 0
    assert target.removeprefix("tcp://") in again.stderr.splitlines()[-1]
    sender.send(target, Taken(1, 1))
    assert collect(first, 1, sender) == [Taken(1, 1)]


def test_the_address_of_a_killed_process_is_taken_over(bind: str, mailbox: Open) -> None:
    target = exact(bind)
    with running("receive", target) as peer:
        peer.kill()
    if bind.startswith("ipc"):
        assert Path(target.removeprefix("ipc://")).exists(), "the socket file is stale"
    heir, sender = mailbox(target), mailbox(bind)
    sender.send(target, Taken(1, 1))
    assert collect(heir, 1, sender) == [Taken(1, 1)]


def test_a_successor_keeps_its_socket_while_the_predecessor_closes(
    folder: Path, mailbox: Open
) -> None:
    target = f"ipc://{folder}/router.sock"
    first = Mailbox(target)
    first.send_last(f"ipc://{folder}/absent.sock", Taken(1, 1), 300)  # keeps it from ending
    closing = threading.Thread(target=first.close)
    closing.start()
    successor: list[Mailbox] = []

    def take_over() -> bool:
        with contextlib.suppress(AddressError):
            successor.append(mailbox(target))
        return bool(successor)

    until(take_over)
    closing.join()
    time.sleep(0.05)
    assert Path(target.removeprefix("ipc://")).exists()
    sender = mailbox(f"ipc://{folder}")
    sender.send(target, Taken(2, 1))
    assert collect(successor[0], 1, sender) == [Taken(2, 1)]


def test_a_lock_file_that_was_replaced_while_waiting_is_not_ownership(
    folder: Path, mailbox: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between open and lock another process may remove the file and a third make a new one."""
    flock = mailbox_module.fcntl.flock
    raced: list[Mailbox] = []
    target = f"ipc://{folder}/router.sock"

    def race(descriptor: int, operation: int) -> None:
        if not raced:
            monkeypatch.setattr(mailbox_module.fcntl, "flock", flock)
            (folder / "router.lock").unlink()
            raced.append(mailbox(target))
        flock(descriptor, operation)

    monkeypatch.setattr(mailbox_module.fcntl, "flock", race)
    with pytest.raises(AddressError, match="in use"):
        Mailbox(target)
    assert raced


def test_a_path_of_the_greatest_length_works_and_a_longer_one_is_refused(
    folder: Path, mailbox: Open
) -> None:
    room = MAX_IPC_PATH - len(f"{folder}/.sock")
    longest = mailbox(f"ipc://{folder}/{'x' * room}.sock")
    sender = mailbox(f"ipc://{folder}")
    sender.send(longest.address, Taken(1, 1))
    assert collect(longest, 1, sender) == [Taken(1, 1)]
    for longer in ("x" * (room + 1), "é" * (room // 2 + 1)):
        with pytest.raises(AddressError, match=r"longer than 107 bytes.*--runtime-dir"):
            Mailbox(f"ipc://{folder}/{longer}.sock")


def test_only_a_private_folder_holds_sockets(folder: Path, mailbox: Open) -> None:
    shared = folder / "shared"
    shared.mkdir()
    for mode in (0o755, 0o770, 0o701):
        shared.chmod(mode)
        with pytest.raises(SecurityError, match=f"chmod 700 {shared}"):
            Mailbox(f"ipc://{shared}")
    assert list(shared.iterdir()) == []
    made = mailbox(f"ipc://{folder}/new/deep")
    assert stat.S_IMODE((folder / "new/deep").stat().st_mode) == 0o700
    assert made.address.startswith(f"ipc://{folder}/new/deep/inbox-")


def test_a_folder_of_another_user_is_refused(folder: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(folder, 12345, 12345)
    with pytest.raises(SecurityError, match="belongs to another user"):
        Mailbox(f"ipc://{folder}")
    os.chown(folder, 0, 0)


def test_a_file_in_place_of_the_folder_is_refused_clearly(folder: Path) -> None:
    (folder / "file").write_text("")
    for path in (folder / "file", folder / "file" / "below"):
        with pytest.raises(SecurityError, match=str(path)):
            Mailbox(f"ipc://{path}")


@pytest.mark.parametrize("bind", ["", "/tmp/x", "udp://127.0.0.1", "inproc://x", "tcp:127.0.0.1"])
def test_other_kinds_of_address_are_refused(bind: str) -> None:
    with pytest.raises(AddressError, match="expected ipc://PATH or tcp://HOST"):
        Mailbox(bind)


def test_ports_come_from_the_given_range(mailbox: Open) -> None:
    low = free_port()
    first = mailbox("tcp://127.0.0.1", ports=(low, low))
    assert first.address == f"tcp://127.0.0.1:{low}"
    with pytest.raises(AddressError, match=rf"tcp://127.0.0.1.*{low}-{low}.*--port-range"):
        Mailbox("tcp://127.0.0.1", ports=(low, low))


def test_port_zero_is_any_port(mailbox: Open) -> None:
    for bind in ("tcp://127.0.0.1:0", "tcp://127.0.0.1:*"):
        assert int(mailbox(bind).address.rpartition(":")[2]) > 1024


def test_others_are_told_the_advertised_host(mailbox: Open) -> None:
    own = mailbox("tcp://127.0.0.1", advertise="localhost")
    assert own.address.startswith("tcp://localhost:")
    own.send(own.address, Taken(1, 1))
    assert collect(own, 1, own) == [Taken(1, 1)]


@pytest.mark.parametrize("port", ["x", "70000", "-1", "5.5"])
def test_a_port_that_is_none_is_refused(port: str) -> None:
    with pytest.raises(AddressError, match=f"127.0.0.1:{port}"):
        Mailbox(f"tcp://127.0.0.1:{port}")


# --- endings


def test_closing_does_not_wait_for_those_who_take_no_messages(bind: str) -> None:
    with running("idle", bind) as peer:
        sender = Mailbox(bind)
        sender.send(peer.address, Taken(1, 1))
        until(sender.flush)
        peer.signal(signal.SIGSTOP)
        for number in range(3000):
            sender.send(peer.address, Submit(number, 256, "ipc:///f", b"x" * 1000))
            sender.send(exact(bind), Taken(number, 1)) if number < 3 else None
        sender.send_last(exact(bind), Taken(1, 1))
        began = time.monotonic()
        sender.close()  # the peer stays stopped: what waits for it waits for ever
        assert time.monotonic() - began < 10  # half a second on an idle machine


def test_what_was_sent_just_before_closing_still_arrives(bind: str, mailbox: Open) -> None:
    """Nothing is connected yet at the first send: closing must give it the time."""
    receiver = mailbox(bind)
    for number in range(10):
        sender = Mailbox(bind)
        sender.send(receiver.address, Taken(number, 1))
        sender.close()
    assert collect(receiver, 10) == [Taken(number, 1) for number in range(10)]


def test_a_process_that_ends_after_sending_loses_nothing(folder: Path, mailbox: Open) -> None:
    receiver = mailbox(f"ipc://{folder}")
    ended = subprocess.Popen([sys.executable, "-c", _SEND, receiver.address, "3000"])
    assert len(collect(receiver, 3000)) == 3000
    assert ended.wait(PATIENCE) == 0


_SEND = (
    f"import sys; sys.path[:0] = [{str(Path(__file__).parents[1])!r}]\n"
    "from support.protocol.mailbox_process import main\n"
    "main('send', *sys.argv[1:])"
)


def test_closing_twice_is_harmless(bind: str) -> None:
    own = Mailbox(bind)
    own.close()
    own.close()


def test_nothing_stays_open_after_closing(bind: str) -> None:
    def used() -> tuple[int, int]:
        process = psutil.Process()
        return process.num_fds(), process.num_threads()

    Mailbox(bind).close()
    before = used()
    for _ in range(3):
        first, second = Mailbox(bind, watch_disconnects=True), Mailbox(bind)
        first.send(second.address, Taken(1, 1))
        collect(second, 1, first)
        first.close()
        second.close()
    until(lambda: used() <= before, told=lambda: (used(), before))


def test_messages_sent_to_a_restarted_peer_reach_its_new_address_only(
    bind: str, mailbox: Open
) -> None:
    sender = mailbox(bind)
    old = Peer("receive", bind)
    sender.send(old.address, Taken(1, 1))
    until(sender.flush)
    old.kill()
    new = mailbox(bind)
    sender.send(old.address, Taken(2, 1))
    sender.send(new.address, Taken(3, 1))
    assert new.address != old.address
    assert collect(new, 1, sender) == [Taken(3, 1)]
    sender.send(new.address, Taken(4, 1))
    assert collect(new, 1, sender) == [Taken(4, 1)]
