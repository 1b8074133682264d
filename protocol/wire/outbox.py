"""Frames on their way to other processes: an outbox for each peer, bounded in bytes.

Sends never block: what ZeroMQ does not take at once waits in the peer's outbox; past the bound
``send`` says ``False``.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import deque

import zmq
from zmq.utils.monitor import parse_monitor_message

from penstock.protocol.wire import codec
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.security import CurveKeys, handshake_complaint

OUTBOX_BYTES = 64 * 1024 * 1024
RETRY_SECONDS = (0.002, 0.25)
"""How soon an outbox that ZeroMQ did not take is tried again: at first, and in the long run;
between them after a sixteenth of the time that it has waited."""
_SEND_HIGH_WATER = 1000
_BIG_FRAME_BYTES = 16 * 1024
"""ZeroMQ's high-water mark counts frames, not bytes: frames from this size on are counted here."""
_MAX_CLOSED = 4096
_UNANSWERED_MS = 5000
"""A tcp connection ends when the other host is silent for so long. Without this, a host that lost
power would be sent to for a quarter of an hour, and its successor under the same name would not."""
_FAILED_HANDSHAKES = 3
"""A peer that ends in the middle of a handshake looks like a wrong secret, but only once."""


def end_when_unanswered(socket: zmq.Socket[bytes]) -> None:
    """Let the kernel end this socket's tcp connections when the other host is gone, also idle
    ones: those it asks once a second after three seconds of silence."""
    socket.setsockopt(zmq.TCP_MAXRT, _UNANSWERED_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, _UNANSWERED_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 3)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)


class Outbox:
    """Frames on their way to one peer; ``limit`` bounds the bytes that wait here or in ZeroMQ."""

    def __init__(self, socket: zmq.Socket[bytes], limit: int) -> None:
        self.socket = socket
        self.limit = limit
        self.waiting: deque[bytes] = deque()
        self.waiting_bytes = 0
        self.stalled_at = 0.0
        """Monotonic time since which nothing that waits has moved."""
        self.monitor: zmq.Socket[bytes] | None = None
        self.failed_handshakes = 0
        self.complained = False
        self._big: deque[tuple[zmq.MessageTracker, int]] = deque()
        """Big frames that ZeroMQ holds, with their sizes."""
        self._big_bytes = 0

    def push(self, frame: bytes) -> bool:
        """Send or queue; ``False`` when the queue is full and the frame is dropped."""
        if not self.waiting and self._hand_over(frame):
            return True
        if self.waiting_bytes + self._big_bytes + len(frame) > self.limit:
            return False
        if not self.waiting:
            self.stalled_at = time.monotonic()
        self.waiting.append(frame)
        self.waiting_bytes += len(frame)
        return True

    def _hand_over(self, frame: bytes) -> bool:
        try:
            if len(frame) < _BIG_FRAME_BYTES:
                self.socket.send(frame, zmq.NOBLOCK)
                return True
            while self._big and self._big[0][0].done:
                self._big_bytes -= self._big.popleft()[1]
            if self._big_bytes + len(frame) > self.limit:
                return False
            tracker = self.socket.send(frame, zmq.NOBLOCK, copy=False, track=True)
            self._big.append((tracker, len(frame)))
            self._big_bytes += len(frame)
            return True
        except zmq.Again:
            return False

    def flush(self) -> bool:
        """Send what waits; ``True`` when nothing is left."""
        while self.waiting:
            if not self._hand_over(self.waiting[0]):
                return False
            self.waiting_bytes -= len(self.waiting.popleft())
            self.stalled_at = time.monotonic()
        return True

    def close(self, linger_ms: int) -> None:
        if self.monitor is not None:
            self.socket.monitor(None, 0)
            self.monitor.close(linger=0)
        self.socket.close(linger=linger_ms)


class Sender:
    """An outbox for each peer, without an inbox. ``Mailbox`` adds one."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        incarnation: int,
        keys: CurveKeys | None,
        outbox_bytes: int = OUTBOX_BYTES,
        watch: int = 0,
    ) -> None:
        self.incarnation = incarnation
        self.sent = 0
        """Frames that went out or wait for their peer, …"""
        self.sent_bytes = 0
        """… and their length."""
        self.refused = 0
        """Frames dropped: the outbox was full, the frame too long or the address nonsense."""
        self._context = context
        self._keys = keys
        self._encode = codec.Encoder(incarnation)
        self._outbox_bytes = outbox_bytes
        self._outboxes: dict[str, Outbox] = {}
        self._blocked: dict[str, Outbox] = {}
        self._closed: dict[str, None] = {}
        """Addresses of peers that are gone, in order; never dialled again."""
        self._watch = watch
        """ZeroMQ's events of connections to watch. Whoever watches must also ask for them."""
        self._broken: list[str] = []
        self._complaints: list[str] = []

    def send(self, address: str, message: Message) -> bool:
        """Push a message; ``False`` when it is dropped, because the peer's outbox is full."""
        return self.send_frame(address, self._encode(message))

    def send_frame(self, address: str, frame: bytes) -> bool:
        outbox = self._outboxes.get(address)
        if outbox is None:
            if address in self._closed:
                return False
            outbox = self._connect(address)
        # The receiver of a frame over its limit cuts the connection, and with it all the others.
        if outbox is None or len(frame) > codec.MAX_FRAME_BYTES or not outbox.push(frame):
            self.refused += 1
            return False
        self.sent += 1
        self.sent_bytes += len(frame)
        if outbox.waiting:
            self._blocked[address] = outbox
        return True

    def send_last(self, address: str, message: Message, linger_ms: int = 1000) -> None:
        """Say one thing to a process that is no peer (refused, fenced), and hang up."""
        socket = self._open_socket(address)
        socket.linger = linger_ms
        with contextlib.suppress(zmq.ZMQError):
            socket.connect(address)
            socket.send(self._encode(message), zmq.NOBLOCK)
        socket.close()

    def _open_socket(self, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PUSH)
        socket.linger = 0
        socket.ipv6 = "[" in address
        if address.startswith("tcp://") and self._keys is not None:
            self._keys.protect_client(socket)
        return socket

    def _connect(self, address: str) -> Outbox | None:
        socket = self._open_socket(address)
        socket.immediate = True
        socket.sndhwm = _SEND_HIGH_WATER
        socket.reconnect_ivl = 100
        socket.reconnect_ivl_max = 1000
        if address.startswith("tcp://"):
            end_when_unanswered(socket)
        outbox = Outbox(socket, self._outbox_bytes)
        events = self._watch & (-1 if address.startswith("tcp://") else zmq.EVENT_DISCONNECTED)
        if events:
            outbox.monitor = self._monitor(socket, events)
        try:
            socket.connect(address)
        except zmq.ZMQError:
            outbox.close(0)
            return None
        self._outboxes[address] = outbox
        return outbox

    def flush(self) -> bool:
        """Try again what ZeroMQ did not take; ``True`` when nothing waits in any outbox."""
        for address, outbox in list(self._blocked.items()):
            if outbox.flush():
                del self._blocked[address]
        return not self._blocked

    def retry_s(self) -> float:
        """Seconds until another ``flush`` is worth it: a peer long gone is asked less often."""
        soon, late = RETRY_SECONDS
        now = time.monotonic()
        stalled = min((now - outbox.stalled_at for outbox in self._blocked.values()), default=0.0)
        return min(max(soon, stalled / 16), late)

    def outbox_bytes(self, address: str | None = None) -> int:
        """Bytes that wait for one peer, or for all."""
        if address is not None:
            outbox = self._outboxes.get(address)
            return outbox.waiting_bytes if outbox else 0
        return sum(outbox.waiting_bytes for outbox in self._blocked.values())

    def forget(self, address: str, linger_ms: int = 0) -> None:
        """The peer is gone: close its outbox for good; what waits there is lost."""
        self._closed[address] = None
        if len(self._closed) > _MAX_CLOSED:
            del self._closed[next(iter(self._closed))]
        self._blocked.pop(address, None)
        outbox = self._outboxes.pop(address, None)
        if outbox is not None:
            outbox.close(linger_ms)

    def _monitor(self, socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
        """Events of ``socket``; unbounded, because ZeroMQ's I/O thread blocks on a full one."""
        endpoint = f"inproc://monitor-{secrets.token_hex(8)}"
        socket.monitor(endpoint, events)
        monitor = self._context.socket(zmq.PAIR)
        monitor.rcvhwm = 0
        monitor.connect(endpoint)
        return monitor

    def _read_monitors(self) -> None:
        for address, outbox in self._outboxes.items():
            while outbox.monitor is not None:
                try:
                    event = parse_monitor_message(outbox.monitor.recv_multipart(zmq.NOBLOCK))
                except zmq.Again:
                    break
                if event["event"] == zmq.EVENT_DISCONNECTED:
                    self._broken.append(address)
                    continue
                vague = event["event"] == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
                outbox.failed_handshakes += 1 if vague else _FAILED_HANDSHAKES
                if outbox.failed_handshakes >= _FAILED_HANDSHAKES and not outbox.complained:
                    outbox.complained = True
                    self._complaints.append(handshake_complaint(address, self._keys))

    def disconnected(self) -> list[str]:
        """Addresses whose connection broke since the last call (``watch_disconnects`` only)."""
        self._read_monitors()
        broken, self._broken = self._broken, []
        return broken

    def complaints(self) -> list[str]:
        """Peers on tcp that refuse our handshake or fail theirs, each told once, for the log."""
        self._read_monitors()
        complaints, self._complaints = self._complaints, []
        return complaints

    def reopen(self, address: str) -> None:
        """The peer that was forgotten there is alive after all: the router says so."""
        self._closed.pop(address, None)

    def close(self, linger_ms: int = 500) -> None:
        """Send what is left within ``linger_ms`` and close every outbox."""
        deadline = time.monotonic() + linger_ms / 1000
        while not self.flush() and time.monotonic() < deadline:
            time.sleep(RETRY_SECONDS[0])
        rest_ms = max(0, round((deadline - time.monotonic()) * 1000))
        for address in list(self._outboxes):
            self.forget(address, rest_ms)
