"""Clients that open connections and keep what they promised to themselves."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable

import pytest
from support.frontend.frontend_scripted import (
    Client,
    Script,
    ScriptedGateway,
    run,
    serving,
    waiting,
)
from support.frontend.passing_time import PassingTime
from support.polling import async_until

from penstock.protocol.config.server_fields import ServerConfig
from penstock.services.frontend import body
from penstock.services.frontend.connection import ConnectionLimits
from penstock.services.frontend.context import CONTEXT

LIVE = b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def limited(
    limits: ConnectionLimits, use: Callable[[Client], Awaitable[None]], script: Script | None = None
) -> None:
    async def main() -> None:
        async with serving(ScriptedGateway(script), limits=limits) as client:
            async with asyncio.timeout(60):
                await use(client)

    asyncio.run(main())


async def opened(
    client: Client, data: bytes = b""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    writer.write(data)
    return reader, writer


def parsed(raw: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of one whole answer."""
    head, _, rest = raw.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    assert int(headers["content-length"]) == len(rest)
    assert headers["server"] == "penstock"
    assert headers["x-request-id"].startswith("req-")
    assert headers["connection"] == "close"
    return int(status.split()[1]), headers, rest


@pytest.mark.parametrize("part", [b"G", b"GET /live HTTP/1.1\r\n", POST, POST + b"A: b"])
def test_half_a_header_is_answered_and_closed_in_time(part: bytes) -> None:
    async def use(client: Client) -> None:
        reader, writer = await opened(client, part)
        status, _, rest = parsed(await reader.read())
        assert status == 408
        assert "0.2 s" in json.loads(rest)["error"]["message"]
        writer.close()

    limited(ConnectionLimits(header_s=0.2), use)


async def all_of(reader: asyncio.StreamReader) -> bytes:
    """What comes until the end; a byte that is sent after that end resets the connection."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := await reader.read(65536):
            found += chunk
    return found


def test_a_header_that_comes_byte_by_byte_gets_no_more_time() -> None:
    async def use(client: Client) -> None:
        reader, writer = await opened(client)
        answer = asyncio.create_task(all_of(reader))
        written = 0
        for byte in LIVE:
            if answer.done():
                break
            writer.write(bytes([byte]))
            written += 1
            await asyncio.sleep(0.05)
        assert parsed(await answer)[0] == 408
        assert written < len(LIVE), "it was answered when all of it had come"
        writer.close()

    limited(ConnectionLimits(header_s=0.5), use)


def test_a_connection_that_says_nothing_is_closed_without_a_word() -> None:
    async def use(client: Client) -> None:
        reader, writer = await opened(client)
        assert await reader.read() == b""
        writer.close()

    limited(ConnectionLimits(header_s=0.2), use)


def test_a_later_request_gets_no_more_time_for_its_header_than_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def use(client: Client) -> None:
        time = PassingTime(monkeypatch)
        reader, writer = await opened(client, LIVE)
        await reader.readuntil(b'{"status":"live"}')
        await time.passes(0.5)  # longer than a header may take: this is idle, not late
        writer.write(LIVE[:9])
        assert parsed(await reader.read())[0] == 408
        writer.close()

    limited(ConnectionLimits(header_s=0.2), use)


def test_an_idle_connection_is_closed_after_its_time_and_serves_until_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def use(client: Client) -> None:
        time = PassingTime(monkeypatch, stands=True)
        reader, writer = await opened(client)
        for _ in range(3):
            writer.write(LIVE)
            await reader.readuntil(b'{"status":"live"}')
            await time.passes(19.0)
        assert not reader.at_eof()
        await time.passes(2.0)
        assert await reader.read() == b""
        writer.close()

    limited(ConnectionLimits(keep_alive_s=20.0), use)


def test_a_request_that_runs_is_not_taken_for_a_late_header(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def use(client: Client) -> None:
        time = PassingTime(monkeypatch)
        raw = b'{"prompt": "x"}'
        head = POST + b"Content-Length: %d\r\n\r\n" % len(raw)
        reader, writer = await opened(client, head + raw[:5])
        await async_until(lambda: client.app[CONTEXT].bodies.used)
        await time.passes(0.4)
        writer.write(raw[5:])
        await async_until(lambda: client.gateway.works)
        await time.passes(0.4)
        await client.get("/live")
        assert not reader.at_eof()
        writer.close()

    limited(ConnectionLimits(header_s=0.2), use, waiting)


def test_a_body_that_does_not_come_is_answered_and_closed_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body, "READ_TIMEOUT_S", 0.3)

    async def use(client: Client) -> None:
        reader, writer = await opened(client, POST + b"Content-Length: 100\r\n\r\n{")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        writer.close()
        assert client.app[CONTEXT].bodies.used == 0

    run(use)


def test_one_connection_too_many_is_told_so_and_costs_the_others_nothing() -> None:
    async def use(client: Client) -> None:
        held = [await opened(client, LIVE) for _ in range(4)]
        for reader, _ in held:
            await reader.readuntil(b'{"status":"live"}')
        for _ in range(50):
            reader, writer = await opened(client)
            status, headers, rest = parsed(await reader.read())
            assert (status, headers["retry-after"]) == (503, "1")
            assert "4 connections" in json.loads(rest)["error"]["message"]
            writer.close()
        for reader, writer in held:
            writer.write(LIVE)
            await reader.readuntil(b'{"status":"live"}')
            writer.close()
        async with asyncio.timeout(60):
            while (await client.get("/live"))[0] != 200:  # once a place is free
                await asyncio.sleep(0.02)

    limited(ConnectionLimits(connections=4), use)


def test_bodies_that_do_not_end_take_only_so_much_memory_together() -> None:
    async def use(client: Client) -> None:
        budget = client.app[CONTEXT].bodies
        budget.limit = 300_000
        size = 100_000
        head = POST + b"Content-Length: %d\r\n\r\n" % size
        held = [await opened(client, head + b"x" * (size - 1)) for _ in range(3)]
        while budget.used < 3 * (size - 1):
            await asyncio.sleep(0.01)
        status, answer, response = await client.post("/v1/completions", b"x" * 1000)
        assert (status, response.headers["Retry-After"]) == (503, "1")
        assert "300000" in answer["error"]["message"]
        for _, writer in held:
            writer.close()
        while budget.used:
            await asyncio.sleep(0.01)
        assert (await client.post("/v1/completions", {"prompt": "x"}))[0] == 200

    run(use, config=ServerConfig())


def test_a_connection_that_would_become_something_else_is_closed_after_its_answer() -> None:
    async def use(client: Client) -> None:
        reader, writer = await opened(
            client,
            b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\n"
            b"Upgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
            b"Sec-WebSocket-Version: 13\r\n\r\n",
        )
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"Upgrade" not in answer
        writer.close()

    run(use)
