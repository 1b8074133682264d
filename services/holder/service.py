"""The holder's process: it keeps the memory of finished weights, so that the next worker of their
model maps them instead of making them again.

What it has are open descriptors of memory that workers have made. It maps none of it, opens no
device and imports no CUDA: so there is little that could end it, and where it ends all the same,
workers go on with what they have mapped, and offer it to the next holder.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from penstock.protocol.config import Config
from penstock.protocol.process.loop_service import LoopService
from penstock.protocol.process.metrics import Registry
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
from penstock.protocol.wire.messages.membership import Peer, Phase, Sleep
from penstock.protocol.wire.unix_listener import listen_at
from penstock.services.holder.held import (
    CHECK_SECONDS,
    MOST_EARLY_ENDS,
    OUTLIVED_SECONDS,
    HeldSets,
    HeldWeights,
    Lease,
)

MODE = 0o600
"""Of the socket: nobody else connects."""
MOST_CONNECTIONS = 256
"""Each worker has one while it lives."""
SECONDS = 10.0
"""For a message that has begun."""


class HolderService(LoopService):
    """Answers workers in threads, one for each connection; the loop is a member like others."""

    name = "holder"

    def __init__(self, config: Config) -> None:
        """Raises ``AddressError`` where the socket cannot be made."""
        super().__init__(config)
        self.metrics = Registry()
        self.sets = HeldSets()
        self._places: set[str] = set()
        """Where there have ever been any."""
        self._places_left = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._listener, self._vacate = _listen(config.cluster.holder_socket)

    def start(self) -> None:
        threading.Thread(target=self._accept, name="accept", daemon=True).start()
        self.set_phase(Phase.READY)

    def stop(self) -> None:
        self._vacate()
        self._listener.close()
        self.sets.close()

    # --- workers

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # the listener is closed
            if not self._places_left.acquire(blocking=False):
                connection.close()
                continue
            thread = threading.Thread(
                target=self._serve, args=(connection,), name="worker", daemon=True
            )
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        """All that a worker says over one connection, which lasts as long as it does."""
        lease: Lease | None = None
        given: WeightsKey | None = None
        began = 0.0
        try:
            with connection:
                check_user(connection)
                while (received := _next(connection)) is not None:
                    message = received.message
                    lease = self._answer(connection, received, lease)
                    if isinstance(message, WeightsWanted) and lease is None:
                        given, began = message.key, time.monotonic()
        except (OSError, BadDescriptorFrame) as error:
            self.log.warning(f"a worker's connection ended: {error}")
        finally:
            if lease is not None:
                self.sets.end(lease)
            if given is not None and self.sets.ended(given, time.monotonic() - began):
                self.log.warning(
                    f"weights are given back: {MOST_EARLY_ENDS} workers in a row have ended within "
                    f"{OUTLIVED_SECONDS:.0f} s of mapping them",
                    model=given.model,
                )
            self._places_left.release()

    def _answer(
        self, connection: socket.socket, received: Received, lease: Lease | None
    ) -> Lease | None:
        """Returns the lease that the worker has from now on."""
        message = received.message
        if isinstance(message, WeightsWanted):
            close_all(received.descriptors)
            if lease is not None:
                self.sets.end(lease)
            return self._give(connection, message)
        if not isinstance(message, WeightsOffered):
            close_all(received.descriptors)
            raise BadDescriptorFrame(f"{type(message).__name__} is nothing that a worker says")
        held = HeldWeights(message.manifest, received.descriptors, message.num_bytes)
        refused = self.sets.offer(message.key, held)
        if lease is not None:
            self.sets.end(lease)
        key = message.key
        said = {"model": key.model, "place": key.place, "bytes": message.num_bytes}
        if refused:
            self.log.info(f"weights are not held: {refused}", **said)
        else:
            self.log.info("weights are held", **said)
        send(connection, WeightsTaken(refused))
        return None

    def _give(self, connection: socket.socket, wanted: WeightsWanted) -> Lease | None:
        found = self.sets.want(wanted.key, CHECK_SECONDS)
        while found is None:  # another worker loads them
            if _has_left(connection):
                return None
            found = self.sets.want(wanted.key, CHECK_SECONDS)
        if isinstance(found, Lease):
            try:
                send(connection, WeightsHeld())
            except BaseException:
                self.sets.end(found)
                raise
            return found
        try:
            send(connection, WeightsHeld(found.manifest), found.descriptors)
        finally:
            close_all(found.descriptors)
        return None

    # --- members

    def on_tick(self, now: float) -> None:
        self._release()
        held = self.sets.num_bytes
        self._places |= held.keys()
        for place in self._places:
            self.metrics.set("held_weights_bytes", held.get(place, 0), place)
        self.metrics.counter("held_weights_mapped_total").value = float(self.sets.served)
        self.report(self.metrics)

    def on_gone(self, gone: dict[int, Peer], now: float) -> None:
        """Called after each change of the membership, so of who sleeps, too."""
        self._release()

    def _release(self) -> None:
        known = self.participant
        asleep = [
            name
            for name, one in known.sleepers.items()
            if one.state in (Sleep.FALLING, Sleep.ASLEEP)
        ]
        for key in self.sets.release({*asleep, *known.withdrawn}):
            self.log.info("weights are given back", model=key.model, place=key.place)


def _listen(path: str) -> tuple[socket.socket, Callable[[], None]]:
    return listen_at(path, MODE, MOST_CONNECTIONS, "the holder's socket")


def _next(connection: socket.socket) -> Received | None:
    """The next message, whenever it comes; the rest of it within ``SECONDS``."""
    connection.settimeout(None)
    if not connection.recv(1, socket.MSG_PEEK):
        return None
    connection.settimeout(SECONDS)
    return receive(connection)


def _has_left(connection: socket.socket) -> bool:
    """Whether the other side has closed the connection, which says nothing meanwhile."""
    connection.setblocking(False)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(SECONDS)


def run(config: Config) -> int:
    """Run the holder until SIGTERM. Returns the exit code; raises ``AddressError``."""
    return HolderService(config).run()
