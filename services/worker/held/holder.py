"""The worker's conversation with the holder of its host."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from penstock.protocol.wire.descriptors import (
    BadDescriptorFrame,
    Received,
    check_user,
    close_all,
    receive,
    send,
)
from penstock.protocol.wire.messages.held_weights import (
    WeightsHeld,
    WeightsKey,
    WeightsOffered,
    WeightsTaken,
    WeightsWanted,
)
from penstock.protocol.wire.unix_listener import connected

SECONDS = 5.0
"""For an answer."""
LOOK_SECONDS = 0.5
WAIT_LIMIT_SECONDS = 1200.0
"""For another worker that loads the same weights."""


class NoHolder(Exception):
    """It cannot be reached, or does not answer. Says why."""


class GivenWeights(NamedTuple):
    manifest: bytes
    descriptors: list[int]
    """The receiver's to close."""


class HolderConnection:
    """A connection; while it is open, the weights that it was asked for and did not have are this
    worker's to load."""

    def __init__(self, path: str) -> None:
        """Raises ``NoHolder``."""
        try:
            self._socket = connected(path, SECONDS)
        except OSError as error:
            raise NoHolder(f"no holder at {path}: {error.strerror or error}") from None
        try:
            check_user(self._socket)
        except BadDescriptorFrame as error:
            self._socket.close()
            raise NoHolder(str(error)) from None

    def close(self) -> None:
        self._socket.close()

    def want(self, key: WeightsKey, waits: Callable[[], None]) -> GivenWeights | None:
        """The weights; ``None``: nobody has them, and this worker is the one that loads them.
        ``waits``: is called while another one does. Raises ``NoHolder``."""
        with _telling():
            send(self._socket, WeightsWanted(key))
            left = WAIT_LIMIT_SECONDS
            while not self._readable():
                left -= LOOK_SECONDS
                if left <= 0:
                    raise NoHolder(f"no answer within {WAIT_LIMIT_SECONDS:g} s")
                waits()
            received = self._receive()
            message = received.message
            if isinstance(message, WeightsHeld) and message.manifest:
                return GivenWeights(message.manifest, received.descriptors)
            close_all(received.descriptors)
            if not isinstance(message, WeightsHeld):
                raise NoHolder(f"{type(message).__name__} answers no question for weights")
            return None

    def offer(
        self, key: WeightsKey, manifest: bytes, num_bytes: int, descriptors: Sequence[int]
    ) -> str:
        """Returns why they are not held; empty: they are. Raises ``NoHolder``."""
        with _telling():
            send(self._socket, WeightsOffered(key, manifest, num_bytes), descriptors)
            received = self._receive()
            close_all(received.descriptors)
            if not isinstance(received.message, WeightsTaken):
                raise NoHolder(f"{type(received.message).__name__} answers no offer")
            return received.message.refused

    def wait_for_end(self) -> None:
        """Return when the holder has closed the connection; it says nothing meanwhile."""
        with contextlib.suppress(OSError):
            self._socket.settimeout(None)
            while self._socket.recv(1):
                pass

    def end(self) -> None:
        """Let another thread's ``wait_for_end`` return."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _readable(self) -> bool:
        looked = select.poll()
        looked.register(self._socket, select.POLLIN)
        return bool(looked.poll(1000 * LOOK_SECONDS))

    def _receive(self) -> Received:
        with _telling():
            received = receive(self._socket)
        if received is None:
            raise NoHolder("the holder has closed the connection")
        return received


@contextlib.contextmanager
def _telling() -> Iterator[None]:
    try:
        yield
    except (OSError, BadDescriptorFrame) as error:
        raise NoHolder(f"the holder: {error}") from None
