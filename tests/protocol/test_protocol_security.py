"""Who may talk to whom: CURVE with one shared secret on tcp, private folders on ipc."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
import zmq.utils.z85
from support.polling import until
from support.protocol.mailbox_process import running, short_folder

from penstock.protocol.wire import codec
from penstock.protocol.wire.addresses import is_loopback
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.mailbox import Mailbox
from penstock.protocol.wire.messages.requests import Taken
from penstock.protocol.wire.security import CurveKeys, SecurityError, safe_context

SECRET = "correct horse battery staple"
LOOPBACK = "tcp://127.0.0.1"


@pytest.fixture
def mailbox() -> Iterator[Callable[..., Mailbox]]:
    with contextlib.ExitStack() as stack:

        def make(secret: str = "", bind: str = LOOPBACK) -> Mailbox:
            made = Mailbox(bind, keys=CurveKeys(secret) if secret else None)
            stack.callback(made.close, 0)
            return made

        yield make


def arrived(receiver: Mailbox, *senders: Mailbox, seconds: float = 30.0) -> list[Message]:
    """The first messages that arrive within the time."""
    deadline = time.monotonic() + seconds
    found: list[Message] = []
    while not found and time.monotonic() < deadline:
        for sender in senders:
            sender.flush()
        receiver.wait(0.005)
        found += [message for _, message in receiver.drain()]
    return found


def test_processes_with_the_same_secret_talk(mailbox: Callable[..., Mailbox]) -> None:
    receiver, sender = mailbox(SECRET), mailbox(SECRET)
    sender.send(receiver.address, Taken(1, 1))
    assert arrived(receiver, sender) == [Taken(1, 1)]
    second = sender.sender_only()
    second.send(receiver.address, Taken(2, 1))
    for _ in range(100):
        if second.flush():
            break
        time.sleep(0.01)
    assert arrived(receiver) == [Taken(2, 1)]
    second.close()
    sender.send_last(receiver.address, Taken(3, 1))
    assert arrived(receiver) == [Taken(3, 1)]
    assert sender.complaints() == []


@pytest.mark.parametrize(
    ("theirs", "ours"), [(SECRET, "another secret of some length"), (SECRET, ""), ("", SECRET)]
)
def test_without_the_same_secret_nothing_gets_through_and_one_complaint_says_why(
    mailbox: Callable[..., Mailbox], theirs: str, ours: str
) -> None:
    receiver, friend, stranger = mailbox(theirs), mailbox(theirs), mailbox(ours)
    stranger.send(receiver.address, Taken(1, 1))
    friend.send(receiver.address, Taken(2, 1))
    assert arrived(receiver, friend, stranger) == [Taken(2, 1)]
    complaints: list[str] = []
    deadline = time.monotonic() + 30
    while not complaints and time.monotonic() < deadline:
        assert arrived(receiver, stranger, seconds=0.05) == []
        complaints += stranger.complaints()
    (complaint,) = complaints
    assert receiver.address in complaint
    assert ("has a --secret" if ours else "has no --secret") in complaint
    assert SECRET not in complaint
    outbox = stranger._outboxes[receiver.address]
    enough = outbox.failed_handshakes + 2

    def fails_again() -> bool:
        assert stranger.complaints() == [], "one complaint is enough"
        return outbox.failed_handshakes >= enough

    if theirs and ours:  # else it is not dialled again
        until(fails_again)
    friend.send(receiver.address, Taken(3, 1))
    assert arrived(receiver, friend, stranger) == [Taken(3, 1)]
    assert friend.complaints() == []
    assert receiver.malformed == 0


def test_a_client_key_of_its_own_is_not_admitted(mailbox: Callable[..., Mailbox]) -> None:
    """Without a ZAP handler a PULL socket would accept any key pair that knows the server's."""
    receiver, friend = mailbox(SECRET), mailbox(SECRET)
    keys = CurveKeys(SECRET)
    public, secret = zmq.curve_keypair()
    context = zmq.Context()
    with contextlib.closing(context.socket(zmq.PUSH)) as stranger:
        stranger.linger = 0
        stranger.curve_serverkey = keys.public
        stranger.curve_publickey = public
        stranger.curve_secretkey = secret
        with stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH) as refusals:
            stranger.connect(receiver.address)
            stranger.send(codec.Encoder(1)(Taken(1, 1)))
            assert refusals.poll(30_000)
            stranger.disable_monitor()
        friend.send(receiver.address, Taken(2, 1))
        assert arrived(receiver, friend) == [Taken(2, 1)]
    context.term()


def test_what_passes_on_tcp_is_encrypted(mailbox: Callable[..., Mailbox]) -> None:
    """A plain recorder in the middle sees neither the message nor the secret."""
    receiver, sender = mailbox(SECRET), mailbox(SECRET)
    port = int(receiver.address.rpartition(":")[2])
    seen = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as middle:
        middle.settimeout(30)
        sender.send(f"tcp://127.0.0.1:{middle.getsockname()[1]}", Taken(0x11223344, 0x55667788))
        inward, _ = middle.accept()
        with inward, socket.create_connection(("127.0.0.1", port)) as outward:
            pairs = ((inward, outward), (outward, inward))
            for each in (inward, outward):
                each.settimeout(0.02)
            got: list[Message] = []
            deadline = time.monotonic() + 30
            while not got and time.monotonic() < deadline:
                for source, target in pairs:
                    with contextlib.suppress(TimeoutError):
                        data = source.recv(65536)
                        seen += data
                        target.sendall(data)
                got = arrived(receiver, sender, seconds=0.01)
    assert got == [Taken(0x11223344, 0x55667788)]
    assert b"CURVE" in seen
    assert struct.pack(">I", 0x11223344) not in seen
    assert SECRET.encode() not in seen


@pytest.mark.parametrize("secret", ["", SECRET])
def test_random_bytes_on_the_port_harm_nobody(mailbox: Callable[..., Mailbox], secret: str) -> None:
    receiver, friend = mailbox(secret), mailbox(secret)
    port = int(receiver.address.rpartition(":")[2])
    noise = random.Random(1)
    marker = f"/tmp/penstock-marker-{os.getpid()}"
    greetings = [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x01\x00\x0a" + noise.randbytes(300),  # legacy framing: delivered without a handshake
        b"\x01\x00" + b"\x0b\x00" + noise.randbytes(10) * 50,
        b"\xff" + b"\x00" * 8 + b"\x7f\x03\x00NULL" + b"\x00" * 48 + noise.randbytes(500),
        b"\xff" * 100,
        f"cos\nsystem\n(S'touch {marker}'\ntR.".encode(),  # a pickle that would run a command
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f" + b"\xff\xff\xff\xff\xff\xff\xff\xff" * 20,
    ]
    with contextlib.ExitStack() as stack:
        for greeting in greetings + [noise.randbytes(noise.randrange(2000)) for _ in range(40)]:
            rude = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            with contextlib.suppress(OSError):
                rude.sendall(greeting)
        # One thread reads what comes on all connections, and this comes last.
        friend.send(receiver.address, Taken(1, 1))
        assert arrived(receiver, friend) == [Taken(1, 1)]
    assert not Path(marker).exists()
    if secret:
        assert receiver.malformed == 0, "bytes without a handshake reached the decoder"


def test_a_peer_that_dies_in_its_handshake_is_no_reason_for_a_complaint(
    mailbox: Callable[..., Mailbox],
) -> None:
    sender = mailbox(SECRET)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)
        sender.send(f"tcp://127.0.0.1:{server.getsockname()[1]}", Taken(1, 1))
        for _ in range(2):  # who tries again knows how it ended before
            server.accept()[0].close()
    assert sender.complaints() == []


def test_a_peer_that_comes_late_or_dies_is_no_reason_for_a_complaint(
    mailbox: Callable[..., Mailbox],
) -> None:
    sender = mailbox(SECRET)
    with running("receive", LOOPBACK, SECRET) as peer:
        sender.send(peer.address, Taken(1, 1))
        time.sleep(0.1)
        sender.flush()
        peer.kill()
        for _ in range(20):
            sender.send(peer.address, Taken(1, 1))
            time.sleep(0.02)
            sender.flush()
    assert sender.complaints() == []


def test_ipc_needs_no_secret_but_tolerates_one(mailbox: Callable[..., Mailbox]) -> None:
    with short_folder() as folder:
        receiver = mailbox(SECRET, f"ipc://{folder}")
        sender = mailbox(SECRET, LOOPBACK)
        sender.send(receiver.address, Taken(1, 1))
        assert arrived(receiver, sender) == [Taken(1, 1)]


def test_another_user_cannot_connect_to_an_ipc_inbox(mailbox: Callable[..., Mailbox]) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    with short_folder() as folder:
        receiver = mailbox("", f"ipc://{folder}")
        path = receiver.address.removeprefix("ipc://")
        code = f"import socket; socket.socket(socket.AF_UNIX).connect({path!r})"
        for user, expected in ((0, ""), (65534, "PermissionError: [Errno 13] Permission denied")):
            done = subprocess.run(
                ["/usr/bin/env", "python3", "-c", code], user=user, capture_output=True, text=True
            )
            assert expected in done.stderr
            assert bool(done.returncode) == bool(expected)


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "10.0.0.1", "example.org", "127.0.0.1.example"])
def test_without_a_secret_only_loopback_is_bound(host: str) -> None:
    with pytest.raises(SecurityError, match=r"not a loopback address: set --secret"):
        Mailbox(f"tcp://{host}")


def test_with_a_secret_every_address_may_be_bound(mailbox: Callable[..., Mailbox]) -> None:
    receiver, sender = mailbox(SECRET, "tcp://0.0.0.0"), mailbox(SECRET)
    sender.send(receiver.address.replace("0.0.0.0", "127.0.0.1"), Taken(1, 1))
    assert arrived(receiver, sender) == [Taken(1, 1)]


def test_ipv6_loopback_works(mailbox: Callable[..., Mailbox]) -> None:
    if not Path("/proc/net/if_inet6").exists() or not Path("/proc/net/if_inet6").read_text():
        pytest.skip("no IPv6 here")
    receiver, sender = mailbox("", "tcp://[::1]"), mailbox("", "tcp://[::1]")
    assert receiver.address.startswith("tcp://[::1]:")
    sender.send(receiver.address, Taken(1, 1))
    assert arrived(receiver, sender) == [Taken(1, 1)]


def test_loopback_is_told_from_names_that_look_like_it() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.8.8.8", "localhost", "::1", "[::1]"]))
    assert not any(
        map(is_loopback, ["", "*", "0.0.0.0", "127.evil.org", "128.0.0.1", "::", "[::]"])
    )


# --- the secret


def test_the_same_secret_gives_the_same_keys_everywhere() -> None:
    first, second, third = CurveKeys(SECRET), CurveKeys(SECRET), CurveKeys(SECRET + "x")
    assert (first.public, first.secret) == (second.public, second.secret)
    assert first.public != third.public
    assert zmq.curve_public(first.secret) == first.public
    assert len(zmq.utils.z85.decode(first.secret)) == 32


@pytest.mark.parametrize("secret", ["x", "fifteen letters"])
def test_a_short_secret_is_refused(secret: str, tmp_path: Path) -> None:
    with pytest.raises(SecurityError, match=rf"{len(secret)} characters; at least 16") as caught:
        CurveKeys(secret)
    assert "openssl rand -hex 32" in str(caught.value)
    (tmp_path / "secret").write_text(secret + "\n")
    (tmp_path / "secret").chmod(0o600)
    with pytest.raises(SecurityError, match="at least 16"):
        CurveKeys(f"file:{tmp_path}/secret")


def test_a_secret_file_is_read_without_its_line_end(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    path.chmod(0o600)
    assert CurveKeys(f"file:{path}").public == CurveKeys(SECRET).public


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_secret_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET)
    path.chmod(mode)
    with pytest.raises(SecurityError, match=f"others can read {path}; chmod 600 {path}"):
        CurveKeys(f"file:{path}")


def test_a_secret_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SecurityError, match=f"{tmp_path}/none: No such file"):
        CurveKeys(f"file:{tmp_path}/none")
    with pytest.raises(SecurityError, match=f"{tmp_path}: "):
        CurveKeys(f"file:{tmp_path}")
    (tmp_path / "binary").write_bytes(b"\xff\xfe" * 20)
    (tmp_path / "binary").chmod(0o600)
    with pytest.raises(SecurityError, match=f"{tmp_path}/binary: not text"):
        CurveKeys(f"file:{tmp_path}/binary")


@pytest.mark.parametrize("version", [(2, 2, 0), (4, 1, 8), (4, 3, 2)])
def test_a_library_with_known_overflows_is_refused_with_the_remedy(
    version: tuple[int, int, int],
) -> None:
    with pytest.raises(SecurityError) as error:
        safe_context(version)
    message = str(error.value)
    assert ".".join(map(str, version)) in message
    assert "4.3.3" in message
    assert "pip install" in message


@pytest.mark.parametrize("version", [(4, 3, 3), (4, 4, 0), (5, 0, 0), None])
def test_a_library_without_them_is_taken(version: tuple[int, int, int] | None) -> None:
    safe_context(version).term()
