"""The gRPC server of a frontend: what listens, and the rules that hold for every call.

It runs on the frontend's event loop (``grpc.aio``): a message costs about 30 us there, of which the
larger part is gRPC's own, and a call needs no thread. Frontends of one server share the port, each
with a socket of its own, among which Linux spreads connections (SO_REUSEPORT).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else it writes lines of its own to stderr

import grpc

from penstock.protocol.config.server_fields import ServerConfig
from penstock.protocol.wire.addresses import AddressError
from penstock.protocol.wire.unix_listener import make_way
from penstock.services.frontend.context import Context
from penstock.services.frontend.grpc import health, reflection, servicer
from penstock.services.frontend.grpc.call import Handler, run_call
from penstock.services.frontend.grpc.engine import servicer as engine
from penstock.services.frontend.grpc.health import Health
from penstock.services.frontend.grpc.open_calls import OpenHandler
from penstock.services.frontend.grpc.reflection import Reflection
from penstock.services.frontend.grpc.running_calls import RunningCalls
from penstock.services.frontend.grpc.sending import MAX_SENT_BYTES
from penstock.services.frontend.grpc.tls import credentials_of
from penstock.services.frontend.open_files import GRPC_CONNECTIONS
from penstock.services.frontend.tls import Certificates

MAX_STREAMS = 4096
"""Calls at the same time on one connection; further ones wait in the client."""
MAX_CALLS = 16_384
"""At the same time over all connections; a further one gets RESOURCE_EXHAUSTED."""
IDLE_SECONDS = 600.0
"""A connection without calls is closed; its client connects again when it has one."""
PING_SECONDS = 30.0
"""A silent connection with calls is asked so often whether it is still there."""
CLIENT_PING_SECONDS = 10.0
"""A client may ask as often."""
HANDSHAKE_SECONDS = 10.0
"""A connection that has not begun to speak HTTP/2 by then is closed, with TLS or without."""
HEALTH_SECONDS = 0.5
"""A draining server tells so long that it serves no more, before it refuses connections."""


class GrpcServer:
    def __init__(
        self,
        context: Context,
        certificates: Certificates | None = None,
        connections: int = GRPC_CONNECTIONS,
    ) -> None:
        """certificates: ``None`` for gRPC without TLS. connections: one above so many is closed."""
        config, stall_s = context.config, context.clock.stall_s
        self._context = context
        self._certificates = certificates
        self._config = config
        self.running = RunningCalls(config)
        services = {one.NAME: one.METHODS for one in (servicer, engine)}
        self.health = Health(
            context.gateway, services, stall_s=stall_s, message_bytes=config.max_body_bytes
        )
        self._server = grpc.aio.server(
            options=_options(config, connections), maximum_concurrent_rpcs=MAX_CALLS
        )
        reflected = Reflection((*services, health.NAME), stall_s=stall_s)
        self._server.add_generic_rpc_handlers(
            (
                *(self._with_key(name, methods) for name, methods in services.items()),
                _handlers(health.NAME, self.health.methods()),
                *(_handlers(name, reflected.methods()) for name in reflection.NAMES),
            )
        )
        self._stopping: asyncio.Task[None] | None = None
        self._told = False
        """Whether those who watch its health have had time to hear that it goes down."""

    def _with_key(self, service: str, methods: Mapping[str, Handler]) -> grpc.GenericRpcHandler:
        return _handlers(
            service,
            {
                name: partial(run_call, self._context, self.running, f"/{service}/{name}", handler)
                for name, handler in methods.items()
            },
        )

    async def start(self) -> int:
        """Listen. Returns the port, of a UNIX socket none that counts. Raises ``AddressError``."""
        address = address_of(self._config)
        try:
            if self._config.grpc_uds:
                port = self._at_path(address)
            elif self._certificates is None:
                port = self._server.add_insecure_port(address)
            else:
                credentials = credentials_of(self._certificates)
                port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise AddressError(
                f"cannot listen on {address} for gRPC: {error}; choose another "
                f"{'--grpc-uds' if self._config.grpc_uds else '--grpc-port'}"
            ) from None
        self.health.look()
        await self._server.start()
        return port

    def _at_path(self, address: str) -> int:
        """Listen at a path, which its user alone may connect to. gRPC removes it at the end. Raises
        ``AddressError``, ``RuntimeError``."""
        path = address.removeprefix("unix:")
        try:
            make_way(path, "--grpc-uds")
        except OSError as error:
            raise RuntimeError(error.strerror or str(error)) from None
        former = os.umask(0o177)
        try:
            return self._server.add_insecure_port(address)
        finally:
            os.umask(former)

    def drain(self, seconds: float) -> None:
        """Take nothing new; what runs may go on for so many seconds."""
        self.health.look()
        self._stopping = asyncio.get_running_loop().create_task(self._drain(seconds))

    async def _drain(self, seconds: float) -> None:
        await asyncio.sleep(HEALTH_SECONDS)
        self._told = True
        await self._server.stop(seconds)

    @property
    def drained(self) -> bool:
        """Nothing runs, and connections have been told for long enough."""
        told = self._stopping is None or self._told
        return told and not self.running.count

    async def stop(self, seconds: float) -> None:
        """End what is open by then."""
        await self._server.stop(seconds)


def _handlers(service: str, methods: Mapping[str, OpenHandler]) -> grpc.GenericRpcHandler:
    """To gRPC a call's message and its answer are streams of one, of bytes: then the method, not
    gRPC, says when a message is taken in, reads a large one beside the event loop, and says how
    long a client may let its answer wait."""
    return grpc.method_handlers_generic_handler(
        service,
        {
            name: grpc.stream_stream_rpc_method_handler(_coroutine(run))
            for name, run in methods.items()
        },
    )


def _coroutine(run: OpenHandler) -> Any:
    """gRPC tells a coroutine's function from others by looking at it, and a partial is none."""

    async def serve(messages: Any, rpc: Any) -> None:
        await run(rpc)

    return serve


def address_of(config: ServerConfig) -> str:
    if config.grpc_uds:
        return f"unix:{os.path.abspath(os.path.expanduser(config.grpc_uds))}"
    host = config.grpc_host or config.host
    return f"[{host}]:{config.grpc_port}" if ":" in host else f"{host}:{config.grpc_port}"


def _options(config: ServerConfig, connections: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE_SECONDS)),
        # Else what a client may send ahead of a message that nobody takes in yet grows with the
        # connection's speed, to 4 MiB a call and more; without it is 64 KiB.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.so_reuseport", 1),
        ("grpc.max_receive_message_length", config.max_body_bytes),
        ("grpc.max_send_message_length", MAX_SENT_BYTES),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_connection_idle_ms", int(1000 * IDLE_SECONDS)),
        ("grpc.keepalive_time_ms", int(1000 * PING_SECONDS)),
        ("grpc.keepalive_timeout_ms", int(1000 * PING_SECONDS)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", int(1000 * CLIENT_PING_SECONDS)),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", int(1000 * CLIENT_PING_SECONDS)),
    ]
