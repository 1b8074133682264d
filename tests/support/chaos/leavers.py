"""Clients of every kind over plain sockets: some leave at any moment, some send nonsense."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

PATIENCE = 100.0
BAD_BODIES = (
    b"{",
    b"[]",
    b'{"prompt": ""}',
    b'{"prompt": [999999999]}',
    b'{"prompt": "x", "temperature": "hot"}',
    b'{"prompt": "x", "no_such_parameter": 1}',
    b'{"prompt": "x", "n": 100000}',
    b'{"prompt": "\xff"}',
)


@dataclass
class Seen:
    """What a client saw."""

    status: int = 0
    whole: bool = False
    """The answer was complete."""
    left: bool = False
    """The client closed the connection before that."""


def body(rng: random.Random, max_tokens: int, words: int = 200) -> dict[str, Any]:
    """A sound request of any kind. ``words``: fewer than so many in the prompt."""
    found: dict[str, Any] = {
        "max_tokens": rng.randrange(1, max_tokens),
        "temperature": rng.choice([0, 0.9]),
        "n": rng.choice([1, 1, 1, 2]),
        "stream": rng.random() < 0.5,
        "ignore_eos": rng.random() < 0.8,
        "user": f"user-{rng.randrange(1000)}",
    }
    if rng.random() < 0.3:
        found["stop"] = [rng.choice(["e", "the", "\n"])]
    text = " ".join(str(rng.randrange(10**6)) for _ in range(rng.randrange(1, words)))
    if rng.random() < 0.5:
        found["messages"] = [{"role": "user", "content": text}]
    elif rng.random() < 0.5:
        found["prompt"] = text
    else:
        found["prompt"] = [rng.randrange(3, 250) for _ in range(rng.randrange(1, 5 * words // 2))]
    return found


def request(payload: bytes, path: str) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload


class Caller:
    """Sends one request at a time, over a connection that it keeps where it can."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname, parts.port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, asked: dict[str, Any]) -> Seen:
        """A request, and its whole answer."""
        path = "/v1/chat/completions" if "messages" in asked else "/v1/completions"
        return await self.send(request(json.dumps(asked).encode(), path))

    async def send(self, data: bytes, leave_after: float | None = None) -> Seen:
        """Send bytes. ``leave_after``: seconds until the client cuts the connection, whatever has
        come by then."""
        seen = Seen()
        try:
            async with asyncio.timeout(PATIENCE if leave_after is None else leave_after):
                await self._exchange(data, seen)
        except TimeoutError:
            if leave_after is None:
                raise
            seen.left = not seen.whole
        except (ConnectionError, asyncio.IncompleteReadError):
            self.close()
            if leave_after is None:
                raise
        if leave_after is not None:
            self.close()
        return seen

    async def _exchange(self, data: bytes, seen: Seen) -> None:
        if self._writer is None or self._writer.is_closing():
            self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._reader, self._writer
        assert reader is not None
        writer.write(data)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        seen.status = int(head.split(b" ", 2)[1])
        if b"transfer-encoding: chunked" in head:
            while size := int(await reader.readline(), 16):
                await reader.readexactly(size + 2)
            await reader.readexactly(2)
        else:
            length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
            await reader.readexactly(int(length))
        seen.whole = True
        if b"connection: close" in head:
            self.close()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = None


async def at_once(count: int, workers: int, url: str, one: Any) -> None:
    """``one(number, caller)`` for ``count`` numbers, by so many callers."""
    numbers = iter(range(count))

    async def work() -> None:
        caller = Caller(url)
        try:
            for number in numbers:
                await one(number, caller)
        finally:
            caller.close()

    await asyncio.gather(*(work() for _ in range(workers)))
