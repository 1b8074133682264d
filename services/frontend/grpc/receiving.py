"""Messages on their way to the server.

gRPC hands a message over when all of it is there and tells nothing of it before, so its bytes can
be counted (``BodyBudget``) only from then on. Until then there are as many as the messages can have
that are received at the same time: that is what ``Receiving`` bounds.
"""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import Any, TypeAlias
from urllib.parse import unquote

import grpc

from penstock.services.frontend.body import READ_TIMEOUT_S
from penstock.services.frontend.errors import ApiError, retry_after

Rpc: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"
UNCOUNTED_BYTES = 256 * 1024 * 1024
"""Of all messages that are being received, beyond what their budget counts; one may always come."""
PATIENCE_SECONDS = 5.0
"""A message that others wait for has so long."""


def address_of(peer: str) -> str:
    """The address in a peer as gRPC names it, ``ipv4:127.0.0.1:50000`` or ``ipv6:%5B::1%5D:50000``,
    as HTTP has it; empty for one on a UNIX socket."""
    kind, _, rest = peer.partition(":")
    return "" if kind == "unix" else unquote(rest).rpartition(":")[0].strip("[]")


def places_for(message_bytes: int) -> int:
    """Messages of at most so many bytes that may come at the same time."""
    return max(1, UNCOUNTED_BYTES // message_bytes)


class Receiving:
    """Places for messages that are being received. While others wait for one, whoever has had his
    for long loses it: a client that sends nothing holds up nobody who sends."""

    def __init__(self, places: int, patience_s: float = PATIENCE_SECONDS) -> None:
        self._places = asyncio.Semaphore(places)
        self._patience_s = patience_s
        self._waiting = 0
        self._begun: dict[asyncio.Timeout, float] = {}
        """When each began, the oldest first."""

    async def message(self, rpc: Rpc) -> bytes:
        """The next message of a call. Raises ``ApiError``: 503, 408, 400."""
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                await self._enter()
        except TimeoutError:
            raise ApiError(
                503,
                "Too many messages are being received; try again",
                kind="overloaded_error",
                headers=retry_after(1.0),
            ) from None
        try:
            return await self._received(rpc)
        finally:
            self._places.release()

    async def _enter(self) -> None:
        if not self._places.locked():
            await self._places.acquire()
            return
        self._waiting += 1
        try:
            self._hurry()
            await self._places.acquire()
        finally:
            self._waiting -= 1

    async def _received(self, rpc: Rpc) -> bytes:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(READ_TIMEOUT_S) as limit:
                self._begun[limit] = began
                try:
                    self._hurry()
                    message: Any = await rpc.read()
                finally:
                    del self._begun[limit]
        except TimeoutError:
            took = loop.time() - began
            while_others = " while others waited" if took < READ_TIMEOUT_S else ""
            raise ApiError(
                408, f"The message did not arrive within {took:.2g} s{while_others}"
            ) from None
        if message is grpc.aio.EOF:
            raise ApiError(400, "The call ended without a message")
        return bytes(message)

    def _hurry(self) -> None:
        """Of the oldest, as many as there are others who wait have no more than their patience."""
        now = asyncio.get_running_loop().time()
        for limit, began in islice(self._begun.items(), self._waiting):
            soon = max(now, began + self._patience_s)
            if not limit.expired() and (limit.when() or soon) > soon:
                limit.reschedule(soon)
