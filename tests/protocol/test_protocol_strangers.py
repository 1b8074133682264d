"""What an inbox on tcp says of those who fail its handshake."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from penstock.protocol.wire.mailbox import Mailbox
from penstock.protocol.wire.messages.requests import Taken
from penstock.protocol.wire.security import CurveKeys

SECRET = "a secret of good length"
OTHER = "another secret of good length"


@pytest.fixture
def inbox() -> Iterator[Mailbox]:
    mailbox = Mailbox("tcp://127.0.0.1", keys=CurveKeys(SECRET))
    yield mailbox
    mailbox.close(linger_ms=0)


def complaints(inbox: Mailbox, seconds: float) -> list[str]:
    """All that the inbox has to say within a time; it is read often, as an event loop does."""
    found = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found += inbox.complaints()
        time.sleep(0.001)
    return found


def complaints_until_named(inbox: Mailbox, host: str) -> list[str]:
    """All that the inbox has to say until it names a host.

    A refused connection may be gone before its host is seen, on a busy machine many times in a
    row; then a complaint without a name may come first."""
    found: list[str] = []
    deadline = time.monotonic() + 60
    while not any(host in complaint for complaint in found) and time.monotonic() < deadline:
        found += complaints(inbox, 0.05)
    return found


def delivered(friend: Mailbox, inbox: Mailbox) -> bool:
    """Whether a message of a friend arrives while this waits."""
    friend.send(inbox.address, Taken(1, 1))
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        friend.flush()
        if inbox.wait(0.02):
            return [message for _, message in inbox.drain()] == [Taken(1, 1)]
    return False


def test_a_host_with_another_secret_is_named_once(inbox: Mailbox) -> None:
    stranger = Mailbox("tcp://127.0.0.1", keys=CurveKeys(OTHER))
    try:
        stranger.send(inbox.address, Taken(1, 1))
        *nameless, complaint = complaints_until_named(inbox, "connection from 127.0.0.1")
        assert complaints(inbox, 0.5) == []
    finally:
        stranger.close(linger_ms=0)
    assert "connection from 127.0.0.1" in complaint
    assert len(nameless) <= 1
    assert inbox.address in complaint
    assert "--secret" in complaint
    assert SECRET not in complaint


def test_friends_are_no_strangers_when_they_come_and_when_they_go(inbox: Mailbox) -> None:
    friend = Mailbox("tcp://127.0.0.1", keys=CurveKeys(SECRET))
    assert delivered(friend, inbox)
    friend.close(linger_ms=0)
    assert complaints(inbox, 0.2) == []


def test_random_bytes_leave_the_inbox_open_to_friends(inbox: Mailbox) -> None:
    port = int(inbox.address.rpartition(":")[2])
    for number in range(20):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(bytes(range(number, number + 100)))
    friend = Mailbox("tcp://127.0.0.1", keys=CurveKeys(SECRET))
    try:
        assert delivered(friend, inbox)
    finally:
        friend.close(linger_ms=0)
    assert len(inbox.complaints()) <= 2


def test_an_inbox_without_a_secret_has_no_strangers() -> None:
    mailbox = Mailbox("tcp://127.0.0.1")
    try:
        assert mailbox.strangers is None
        assert mailbox.complaints() == []
    finally:
        mailbox.close(linger_ms=0)
