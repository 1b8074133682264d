"""The bytes of a WebSocket: events become messages, and what comes in is held against a budget.

aiohttp shakes hands, reads frames and answers pings; events are written to the transport as those
of a stream over HTTP are, once in a turn of the event loop. Both write whole frames.
"""

from __future__ import annotations

import asyncio
import logging
import struct

from penstock.services.frontend.body import READ_TIMEOUT_S, BodyBudget
from penstock.services.frontend.connection import Connection
from penstock.services.frontend.errors import ApiError
from penstock.services.frontend.stream import HOLD_BYTES, EventStream

PING_SECONDS = 30.0
MOST_WAITING_BYTES = 1024 * 1024
"""Of what is told beside the streams of responses, which have limits of their own."""
_FRAME_BYTES = 14
"""The header of a client's frame, at most."""
_SMALL_BYTES = 4096
"""What pongs and beginnings of frames may leave unaccounted."""
_PING = b"\x89\x00"
_POLL_S = 0.02

_log = logging.getLogger("penstock.frontend")


def frames_of(lines: bytes) -> bytes:
    """A message for each line; RFC 6455, section 5.2: text, whole, not masked."""
    found = []
    for line in lines.splitlines():
        size = len(line)
        if size < 126:
            found.append(struct.pack(">BB", 0x81, size))
        elif size < 65_536:
            found.append(struct.pack(">BBH", 0x81, 126, size))
        else:
            found.append(struct.pack(">BBQ", 0x81, 127, size))
        found.append(line)
    return b"".join(found)


class SocketStream(EventStream):
    """The events of one response on a connection that may carry several."""

    def _framed(self, payload: bytes) -> bytes:
        return frames_of(payload) or _PING


class Socket:
    """The connection below a session: what it writes, and what it holds of the client's bytes."""

    def __init__(
        self, connection: Connection, budget: BodyBudget, stall_s: float, request_id: str
    ) -> None:
        """budget: for messages that have not come whole. stall_s: a client that takes nothing for
        so many seconds is cut off."""
        if connection.transport is None:
            raise ConnectionResetError("The client closed the connection")
        self.transport: asyncio.Transport = connection.transport
        self._connection = connection
        self._budget = budget
        self._stall_s = stall_s
        self._request_id = request_id
        self._loop = asyncio.get_running_loop()
        self._unread = 0
        """Bytes that have come of messages that nobody has read."""
        self._since = 0.0
        """When the first of them came."""
        self._timer: asyncio.TimerHandle | None = None
        connection.on_bytes = self._came
        self._tick()

    def write(self, lines: bytes) -> None:
        """Send events at once."""
        if self.transport.is_closing():
            return
        waits = self.transport.get_write_buffer_size()
        if waits > MOST_WAITING_BYTES:
            self.cut(f"{waits} bytes wait for it")
        else:
            self.transport.write(frames_of(lines))

    def read(self, size: int) -> None:
        """A message of so many bytes was read."""
        freed = min(self._unread, size + _FRAME_BYTES)
        self._unread -= freed
        self._budget.used -= freed
        self._since = self._loop.time()

    async def writable(self) -> None:
        """Wait until the client has taken most of what was sent: who does not read is not read."""
        since, last = self._loop.time(), 0
        while (waits := self.transport.get_write_buffer_size()) > HOLD_BYTES:
            if waits < last:
                since = self._loop.time()
            last = waits
            if self._loop.time() - since > self._stall_s:
                self.cut(f"it took nothing for {self._stall_s:g} s; {waits} bytes wait")
                return
            await asyncio.sleep(_POLL_S)

    def cut(self, reason: str) -> None:
        _log.warning("a reader is cut off: %s", reason, extra={"id": self._request_id})
        self.transport.abort()

    def close(self) -> None:
        """Nothing more is read or written. Idempotent."""
        self._connection.on_bytes = None
        self._budget.used -= self._unread
        self._unread = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _came(self, size: int) -> None:
        if self._unread < _SMALL_BYTES:
            self._since = self._loop.time()
        try:
            self._budget.take(size)
        except ApiError as full:
            self.cut(full.message)
            return
        self._unread += size

    def _tick(self) -> None:
        """Keep the connection alive for proxies, and end one whose message never comes whole."""
        now = self._loop.time()
        if self._unread > _SMALL_BYTES and now - self._since > READ_TIMEOUT_S:
            self.cut(f"a message did not arrive within {READ_TIMEOUT_S:.0f} s")
            return
        if not self.transport.is_closing():
            self.transport.write(_PING)
        self._timer = self._loop.call_later(PING_SECONDS, self._tick)
