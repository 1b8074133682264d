"""A gRPC server over a scripted gateway, and clients that keep to nothing but HTTP/2's frames."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
from support.frontend.frontend_scripted import Script, ScriptedGateway

from penstock.protocol.config.server_fields import ServerConfig
from penstock.services.frontend.app import make_app
from penstock.services.frontend.context import CONTEXT, Context
from penstock.services.frontend.grpc.server import GrpcServer

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
END_STREAM, END_HEADERS = 1, 4


class Scripted:
    """A server and what is behind it."""

    def __init__(self, server: GrpcServer, port: int, context: Context, gateway: ScriptedGateway):
        self.server = server
        self.port = port
        self.context = context
        self.gateway = gateway

    def channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(f"127.0.0.1:{self.port}")

    @asynccontextmanager
    async def raw(self, window: int = 65535, source: str = "127.0.0.1") -> AsyncIterator[RawClient]:
        """``source``: the client's address."""
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, local_addr=(source, 0)
        )
        try:
            yield RawClient(reader, writer, window)
        finally:
            writer.close()


def run(
    use: Callable[[Scripted], Awaitable[None]],
    script: Script | None = None,
    config: ServerConfig | None = None,
    *,
    stall_s: float = 60.0,
    connections: int = 64,
) -> ScriptedGateway:
    """Start a server, use it, stop it; returns its gateway."""

    async def main() -> ScriptedGateway:
        gateway = ScriptedGateway(script)
        config_ = config or ServerConfig(grpc_port=0)
        app = make_app(config_, gateway, gateway.registry, stall_s=stall_s)
        server = GrpcServer(app[CONTEXT], connections=connections)
        port = await server.start()
        try:
            async with asyncio.timeout(60):
                await use(Scripted(server, port, app[CONTEXT], gateway))
        finally:
            await server.stop(0)
        return gateway

    return asyncio.run(main())


class RawClient:
    """One connection, whose streams give the server ``window`` bytes and never more."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, window: int
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._stream = -1
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        self._frame(SETTINGS, 0, 0, struct.pack(">HI", 4, window))

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes = b"") -> None:
        head = len(payload).to_bytes(3) + struct.pack(">BBI", kind, flags, stream)
        self._writer.write(head + payload)

    def call(self, path: str, message: bytes | None = None, *, ends: bool = True) -> int:
        """Begin a call, with its message unless that is to be missing. Returns its stream."""
        self._stream += 2
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            ":authority": "localhost",
            "te": "trailers",
            "content-type": "application/grpc",
        }
        block = b"".join(
            b"\0" + b"".join(bytes((len(one),)) + one.encode() for one in pair)
            for pair in fields.items()
        )
        self._frame(HEADERS, END_HEADERS, self._stream, block)
        if message is not None:
            self.send(self._stream, b"\0" + struct.pack(">I", len(message)) + message, ends=ends)
        return self._stream

    def send(self, stream: int, data: bytes, *, ends: bool = False) -> None:
        self._frame(DATA, END_STREAM if ends else 0, stream, data)

    async def frame(self) -> tuple[int, int, int, bytes]:
        """Kind, flags, stream and payload of the next one."""
        head = await self._reader.readexactly(9)
        kind, flags, stream = struct.unpack(">BBI", head[3:])
        payload = await self._reader.readexactly(int.from_bytes(head[:3]))
        if kind == PING and not flags:
            self._frame(PING, 1, 0, payload)
        if kind == SETTINGS and not flags:
            self._frame(SETTINGS, 1, 0)
        return kind, flags, stream, payload

    async def head(self, stream: int) -> None:
        """Wait for the first header of a stream."""
        while (await self.frame())[:3:2] != (HEADERS, stream):
            pass
