"""The one way to talk: every process owns one inbox, to send is to push to an address.

An inbox is a bound PULL socket with an address of its own, new at every start, so a restarted
process is never mistaken for its dead predecessor. Sends never block: what ZeroMQ does not take
at once waits in the peer's outbox, bounded in bytes; past the bound ``send`` says ``False``.

Not thread safe: one ``Mailbox`` a thread. Measured: a raw socket drained in one go costs 1 µs a
message, ``zmq.asyncio`` 12 µs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

import zmq

from penstock.protocol.process.faults import Faults
from penstock.protocol.wire import codec
from penstock.protocol.wire.addresses import AddressError, is_loopback
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.outbox import OUTBOX_BYTES, Sender, end_when_unanswered
from penstock.protocol.wire.security import (
    BAD_HANDSHAKE,
    CurveKeys,
    SecurityError,
    private_folder,
    safe_context,
)
from penstock.protocol.wire.strangers import EVENTS, Strangers

MAX_IPC_PATH = 107
"""Longest path of a Unix socket on Linux, without the final NUL."""
DRAIN_BUDGET = 256
"""Messages handled in one go before timers and other sockets get their turn."""
_TCP = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:.]+\]|[^:/\[\]\s]+)(:(\*|(?P<port>[0-9]{1,5})))?")


class Mailbox(Sender):
    """One inbox and an outbox for each peer.

    ``bind`` is ``ipc://FOLDER`` (a socket with a random name in it), an exact ``ipc://FILE.sock``,
    ``tcp://HOST`` (a free port, from ``ports`` when given) or an exact ``tcp://HOST:PORT``.
    """

    def __init__(
        self,
        bind: str,
        *,
        name: str = "inbox",
        advertise: str = "",
        ports: tuple[int, int] | None = None,
        keys: CurveKeys | None = None,
        incarnation: int | None = None,
        outbox_bytes: int = OUTBOX_BYTES,
        watch_disconnects: bool = False,
    ) -> None:
        super().__init__(
            safe_context(),
            incarnation or new_incarnation(),
            keys,
            outbox_bytes,
            BAD_HANDSHAKE | (zmq.EVENT_DISCONNECTED if watch_disconnects else 0),
        )
        self.received = 0
        """Frames taken from the inbox, whatever was in them."""
        self.malformed = 0
        self.faults: Faults | None = None
        """Set by tests only: messages to drop or to delay."""
        self.strangers: Strangers | None = None
        """On tcp with keys: who fails the handshake."""
        self._cleanup = contextlib.ExitStack()
        self._ownership = contextlib.ExitStack()
        """Ownership of the ipc path, which is given up last of all."""
        if bind.startswith("tcp://") and keys is not None:
            self._cleanup.enter_context(keys.admitted(self._context))
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.linger = 0
        self._inbox.maxmsgsize = codec.MAX_FRAME_BYTES
        try:
            self.address = self._bind(bind, name, advertise, ports)
        except BaseException:
            self.close()
            raise
        if bind.startswith("tcp://") and keys is not None:
            self.strangers = Strangers(self._monitor(self._inbox, EVENTS), self.address)

    def _bind(self, bind: str, name: str, advertise: str, ports: tuple[int, int] | None) -> str:
        if bind.startswith("ipc://"):
            path = Path(bind.removeprefix("ipc://"))
            if path.suffix != ".sock":
                path = path / f"{name}-{secrets.token_hex(6)}.sock"
            private_folder(path.parent)
            if len(os.fsencode(path)) > MAX_IPC_PATH:
                raise AddressError(
                    f"ipc path {path} is longer than {MAX_IPC_PATH} bytes; "
                    "choose a shorter --runtime-dir"
                )
            self._ownership.enter_context(_sole_owner(path))
            try:
                self._inbox.bind(f"ipc://{path}")
            except zmq.ZMQError as error:
                raise AddressError(f"cannot listen on ipc://{path}: {error}") from None
            return f"ipc://{path}"
        return self._bind_tcp(bind, advertise, ports)

    def _bind_tcp(self, bind: str, advertise: str, ports: tuple[int, int] | None) -> str:
        host, port = split_tcp(bind)
        if self._keys is not None:
            self._keys.protect_server(self._inbox)
        elif not is_loopback(host):
            raise SecurityError(
                f"{bind} is not a loopback address: set --secret (the same for all processes), "
                "so that only they may connect"
            )
        end_when_unanswered(self._inbox)
        self._inbox.ipv6 = host.startswith("[")
        where = f"cannot listen on {bind}"
        try:
            if port or ports is None:
                self._inbox.bind(f"tcp://{host}:{port or '*'}")
            else:
                where += f" at any port of {ports[0]}-{ports[1]} (--port-range)"
                self._inbox.bind_to_random_port(f"tcp://{host}", ports[0], ports[1] + 1, 1000)
        except (zmq.ZMQError, zmq.ZMQBindError) as error:
            raise AddressError(f"{where}: {error}") from None
        bound = self._inbox.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        return f"tcp://{advertise or host}:{bound}"

    @property
    def fd(self) -> int:
        """File descriptor for an event loop. Edge triggered: drain whole when it fires."""
        return int(self._inbox.getsockopt(zmq.FD))

    def wait(self, timeout_s: float) -> bool:
        """Block until a message is there or the time is over."""
        return bool(self._inbox.poll(max(0, round(timeout_s * 1000))))

    def drain(self, budget: int = DRAIN_BUDGET) -> Iterator[tuple[int, Message]]:
        """Yield (sender's incarnation, message) until the inbox or the budget is empty.

        Frames that do not decode are counted in ``malformed`` and dropped.
        """
        if self.faults is not None:
            yield from self.faults.late()
        receive = self._inbox.recv
        for _ in range(budget):
            try:
                frame = receive(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.received += 1
            try:
                sender, message = codec.decode(frame)
            except codec.MalformedFrame:
                self.malformed += 1
                continue
            if self.faults is None or self.faults.received(sender, message):
                yield sender, message

    def complaints(self) -> list[str]:
        """Handshakes that fail, those that we begin and those that others do, for the log."""
        theirs = self.strangers.complaints() if self.strangers is not None else []
        return super().complaints() + theirs

    def has_messages(self) -> bool:
        return bool(self._inbox.poll(0))

    def sender_only(self) -> Sender:
        """A second sender of the same process, for another thread. Close it before this."""
        return Sender(self._context, self.incarnation, self._keys, self._outbox_bytes)

    def close(self, linger_ms: int = 500) -> None:
        """Send what is left within ``linger_ms``, close every socket, remove the ipc file."""
        super().close(linger_ms)
        if self.strangers is not None:
            self._inbox.monitor(None, 0)
            self.strangers.close()
            self.strangers = None
        self._inbox.close(linger=0)
        self._cleanup.close()
        self._context.destroy(linger=linger_ms)
        self._ownership.close()


def split_tcp(address: str) -> tuple[str, int]:
    """``tcp://HOST[:PORT]`` as (host, port), 0 for any port. Raises ``AddressError``."""
    match = _TCP.fullmatch(address)
    if match is None or int(match["port"] or 0) > 65535:
        raise AddressError(
            f"address {address!r}: expected ipc://PATH or tcp://HOST[:PORT], PORT at most 65535"
        )
    return match["host"], int(match["port"] or 0)


@contextlib.contextmanager
def _sole_owner(path: Path) -> Iterator[None]:
    """Hold a lock beside ``path``: ZeroMQ lets a second bind of an ipc path steal it."""
    lock = path.with_suffix(".lock")
    descriptor = _lock(lock, path)
    try:
        yield
        path.unlink(missing_ok=True)
        lock.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _lock(lock: Path, path: Path) -> int:
    """An open descriptor that holds the lock. Raises ``AddressError`` when another process does."""
    while True:
        descriptor = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The former owner may have removed the file that we opened: then the lock is of no use.
            if os.path.samestat(os.fstat(descriptor), os.stat(lock)):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise AddressError(
                f"ipc://{path} is in use by another process; stop it or choose another address"
            ) from None
        except FileNotFoundError:
            pass
        os.close(descriptor)


def new_incarnation() -> int:
    """A number for one life of one process: 63 random bits, never 0."""
    return secrets.randbits(63) | 1
