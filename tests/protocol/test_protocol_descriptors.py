"""Messages with open descriptors, between two ends of a UNIX socket."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from penstock.protocol.wire import descriptors
from penstock.protocol.wire.descriptors import (
    MAX_BYTES,
    BadDescriptorFrame,
    check_user,
    close_all,
    receive,
    send,
)
from penstock.protocol.wire.messages.held_weights import (
    MAX_PIECES,
    WeightsHeld,
    WeightsKey,
    WeightsOffered,
    WeightsWanted,
)

KEY = WeightsKey("model", "host", "digest")


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair(socket.AF_UNIX)
    for end in (left, right):
        end.settimeout(30)
    with left, right:
        yield left, right


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_message_brings_descriptors_of_the_same_files(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    files = [os.memfd_create(f"piece {number}") for number in range(3)]
    for number, file in enumerate(files):
        os.write(file, bytes([number]))
    manifest = os.urandom(3 << 20)  # more than a socket takes at once
    offer = WeightsOffered(KEY, manifest, 3)
    sender = threading.Thread(target=send, args=(ends[0], offer, files))
    sender.start()
    found = receive(ends[1])
    sender.join()
    assert found is not None and found.message == offer
    assert [os.pread(each, 9, 0) for each in found.descriptors] == [b"\0", b"\1", b"\2"]
    assert not any(os.get_inheritable(each) for each in found.descriptors)
    assert not set(found.descriptors) & set(files)
    close_all([*found.descriptors, *files])


def test_a_message_without_descriptors_and_the_end(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    send(ends[0], WeightsWanted(KEY))
    ends[0].close()
    assert receive(ends[1]) == (WeightsWanted(KEY), [])
    assert receive(ends[1]) is None


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (b"\x03\0", "in the middle"),
        (struct.pack("<I", 10) + b"abc", "in the middle"),
        (struct.pack("<I", MAX_BYTES + 1), "the most"),
        (struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1", "."),
        (struct.pack("<I", 1000) + b"\x91" * 1000, "."),
        (struct.pack("<I", 3) + b"\x92\x09\xc0", "."),
    ],
)
def test_what_is_no_message_is_refused_and_leaves_no_descriptor_open(
    ends: tuple[socket.socket, socket.socket], frame: bytes, why: str
) -> None:
    with open(os.devnull) as file:
        socket.send_fds(ends[0], [frame], [file.fileno()] * 3)
        ends[0].shutdown(socket.SHUT_WR)
        before = open_files()
        with pytest.raises(BadDescriptorFrame, match=why):
            receive(ends[1])
        assert open_files() == before


def test_too_many_descriptors_are_refused_and_none_stays_open(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    with open(os.devnull) as file:
        send(ends[0], WeightsHeld(b"x"), [file.fileno()] * (MAX_PIECES + 3))
        before = open_files()
        with pytest.raises(BadDescriptorFrame, match=f"more than {MAX_PIECES} descriptors"):
            receive(ends[1])
        assert open_files() == before


def test_only_processes_of_the_same_user_are_answered(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_user(ends[0])
    monkeypatch.setattr(descriptors.os, "getuid", lambda: 54321)
    with pytest.raises(BadDescriptorFrame, match="this is one of user 54321"):
        check_user(ends[0])
