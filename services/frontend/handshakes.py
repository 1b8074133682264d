"""TLS handshakes of HTTP: counted among the connections, and each as short as a header must be.

asyncio's own server tells nobody of a connection before its handshake has ended, and lets it take
a minute. So connections are accepted here, and become asyncio's with the handshake.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiohttp import web

from penstock.services.frontend.tls import Certificates

if TYPE_CHECKING:
    from penstock.services.frontend.connection import Server

TURNED_AWAY = 32
"""Handshakes beyond the limit of connections at the same time, of those who are told then that it
is reached; who comes beyond that is told nothing."""
ACCEPTED_AT_ONCE = 16
"""The rest waits for a turn of the event loop, in which another frontend may take it."""
PAUSE_SECONDS = 1.0
"""After a connection that could not be accepted: mostly files are lacking."""


class Handshakes:
    def __init__(self, server: Server, certificates: Certificates) -> None:
        self._server = server
        self._certificates = certificates
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def count(self) -> int:
        """How many run."""
        return len(self._tasks)

    def take(self, connection: socket.socket) -> None:
        """Begin the handshake of an accepted connection; what comes of it is the server's."""
        server = self._server
        if server.open + self.count >= server.limits.connections + TURNED_AWAY:
            connection.close()
            return
        task = asyncio.get_running_loop().create_task(self._shake(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _shake(self, connection: socket.socket) -> None:
        seconds = self._server.limits.header_s
        with contextlib.suppress(OSError):  # it speaks no TLS, is too slow, or has left
            await asyncio.get_running_loop().connect_accepted_socket(
                self._server,
                connection,
                ssl=self._certificates.pair.context,
                ssl_handshake_timeout=seconds,
                ssl_shutdown_timeout=seconds,
            )

    async def end(self) -> None:
        """Cut what has not ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class AcceptingSite(web.BaseSite):
    """A listening socket whose connections are accepted here: for handshakes, and on a UNIX socket,
    which some event loops would remove when one of several processes closes it."""

    def __init__(
        self,
        runner: web.BaseRunner,
        listener: socket.socket,
        take: Callable[[socket.socket], None],
        *,
        backlog: int,
    ) -> None:
        """``take``: of an accepted connection."""
        super().__init__(runner, backlog=backlog)
        self._listener = listener
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None

    @property
    def name(self) -> str:
        if self._listener.family == socket.AF_UNIX:
            return f"unix:{self._listener.getsockname()}"
        host, port = self._listener.getsockname()[:2]
        return f"https://{host}:{port}"

    async def start(self) -> None:
        await super().start()
        self._listener.setblocking(False)
        self._listener.listen(self._backlog)
        self._listen()

    def _listen(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError:
                self._loop.remove_reader(self._listener)
                self._pause = self._loop.call_later(PAUSE_SECONDS, self._listen)
                return
            connection.setblocking(False)
            self._take(connection)

    async def stop(self) -> None:
        """Accept nothing more; what has been accepted goes on."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        await super().stop()
