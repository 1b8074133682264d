"""The bytes of a WebSocket: what is told goes out, and what comes in is held against a budget.

aiohttp writes to the same transport; both write whole messages.
"""

from __future__ import annotations

import asyncio
import logging

from penstock.services.frontend.backlog import Share
from penstock.services.frontend.body import READ_TIMEOUT_S, BodyBudget
from penstock.services.frontend.connection import Connection
from penstock.services.frontend.errors import ApiError
from penstock.services.frontend.stream import HOLD_BYTES
from penstock.services.frontend.websockets.messages import PING

PING_SECONDS = 30.0
MOST_WAITING_BYTES = 1024 * 1024
"""Of what is told beside the streams of responses, which have limits of their own."""
_FRAME_BYTES = 14
"""The header of a client's frame, at most."""
_SMALL_BYTES = 4096
"""What pongs and beginnings of frames may leave unaccounted."""
_POLL_S = 0.02

_log = logging.getLogger("penstock.frontend")


class Socket:
    """The connection below a session: what it writes, and what it holds of the client's bytes."""

    def __init__(
        self,
        connection: Connection,
        budget: BodyBudget,
        stall_s: float,
        log_fields: dict[str, str],
    ) -> None:
        """budget: for messages that have not come whole. stall_s: a client that takes nothing for
        so many seconds is cut off. log_fields: what stands in every log line about it."""
        if connection.transport is None:
            raise ConnectionResetError("The client closed the connection")
        self.transport: asyncio.Transport = connection.transport
        self._connection = connection
        self._budget = budget
        self._stall_s = stall_s
        self._log_fields = log_fields
        self._loop = asyncio.get_running_loop()
        self._told = Share()
        """What is told beside streams, of what waits on the transport."""
        self._unread = 0
        """Bytes that have come of messages that nobody has read."""
        self._since = 0.0
        """When the first of them came."""
        self._timer: asyncio.TimerHandle | None = None
        connection.on_bytes = self._came
        self._tick()

    def write(self, messages: bytes) -> None:
        """Send whole messages at once, which belong to no stream."""
        if self.transport.is_closing():
            return
        waits = self.transport.get_write_buffer_size()
        if (told := self._told.of(waits)) > MOST_WAITING_BYTES:
            self.cut(f"{told} bytes wait for it; {MOST_WAITING_BYTES} may")
            return
        self._told.add(len(messages), waits)
        self.transport.write(messages)

    def write_end(self, messages: bytes) -> None:
        """Send what ends a stream: it has waited for its reader already."""
        if not self.transport.is_closing():
            self.transport.write(messages)

    def read(self, size: int) -> None:
        """A message of so many bytes was read. The few that are left are answers to pings, which
        nobody reads: in hours they would look like a message that never comes whole."""
        freed = min(self._unread, size + _FRAME_BYTES)
        if self._unread - freed <= _SMALL_BYTES:
            freed = self._unread
        self._unread -= freed
        self._budget.used -= freed
        self._since = self._loop.time()

    @property
    def is_receiving(self) -> bool:
        """Whether a message is on its way, of which more has come than pongs may leave."""
        return self._unread > _SMALL_BYTES

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
        _log.warning("a reader is cut off: %s", reason, extra=self._log_fields)
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
        if self.is_receiving and now - self._since > READ_TIMEOUT_S:
            self.cut(f"a message did not arrive within {READ_TIMEOUT_S:.0f} s")
            return
        if not self.transport.is_closing():
            self.transport.write(PING)
        self._timer = self._loop.call_later(PING_SECONDS, self._tick)
