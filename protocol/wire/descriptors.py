"""Messages with open file descriptors, over a UNIX socket between processes of one user.

A frame is the length of a msgpack message (4 bytes, little endian) and the message; descriptors
come with its first bytes (``SCM_RIGHTS``, unix(7)). Whoever sends keeps its own.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from penstock.protocol.wire.messages.held_weights import (
    MAX_MANIFEST_BYTES,
    MAX_PIECES,
    HolderMessage,
)

_LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")
"""``struct ucred``: process, user, group."""
MAX_BYTES = MAX_MANIFEST_BYTES + 4096
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(HolderMessage).decode


class BadDescriptorFrame(ValueError):
    """What came is no message, or came from another user."""


class Received(NamedTuple):
    message: HolderMessage
    descriptors: list[int]
    """The receiver's to close."""


def send(
    connection: socket.socket, message: HolderMessage, descriptors: Sequence[int] = ()
) -> None:
    """Raises ``OSError``, of which ``TimeoutError`` is one."""
    frame = _encode(message)
    frame = _LENGTH.pack(len(frame)) + frame
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _array(descriptors))] if descriptors else []
    sent = connection.sendmsg([frame], rights)
    if sent < len(frame):  # Sending nothing fails where the other side has closed by now.
        connection.sendall(memoryview(frame)[sent:])


def receive(connection: socket.socket) -> Received | None:
    """The next message; ``None``: the other side has closed the connection. Raises ``OSError``, and
    ``BadDescriptorFrame`` for what is none; no descriptor stays open then."""
    with _closing() as descriptors:
        head = _first(connection, descriptors)
        if not head:
            return None
        head += _rest(connection, _LENGTH.size - len(head))
        (length,) = _LENGTH.unpack(head)
        if length > MAX_BYTES:
            raise BadDescriptorFrame(f"a message of {length} bytes; {MAX_BYTES} are the most")
        try:
            message = _decode(_rest(connection, length))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise BadDescriptorFrame(str(error)) from None
        return Received(message, _kept(descriptors))


def check_user(connection: socket.socket) -> None:
    """Raises ``BadDescriptorFrame`` where the other side is another user's process."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(told)
    if user != os.getuid():
        raise BadDescriptorFrame(f"a process of user {user}; this is one of user {os.getuid()}")


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _array(descriptors: Sequence[int]) -> bytes:
    return struct.pack(f"{len(descriptors)}i", *descriptors)


def _first(connection: socket.socket, descriptors: list[int]) -> bytes:
    """The beginning of a length; the descriptors that came with it are added to ``descriptors``."""
    room = socket.CMSG_SPACE(MAX_PIECES * struct.calcsize("i"))
    head, rights, flags, _ = connection.recvmsg(_LENGTH.size, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in rights:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            count = len(content) // struct.calcsize("i")
            descriptors += struct.unpack_from(f"{count}i", content)
    if flags & socket.MSG_CTRUNC:
        raise BadDescriptorFrame(
            f"more than {MAX_PIECES} descriptors, or this process may open no more (ulimit -n)"
        )
    return head


def _rest(connection: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        part = connection.recv(min(count - len(found), 1 << 20))
        if not part:
            raise BadDescriptorFrame("the connection broke in the middle of a message")
        found += part
    return bytes(found)


@contextlib.contextmanager
def _closing() -> Iterator[list[int]]:
    """Descriptors that are closed in the end, but for those that were taken out of the list."""
    descriptors: list[int] = []
    try:
        yield descriptors
    finally:
        close_all(descriptors)


def _kept(descriptors: list[int]) -> list[int]:
    kept = descriptors[:]
    descriptors.clear()
    return kept
