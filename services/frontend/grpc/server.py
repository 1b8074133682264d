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
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from penstock.protocol.config.server_fields import ServerConfig
from penstock.protocol.wire.mailbox import AddressError
from penstock.services.frontend.context import Context
from penstock.services.frontend.grpc import servicer
from penstock.services.frontend.grpc.call import Handler, RunningCalls, run_call
from penstock.services.frontend.grpc.engine import servicer as engine
from penstock.services.frontend.grpc.health import Health
from penstock.services.frontend.grpc.tls import credentials_of
from penstock.services.frontend.tls import Certificates

MAX_SENT_BYTES = 64 * 1024 * 1024
"""Of one message of ours; a client that wants messages of more than 4 MiB must allow them too."""
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
HEALTH_SECONDS = 0.5
"""A draining server tells so long that it serves no more, before it refuses connections."""


class GrpcServer:
    def __init__(self, context: Context, certificates: Certificates | None = None) -> None:
        """certificates: ``None`` for gRPC without TLS."""
        self._context = context
        self._certificates = certificates
        self._config = context.config
        self.running = RunningCalls()
        services = {one.NAME: (one.METHODS, one.STREAMED) for one in (servicer, engine)}
        self.health = Health(context.gateway, services)
        self._server = grpc.aio.server(
            options=_options(self._config), maximum_concurrent_rpcs=MAX_CALLS
        )
        handlers = tuple(
            self._handlers(name, methods, streamed)
            for name, (methods, streamed) in services.items()
        )
        self._server.add_generic_rpc_handlers(handlers)
        health_pb2_grpc.add_HealthServicer_to_server(self.health.servicer, self._server)
        names = [*services, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name]
        reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), self._server)
        self._stopping: asyncio.Task[None] | None = None
        self._told = False
        """Whether those who watch its health have had time to hear that it goes down."""

    def _handlers(
        self, service: str, methods: Mapping[str, Handler], streamed: frozenset[str]
    ) -> grpc.GenericRpcHandler:
        """Messages come and go as bytes: a large one is read beside the event loop. To gRPC a
        call's message is a stream of one: then the handler, not gRPC, says when to take it in."""
        found: dict[str, Any] = {}
        for name, handler in methods.items():
            route = f"/{service}/{name}"
            run = partial(run_call, self._context, self.running, route, handler)
            kind = (
                grpc.stream_stream_rpc_method_handler
                if name in streamed
                else grpc.stream_unary_rpc_method_handler
            )
            found[name] = kind(_coroutine(run))
        return grpc.method_handlers_generic_handler(service, found)

    async def start(self) -> int:
        """Listen. Returns the port. Raises ``AddressError``."""
        address = address_of(self._config)
        try:
            if self._certificates is None:
                port = self._server.add_insecure_port(address)
            else:
                credentials = credentials_of(self._certificates)
                port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise AddressError(
                f"cannot listen on {address} for gRPC: {error}; choose another --grpc-port"
            ) from None
        self.health.look()
        await self._server.start()
        return port

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


def _coroutine(run: Any) -> Any:
    """gRPC tells a coroutine's function from others by looking at it, and a partial is none."""

    async def serve(messages: Any, rpc: Any) -> Any:
        return await run(rpc)

    return serve


def address_of(config: ServerConfig) -> str:
    host = config.grpc_host or config.host
    return f"[{host}]:{config.grpc_port}" if ":" in host else f"{host}:{config.grpc_port}"


def _options(config: ServerConfig) -> list[tuple[str, int]]:
    return [
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
