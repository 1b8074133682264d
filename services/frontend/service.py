"""The frontend's process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import socket
import time

from aiohttp import web

from penstock.client.gateway import PipelineGateway
from penstock.protocol.config import Config
from penstock.protocol.process.async_service import AsyncService
from penstock.protocol.process.metrics import Registry
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.mailbox import AddressError
from penstock.protocol.wire.messages.membership import Identity, Peer, Phase
from penstock.protocol.wire.syn_filter import take_no_more_connections
from penstock.services.frontend.app import BACKLOG, make_app, start
from penstock.services.frontend.connection import ConnectionLimits
from penstock.services.frontend.context import CONTEXT
from penstock.services.frontend.dialects.registry import load_dialects
from penstock.services.frontend.dialects.responses.state import RESPONSES
from penstock.services.frontend.open_files import connection_limit

JOIN_SECONDS = 10.0
LAST_WORDS_SECONDS = 0.1
LINGER_SECONDS = 1.0
"""Seconds that a draining frontend answers on open connections, with ``Connection: close``."""
LAST_CONNECTIONS_SECONDS = 0.25
"""Seconds after its port was closed that it looks for connections still in their handshake."""


class FrontendService(AsyncService):
    """HTTP on one side, the pipeline on the other."""

    name = "frontend"
    _listener: socket.socket

    def __init__(self, config: Config, listen_fd: int | None = None) -> None:
        self._inherited: socket.socket | None = None
        if listen_fd is not None:
            self._inherited = socket.socket(fileno=listen_fd)
        super().__init__(config)
        self.metrics = Registry()
        self._dialects = load_dialects()
        self.gateway = PipelineGateway(
            self.mailbox,
            self.participant,
            self.config.admission,
            self.config.server.expected_models,
        )
        self._runner: web.AppRunner | None = None
        self._app: web.Application | None = None
        self._closing: asyncio.Task[None] | None = None
        self._closed_at = math.inf
        """When the port was closed."""

    def _http_address(self) -> str:
        if self._inherited is not None:
            host, port = self._inherited.getsockname()[:2]
            return f"{host}:{port}"
        return f"{self.config.server.host}:{self.config.server.port}"

    def identity(self) -> Identity:
        return Identity(os.getpid(), socket.gethostname(), http=self._http_address())

    async def start(self) -> None:
        app = self._app = make_app(self.config.server, self.gateway, self.metrics, self._dialects)
        self._listener = self._inherited or await self._listen()
        self._runner = await start(app, self._listener, ConnectionLimits(connection_limit()))
        gc.collect()
        gc.freeze()
        self.set_phase(Phase.READY)

    async def _listen(self) -> socket.socket:
        """Bind the port; share it only with another frontend of the same server.

        Raises ``AddressError`` when somebody else holds it.
        """
        server = self.config.server
        try:
            return _bind(server.host, server.port, share=False)
        except OSError as error:
            refusal = AddressError(
                f"cannot listen on {server.host}:{server.port}: {error.strerror or error}; "
                "choose another --port"
            )
        deadline = time.monotonic() + JOIN_SECONDS
        while not self.participant.joined and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        mine = self.participant.of("frontend")
        here = socket.gethostname()
        if any(p.identity.http == self._http_address() and p.identity.host == here for p in mine):
            return _bind(server.host, server.port, share=True)
        raise refusal

    async def stop(self) -> None:
        """What is still open ends with an error that says why, not with a cut connection."""
        if left := len(self.gateway.ledger.open):
            self.log.warning("requests ended unfinished: the server goes down", requests=left)
        self.gateway.end_all()
        if self._runner is not None:
            await asyncio.sleep(LAST_WORDS_SECONDS)
            await self._runner.cleanup()

    def on_message(self, sender: int, message: Message, now: float) -> None:
        if not self.gateway.handle(sender, message, now):
            self.metrics.inc("dropped_messages_total", "unexpected")

    def on_gone(self, gone: dict[int, Peer], now: float) -> None:
        self.gateway.peers_gone(gone, now)

    def on_tick(self, now: float) -> None:
        self.gateway.tick(now)
        self.metrics.set("queue_depth", len(self.gateway.ledger.open), "frontend")
        self.report(self.metrics)
        if self.gateway.is_draining:
            self._tell_open()

    def _tell_open(self) -> None:
        """How many requests a draining frontend waits for: the launcher tells its user."""
        self.status.load = len(self.gateway.ledger.open)
        self.status.note = f"{self.status.load} requests open"

    def on_drain(self) -> None:
        self.gateway.is_draining = True
        self._tell_open()
        if self._app is not None:
            self._app[RESPONSES].drain()
        if self._runner is not None:
            self._closing = self.loop.create_task(self._close_port(self._runner))

    async def _close_port(self, runner: web.AppRunner) -> None:
        """Listen no more; who has connected by then is served all the same.

        A socket that others share stays open with them, or with the launcher, unless that ends
        everything: then it has seen to it that no more connections come.
        """
        with self._listener.dup() as rest:
            rest.setblocking(False)
            if self._inherited is None:
                take_no_more_connections(rest)
            for site in list(runner.sites):
                await site.stop()
            last = self.loop.time() + LAST_CONNECTIONS_SECONDS
            while runner.server is not None:
                if (connection := _accepted(rest)) is not None:
                    with contextlib.suppress(OSError):  # its client is gone again
                        await self.loop.connect_accepted_socket(runner.server, connection)
                elif self.loop.time() < last:
                    await asyncio.sleep(0.01)
                else:
                    break  # and close it at once: nothing has come since the last look
        self._closed_at = time.monotonic()

    def drained(self) -> bool:
        if self._app is None or self._runner is None:
            return True
        if self.gateway.ledger.open or self._app[CONTEXT].active:
            return False
        if time.monotonic() - self._closed_at > LINGER_SECONDS:
            return True
        connected = self._runner.server is not None and self._runner.server.connections
        closed = self._closing is None or self._closing.done()
        return closed and not connected


def _accepted(listener: socket.socket) -> socket.socket | None:
    """A connection that waits; ``None`` if there is none, or no descriptor for it."""
    try:
        connection, _ = listener.accept()
    except OSError:
        return None
    connection.setblocking(False)
    return connection


def _bind(host: str, port: int, *, share: bool) -> socket.socket:
    """A listening socket. Alone it is bound plainly, so that a foreign holder is noticed, and
    opened for sharing only afterwards."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
        if not share:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def run(config: Config, listen_fd: int | None = None) -> int:
    """Run a frontend until SIGTERM. Returns the exit code. Raises ``AddressError``."""
    return FrontendService(config, listen_fd).run()
