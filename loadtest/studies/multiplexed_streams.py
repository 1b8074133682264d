"""Requests on WebSockets of /v1/stream, counted without being parsed.

The client masks with zeros, which RFC 6455 allows, so that masking costs nothing here.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import msgspec

Encoding = Literal["json", "msgpack"]
_FRAME = {"json": b'"type":"', "msgpack": b"\xa4type"}
"""What every frame holds, and no text of the null device."""
_END = {"json": b'"type":"end"', "msgpack": b"\xa4type\xa3end"}


def _message(encoding: Encoding, frame: dict[str, Any]) -> bytes:
    """A frame as a client's message."""
    payload = json.dumps(frame).encode() if encoding == "json" else msgspec.msgpack.encode(frame)
    opcode, size = 0x81 if encoding == "json" else 0x82, len(payload)
    if size < 126:
        return struct.pack(">BBI", opcode, 0x80 | size, 0) + payload
    return struct.pack(">BBHI", opcode, 0x80 | 126, size, 0) + payload


class Multiplexed(asyncio.Protocol):
    """One connection."""

    def __init__(
        self, encoding: Encoding, asked: Sequence[dict[str, Any]], done: asyncio.Future[None]
    ) -> None:
        """asked: the frames to send, each of which begins a request."""
        self.frames = self.ends = 0
        """That have come."""
        self._encoding = encoding
        self._asked = asked
        self._done = done
        self._header = b""
        self._is_open = False
        self._rest = b""
        """The last bytes, which may begin a marker."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.Transport):
            self._transport = transport
            transport.write(
                b"GET /v1/stream HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\n"
                b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
                b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
            )

    def data_received(self, data: bytes) -> None:
        if not self._is_open:
            self._header += data
            header, found, data = self._header.partition(b"\r\n\r\n")
            if not found:
                return
            if not header.startswith(b"HTTP/1.1 101"):
                raise RuntimeError(f"no WebSocket: {header[:200]!r}")
            self._is_open = True
            for frame in self._asked:
                self._transport.write(_message(self._encoding, frame))
        self.frames += self._count(_FRAME[self._encoding], data)
        self.ends += self._count(_END[self._encoding], data)
        self._rest = (self._rest + data)[-16:]
        if self.ends == len(self._asked):
            self._transport.close()

    def _count(self, marker: bytes, data: bytes) -> int:
        carried = self._rest[-(len(marker) - 1) :] + data
        return carried.count(marker)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_result(None)


async def multiplexed(
    address: tuple[str, int],
    asked: Sequence[dict[str, Any]],
    encoding: Encoding,
    per_connection: int,
) -> int:
    """All requests at once, so many on each connection. Returns the deltas that came.

    asked: the frames that begin them. Raises ``RuntimeError`` where one has not ended.
    """
    loop = asyncio.get_running_loop()
    found: list[Multiplexed] = []
    waiting: list[asyncio.Future[None]] = []
    for begin in range(0, len(asked), per_connection):
        done: asyncio.Future[None] = loop.create_future()
        make = partial(Multiplexed, encoding, asked[begin : begin + per_connection], done)
        _, one = await loop.create_connection(make, *address)
        found.append(one)
        waiting.append(done)
    await asyncio.gather(*waiting)
    if (ends := sum(one.ends for one in found)) != len(asked):
        raise RuntimeError(f"{ends} of {len(asked)} requests have ended")
    return sum(one.frames - one.ends for one in found)
