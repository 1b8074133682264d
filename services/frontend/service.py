"""The frontend's process."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiohttp import web

from penstock.client.gateway import PipelineGateway
from penstock.protocol.config import Config
from penstock.protocol.config.server_fields import ServerConfig
from penstock.protocol.process import garbage
from penstock.protocol.process.async_service import AsyncService
from penstock.protocol.process.metrics import Registry
from penstock.protocol.wire.addresses import AddressError
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.administration import Ask
from penstock.protocol.wire.messages.membership import Identity, Peer, Phase
from penstock.protocol.wire.syn_filter import take_no_more_connections
from penstock.protocol.wire.unix_listener import listen_at
from penstock.services.frontend.app import BACKLOG, make_app, start
from penstock.services.frontend.connection import ConnectionLimits, Runner, Server
from penstock.services.frontend.context import CONTEXT, Context
from penstock.services.frontend.dialects.registry import load_dialects
from penstock.services.frontend.open_files import connection_limits
from penstock.services.frontend.requests.routes import BEGIN_DRAIN, Scope, answer
from penstock.services.frontend.tls import Certificates, certificates_of

if TYPE_CHECKING:
    from penstock.services.frontend.grpc.server import GrpcServer

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
    _vacate: Callable[[], None] = staticmethod(lambda: None)
    """Removes the path of a UNIX socket of this process's own."""

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
        self._runner: Runner | None = None
        self._app: web.Application | None = None
        self._grpc: GrpcServer | None = None
        self._certificates: Certificates | None = None
        self._closing: asyncio.Task[None] | None = None
        self._closed_at = math.inf
        """When the port was closed."""

    def _http_address(self) -> str:
        if self._inherited is not None and self._inherited.family != socket.AF_UNIX:
            host, port = self._inherited.getsockname()[:2]
            return f"{host}:{port}"
        if self.config.server.uds:
            return f"unix:{_path_of(self.config.server)}"
        return f"{self.config.server.host}:{self.config.server.port}"

    def identity(self) -> Identity:
        return Identity(os.getpid(), socket.gethostname(), http=self._http_address())

    async def start(self) -> None:
        app = self._app = make_app(self.config.server, self.gateway, self.metrics, self._dialects)
        app[BEGIN_DRAIN] = self._begin_drain
        self._listener = self._inherited or await self._listen()
        self._certificates = certificates_of(self.config.server)
        if self._certificates is not None:
            self._certificates.begin()
        with_grpc = self.config.server.has_grpc
        of_http, of_grpc = connection_limits(grpc=with_grpc)
        limits = ConnectionLimits(of_http)
        self._runner = await start(app, self._listener, limits, self._certificates)
        if with_grpc:
            self._grpc = await self._start_grpc(app[CONTEXT], of_grpc)
        garbage.settle()
        self.set_phase(Phase.READY)

    async def _start_grpc(self, context: Context, connections: int) -> GrpcServer:
        """Raises ``AddressError``."""
        from penstock.services.frontend.grpc.server import GrpcServer

        server = self.config.server
        if self._inherited is None and server.grpc_port:  # else the launcher holds the port
            host = server.grpc_host or server.host
            alone = await self._bound(host, server.grpc_port, "--grpc-port", self._is_beside)
            if alone is not None:
                alone.close()
        grpc = GrpcServer(context, self._certificates, connections)
        port = await grpc.start()
        self.log.info("gRPC listens", port=port)
        return grpc

    def _is_beside(self, peer: Peer) -> bool:
        """Whether it is another frontend of this server, on this host."""
        return peer.identity.host == socket.gethostname() and peer.identity.pid != os.getpid()

    def _is_at_port(self, peer: Peer) -> bool:
        """Whether it is a frontend that has the same address."""
        identity = peer.identity
        return identity.host == socket.gethostname() and identity.http == self._http_address()

    def _begin_drain(self) -> Scope:
        """The launcher ends the whole server; who was started by hand ends alone."""
        launched = self._inherited is not None
        os.kill(os.getppid() if launched else os.getpid(), signal.SIGTERM)
        return "server" if launched else "frontend"

    async def _listen(self) -> socket.socket:
        """Bind the port of HTTP, or its path. Raises ``AddressError``."""
        if self.config.server.uds:
            mode = int(self.config.server.uds_mode, 8)
            listener, self._vacate = listen_at(_path_of(self.config.server), mode, BACKLOG)
            return listener
        host, port = self.config.server.host, self.config.server.port
        alone = await self._bound(host, port, "--port", self._is_at_port)
        return alone or _bind(host, port, share=True)

    async def _bound(
        self, host: str, port: int, flag: str, shares: Callable[[Peer], bool]
    ) -> socket.socket | None:
        """Bind a port that nobody has. ``None``: one of the frontends that this one may share it
        with has it.

        Raises ``AddressError`` when somebody else holds it.
        """
        try:
            return _bind(host, port, share=False)
        except OSError as error:
            refusal = AddressError(
                f"cannot listen on {host}:{port}: {error.strerror or error}; choose another {flag}"
            )
        deadline = time.monotonic() + JOIN_SECONDS
        while not self.participant.joined and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        if any(map(shares, self.participant.of("frontend"))):
            return None
        raise refusal

    async def stop(self) -> None:
        """What is still open ends with an error that says why, not with a cut connection."""
        if left := len(self.gateway.ledger.open):
            self.log.warning("requests ended unfinished: the server goes down", requests=left)
        self.gateway.end_all()
        if self._grpc is not None:
            await self._grpc.stop(LAST_WORDS_SECONDS)
        if self._certificates is not None:
            await self._certificates.end()
        self._vacate()
        if self._runner is not None:
            await asyncio.sleep(LAST_WORDS_SECONDS)
            await self._runner.cleanup()

    def on_message(self, sender: int, message: Message, now: float) -> None:
        if isinstance(message, Ask) and self._app is not None:
            self.mailbox.send(message.reply_to, answer(self._app[CONTEXT], message))
        elif not self.gateway.handle(sender, message, now):
            self.metrics.inc("dropped_messages_total", "unexpected")

    def on_gone(self, gone: dict[int, Peer], now: float) -> None:
        self.gateway.peers_gone(gone, now)

    def on_tick(self, now: float) -> None:
        self.gateway.tick(now)
        self.metrics.set("queue_depth", len(self.gateway.ledger.open), "frontend")
        self.metrics.set("queue_age_seconds", self.loop_delay, "frontend", "")
        self.gateway.report(self.metrics)
        self.report(self.metrics)
        if self._grpc is not None:
            self._grpc.health.look()
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
            self._app[CONTEXT].sockets.drain()
        if self._grpc is not None:
            self._grpc.drain(self.config.server.request_timeout_s)
        if self._runner is not None:
            self._closing = self.loop.create_task(self._close_port(self._runner))

    async def _close_port(self, runner: Runner) -> None:
        """Listen no more; who has connected by then is served all the same. Their handshakes go on
        side by side, and all of them end with the process.

        A socket that others share stays open with them, or with the launcher, unless that ends
        everything: then it has seen to it that no more connections come.
        """
        with self._listener.dup() as rest:
            rest.setblocking(False)
            self._vacate()
            if self._inherited is None and rest.family != socket.AF_UNIX:
                take_no_more_connections(rest)
            for site in list(runner.sites):
                await site.stop()
            last = self.loop.time() + LAST_CONNECTIONS_SECONDS
            while isinstance(server := runner.server, Server):
                if (connection := _accepted(rest)) is not None:
                    with contextlib.suppress(OSError):  # its client is gone again
                        await server.take(connection)
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
        if self._grpc is not None and not self._grpc.drained:
            return False
        if time.monotonic() - self._closed_at > LINGER_SECONDS:
            return True
        server = self._runner.server
        closed = self._closing is None or self._closing.done()
        return closed and (not isinstance(server, Server) or server.is_idle())


def _accepted(listener: socket.socket) -> socket.socket | None:
    """A connection that waits; ``None`` if there is none, or no descriptor for it."""
    try:
        connection, _ = listener.accept()
    except OSError:
        return None
    connection.setblocking(False)
    return connection


def _path_of(server: ServerConfig) -> str:
    """Where the UNIX socket is."""
    return os.path.abspath(os.path.expanduser(server.uds))


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
