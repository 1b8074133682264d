"""How the ranks of one engine on several hosts reach each other: encrypted, by the shared secret.

Torch's own connections (gloo, its store) are neither encrypted nor authenticated, and its builds
for Linux have no TLS. So ranks whose processes talk over tcp send tensors through sockets of their
own, with the same CURVE keys as all other messages: a stranger neither joins nor reads. Each rank
has one inbox, whose address it keeps for its life, and an outlet to each other rank, new in each
meeting. A thread reads: it hands on what comes and ends all waiting when a connection breaks.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import threading
from collections import deque

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from penstock.protocol.wire.addresses import AddressError
from penstock.protocol.wire.outbox import end_when_unanswered
from penstock.protocol.wire.security import (
    BAD_HANDSHAKE,
    CurveKeys,
    handshake_complaint,
    safe_context,
)
from penstock.protocol.wire.strangers import EVENTS, Strangers

ANYBODY = -1
"""In place of a sender: whoever it was."""
FORMER_MEETINGS = 64
"""What still comes for one of so many latest meetings is dropped."""
_JOIN, _PEERS = "join", "peers"


class RankFailed(RuntimeError):
    """Another rank is gone, or does not answer."""


class _Head(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What stands ahead of the bytes."""

    meeting: str
    sender: int
    lane: str
    """What the bytes are for; within a lane they arrive in the order in which they were sent."""


Inbox = tuple[str, int, str]
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Head).decode


class RankLinks:
    """One rank's end. ``send`` and ``receive`` may be called from several threads."""

    def __init__(
        self, bind: str, host: str, *, keys: CurveKeys | None, ports: tuple[int, int] | None = None
    ) -> None:
        """bind: the interface, without ``tcp://``; host: where the others reach this process.
        Raises ``AddressError``."""
        self._keys = keys
        self._context = safe_context()
        self._cleanup = contextlib.ExitStack()
        if keys is not None:
            self._cleanup.enter_context(keys.admitted(self._context))
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.linger = 0
        self._inbox.rcvhwm = 0
        self._inbox.ipv6 = bind.startswith("[")
        if keys is not None:
            keys.protect_server(self._inbox)
        end_when_unanswered(self._inbox)
        self.address = f"{host}:{_bound(self._inbox, bind, ports)}"
        """``host:port``"""
        self.host = host
        self._strangers = Strangers(self._monitor(self._inbox, EVENTS), f"tcp://{self.address}")
        self._lock = threading.Lock()
        self._outlets: dict[int, zmq.Socket[bytes]] = {}
        self._watched: dict[zmq.Socket[bytes], int] = {}
        """Monitors of the outlets, and to which rank each leads."""
        self._retired: list[zmq.Socket[bytes]] = []
        """Monitors that the reader closes: it may be looking at them."""
        self._lanes: dict[Inbox, queue.SimpleQueue[bytes | None]] = {}
        self._name = ""
        self._rank = 0
        self._over: deque[str] = deque(maxlen=FORMER_MEETINGS)
        self._lost = ""
        """Why the present meeting is over."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False
        self._reader = threading.Thread(target=self._read, name="ranks", daemon=True)
        self._reader.start()

    def meet(self, name: str, first: str, rank: int, size: int, limit_s: float) -> None:
        """Connect all ranks of a group with each other. name: of the meeting, unlike any other's;
        first: the address of rank 0. Raises ``RankFailed`` where they do not come within
        ``limit_s`` seconds; it then says why, as far as that is known."""
        self._begin(name, rank)
        if rank:
            self._open(0, first)
            self.send(0, _JOIN, self.address.encode())
            told = msgspec.msgpack.decode(self.receive(0, _PEERS, limit_s), type=list[str])
            for peer in range(1, size):
                if peer != rank:
                    self._open(peer, told[peer])
            return
        addresses = [self.address]
        for peer in range(1, size):
            addresses.append(self.receive(peer, _JOIN, limit_s).decode())
            self._open(peer, addresses[peer])
        for peer in range(1, size):
            self.send(peer, _PEERS, msgspec.msgpack.encode(addresses))

    def send(self, rank: int, lane: str, data: bytes | memoryview, *, named: bool = True) -> None:
        """Raises ``RankFailed`` where a rank is gone. named: as coming from this rank, else from
        ``ANYBODY``."""
        head = _encode(_Head(self._name, self._rank if named else ANYBODY, lane))
        with self._lock:
            if self._lost:
                raise RankFailed(self._lost)
            self._outlets[rank].send_multipart([head, data])

    def receive(self, rank: int, lane: str, limit_s: float) -> bytes:
        """The next bytes of a lane. Raises ``RankFailed``."""
        key = (self._name, rank, lane)
        waiting = self._lane(key)
        if self._lost and waiting.empty():
            raise RankFailed(self._lost)
        try:
            found = waiting.get(timeout=limit_s)
        except queue.Empty:
            who = f"rank {rank}" if rank != ANYBODY else "another rank"
            raise RankFailed(f"{who} has sent nothing for {limit_s:g} s") from None
        if found is None:
            waiting.put(None)
            raise RankFailed(self._lost)
        return found

    def complaints(self) -> list[str]:
        """Who was refused at the inbox, for the log."""
        with self._lock:
            return self._strangers.complaints()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        os.eventfd_write(self._wake, 1)
        self._reader.join(2.0)
        self._end_outlets()
        for monitor in self._retired:
            monitor.close(linger=0)
        self._inbox.monitor(None, 0)
        self._strangers.close()
        self._inbox.close(linger=0)
        self._cleanup.close()
        self._context.destroy(linger=0)
        os.close(self._wake)

    # --- connections

    def _begin(self, name: str, rank: int) -> None:
        with self._lock:
            self._end_outlets()
            if self._name:
                self._over.append(self._name)
            self._name, self._rank, self._lost = name, rank, ""
            for key in [key for key in self._lanes if key[0] in self._over]:
                del self._lanes[key]
        os.eventfd_write(self._wake, 1)

    def _open(self, rank: int, address: str) -> None:
        outlet = self._context.socket(zmq.PUSH)
        outlet.linger = 0
        outlet.ipv6 = address.startswith("[")
        outlet.sndhwm = 0  # ranks go in step: what is under way is bounded by that
        outlet.reconnect_ivl = 100
        outlet.reconnect_ivl_max = 1000
        end_when_unanswered(outlet)
        if self._keys is not None:
            self._keys.protect_client(outlet)
        monitor = self._monitor(outlet, zmq.EVENT_DISCONNECTED | BAD_HANDSHAKE)
        outlet.connect(f"tcp://{address}")
        with self._lock:
            self._outlets[rank] = outlet
            self._watched[monitor] = rank
        os.eventfd_write(self._wake, 1)

    def _end_outlets(self) -> None:
        for outlet in self._outlets.values():
            outlet.monitor(None, 0)
            outlet.close(linger=0)
        self._retired += self._watched
        self._outlets, self._watched = {}, {}

    def _monitor(self, socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
        endpoint = f"inproc://monitor-{secrets.token_hex(8)}"
        socket.monitor(endpoint, events)
        monitor = self._context.socket(zmq.PAIR)
        monitor.rcvhwm = 0  # ZeroMQ's I/O thread blocks on a full one
        monitor.connect(endpoint)
        return monitor

    # --- the thread that reads

    def _read(self) -> None:
        while not self._closed:
            poller = zmq.Poller()
            with self._lock:
                watched, retired = list(self._watched), self._retired
                self._retired = []
            for monitor in retired:
                monitor.close(linger=0)
            for one in (self._inbox, self._wake, self._strangers.fd, *watched):
                poller.register(one, zmq.POLLIN)
            self._read_until_woken(poller)

    def _read_until_woken(self, poller: zmq.Poller) -> None:
        while not self._closed:
            for ready, _ in poller.poll():
                if ready == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                    return
                if ready is self._inbox:
                    self._take_all()
                elif ready == self._strangers.fd:
                    with self._lock:  # soon: later their hosts are no longer known
                        self._strangers.read()
                else:
                    self._take_event(ready)

    def _take_all(self) -> None:
        while True:
            try:
                frames = self._inbox.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                head, data = frames
                known = _decode(head)
            except (ValueError, msgspec.DecodeError):
                continue
            if known.meeting not in self._over:
                self._lane((known.meeting, known.sender, known.lane)).put(data)

    def _take_event(self, monitor: zmq.Socket[bytes]) -> None:
        with self._lock:
            rank = self._watched.get(monitor)
            if rank is None:
                return
            event = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))
            if event["event"] & BAD_HANDSHAKE:
                where = self._outlets[rank].getsockopt_string(zmq.LAST_ENDPOINT)
                self._lose(handshake_complaint(where, self._keys))
            else:
                self._lose(f"rank {rank} is gone: its connection has ended")

    def _lose(self, reason: str) -> None:
        """Nobody waits any longer for a meeting that has lost a rank."""
        if self._lost:
            return
        self._lost = reason
        for key, waiting in list(self._lanes.items()):
            if key[0] == self._name:
                waiting.put(None)

    def _lane(self, key: Inbox) -> queue.SimpleQueue[bytes | None]:
        return self._lanes.setdefault(key, queue.SimpleQueue())


def _bound(inbox: zmq.Socket[bytes], host: str, ports: tuple[int, int] | None) -> int:
    """Bind the inbox. Returns the port."""
    try:
        if ports is None:
            inbox.bind(f"tcp://{host}:*")
        else:
            inbox.bind_to_random_port(f"tcp://{host}", ports[0], ports[1] + 1, 1000)
    except (zmq.ZMQError, zmq.ZMQBindError) as error:
        among = f" at any port of {ports[0]}-{ports[1]} (--port-range)" if ports else ""
        raise AddressError(
            f"cannot listen to the other ranks of the engine on {host}{among}: {error}; --bind "
            "names another interface"
        ) from None
    return int(inbox.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
