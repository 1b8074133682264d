"""Connections of /v1/stream: who may open one, what it may hold, and how it ends."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from typing import Any

import aiohttp
import pytest
from support.frontend.frontend_scripted import STOP, Client, rejected, run, say
from support.frontend.large_frames import no_large_body_is_read
from support.frontend.multiplex_client import (
    HI,
    PATH,
    ROUTE,
    Socket,
    connected,
    said,
    talk,
    text,
    until_told,
)
from support.frontend.passing_time import PassingTime

from penstock.client.sink import RowExtras, Sink
from penstock.protocol.config.server_fields import ServerConfig
from penstock.protocol.process import logs
from penstock.protocol.wire.messages.requests import Work
from penstock.services.frontend.context import CONTEXT
from penstock.services.frontend.dialects.multiplex import session as sessions
from penstock.services.frontend.websockets import socket as sockets


def test_requests_at_once_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_REQUESTS", 2)

    async def use(client: Client, socket: Socket) -> None:
        for name in "abc":
            await socket.chat(name, "long")
        error = await socket.error("c")
        assert error["status"] == 429 and "2 requests" in error["error"]["message"]
        await socket.cancel("a")
        await socket.frames("a")
        await socket.chat("c")
        assert text(await socket.frames("c")) == "re: hi."

    talk(use, until_told)


def test_a_connection_that_goes_cancels_what_runs_and_frees_what_it_held() -> None:
    async def use(client: Client) -> None:
        async with connected(client) as socket:
            await socket.chat("a", "long")
            await socket.frame()
        await client.gateway.cancel_seen.wait()
        while client.app[CONTEXT].sockets:
            await asyncio.sleep(0.01)
        assert client.app[CONTEXT].bodies.used == 0

    run(use, until_told)


def test_a_server_that_goes_down_lets_answers_end_and_takes_no_other() -> None:
    go = asyncio.Event()

    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(1)
        sink.on_row(0, "a", 1)
        await go.wait()
        sink.on_row(0, "b", 1, RowExtras(end=STOP))

    async def use(client: Client, socket: Socket) -> None:
        async with connected(client) as idle:
            await socket.chat("a")
            await socket.chat("b")
            while len(socket.passed) < 2:
                socket.passed.append(await socket.frame())
            client.gateway.is_draining = True
            client.app[CONTEXT].sockets.drain()
            assert (await idle.closed()).data == aiohttp.WSCloseCode.GOING_AWAY
        await socket.chat("c")
        error = await socket.error("c")
        assert (error["status"], error["error"]["code"]) == (503, "server_shutting_down")
        go.set()
        for name in "ab":
            assert text(await socket.frames(name)) == "ab"
        closed = await socket.closed()
        assert closed.data == aiohttp.WSCloseCode.GOING_AWAY and "shutting down" in closed.extra

    talk(use, script)


def test_a_connection_has_a_limit_and_what_runs_then_may_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions.MultiplexSession, "limit_s", 6.0)
    go = asyncio.Event()

    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(1)
        await go.wait()
        sink.on_row(0, "late", 1, RowExtras(end=STOP))

    async def use(client: Client, socket: Socket) -> None:
        async with connected(client) as other:
            time = PassingTime(monkeypatch)
            await socket.chat("a")
            while not client.gateway.works:
                await asyncio.sleep(0)
            await time.passes(7.0)
            closed = await other.closed()
            assert closed.data == aiohttp.WSCloseCode.GOING_AWAY
            said = "A WebSocket is open for 0.1 minutes at most; connect again"
            assert closed.extra == said
        await socket.chat("b")
        error = await socket.error("b")
        assert error["error"]["code"] == "websocket_connection_limit_reached"
        go.set()
        assert text(await socket.frames("a")) == "late"
        assert (await socket.closed()).extra == said

    talk(use, script)


def test_an_idle_connection_is_closed_after_its_time_and_never_while_a_request_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions.MultiplexSession, "idle_s", 14.0)
    ends = asyncio.Event()

    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(1)
        await ends.wait()
        sink.on_row(0, "late", 1, RowExtras(end=STOP))

    async def use(client: Client, socket: Socket) -> None:
        time = PassingTime(monkeypatch)
        await socket.chat("a")
        while not client.gateway.works:
            await asyncio.sleep(0)
        await time.passes(15.0)
        ends.set()
        assert text(await socket.frames("a")) == "late"
        await time.passes(11.0)
        assert text(await asked(socket)) == "late"
        await time.passes(11.0)
        assert text(await asked(socket)) == "late"
        await time.passes(14.0)
        closed = await socket.closed()
        assert closed.data == aiohttp.WSCloseCode.OK
        assert closed.extra == "Nothing was asked for 14 s, the limit of a WebSocket; connect again"
        while client.app[CONTEXT].sockets:
            await asyncio.sleep(0.01)

    async def asked(socket: Socket) -> list[dict[str, Any]]:
        await socket.chat("b")
        return await socket.frames("b")

    talk(use, script)


def test_answers_to_pings_of_many_hours_are_no_message_that_never_comes_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sockets, "PING_SECONDS", 4.0)
    monkeypatch.setattr(sockets, "READ_TIMEOUT_S", 3.0)

    async def use(client: Client, socket: Socket) -> None:
        time = PassingTime(monkeypatch)
        for _ in range(8):
            for _ in range(100):
                await socket.raw.pong()
            await socket.chat("a")
            assert text(await socket.frames("a")) == "Hello world"
        await time.passes(4.0)
        await socket.chat("b")
        assert text(await socket.frames("b")) == "Hello world"

    talk(use)


def test_a_message_that_is_on_its_way_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions.MultiplexSession, "idle_s", 5.0)

    async def use(client: Client, socket: Socket) -> None:
        time = PassingTime(monkeypatch)
        body = {"messages": [{"role": "user", "content": "x" * 100_000}]}
        whole = json.dumps({"id": "a", "type": "chat", "body": body}).encode()
        frame = struct.pack(">BBQ4s", 0x81, 0x80 | 127, len(whole), bytes(4)) + whole
        writer = socket.raw._writer.transport
        before = client.app[CONTEXT].bodies.used
        writer.write(frame[:50_000])
        while client.app[CONTEXT].bodies.used < before + 50_000:
            await asyncio.sleep(0)
        await time.passes(6.0)
        writer.write(frame[50_000:])
        assert text(await socket.frames("a")) == "Hello world"

    talk(use)


def test_each_request_is_counted_with_the_status_of_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_REQUESTS", 1)

    async def use(client: Client) -> None:
        async with connected(client) as socket:
            for _ in range(2):
                await socket.chat("a")
                await socket.frames("a")
            await socket.chat("wrong", temprature=1)
            await socket.error("wrong")
            await socket.raw.send_str("no frame")
            await socket.error()
            await socket.cancel("unknown")  # asks for nothing
            await socket.error()
            await socket.chat("cancelled", "long")
            socket.passed.append(await socket.frame())
            await socket.chat("second")
            await socket.error("second")
            await socket.cancel("cancelled")
            await socket.frames("cancelled")
            client.gateway.overloaded = rejected(503, "full")
            await socket.chat("late")
            await socket.error("late")
            client.gateway.overloaded = None
            assert await client.counted(PATH) == {"200": 3, "400": 2, "429": 1, "503": 1}
            await socket.chat("left", "long")
            await socket.frame()
        async with connected(client) as socket:
            await socket.chat("a", "x" * 5000)
            await socket.closed()
        while client.app[CONTEXT].sockets:
            await asyncio.sleep(0.01)
        found = await client.counted(PATH)
        assert found == {"101": 2, "200": 3, "400": 2, "413": 1, "429": 1, "499": 1, "503": 1}

    run(use, until_told, ServerConfig(max_body_bytes=4096))


def test_who_may_not_call_may_not_connect() -> None:
    async def use(client: Client) -> None:
        assert await ROUTE.refused(client) == 401
        key = {"Authorization": "Bearer right"}
        assert await ROUTE.refused(client, **key, Origin="https://evil.example") == 403
        async with connected(client, headers=key) as socket:
            await socket.chat("a")
            assert text(await socket.frames("a")) == "Hello world"
        status, body, _ = await client.get(PATH, headers=key)
        assert status == 426 and "Upgrade" in body["error"]["message"]

    run(use, config=ServerConfig(api_key=["right"]))


def test_a_page_sends_its_key_as_a_subprotocol_and_no_log_repeats_it(
    capfd: pytest.CaptureFixture[str],
) -> None:
    key = "sécret/key?"

    def offered(secret: str) -> list[str]:
        encoded = base64.urlsafe_b64encode(secret.encode()).decode().rstrip("=")
        return ["penstock", f"penstock-key.{encoded}"]

    async def use(client: Client) -> None:
        async with connected(client, protocols=offered(key)) as socket:
            assert socket.raw.protocol == "penstock"
            await socket.chat("a")
            assert text(await socket.frames("a")) == "Hello world"
        async with connected(client, protocols=offered(key)[1:]) as socket:
            assert socket.raw.protocol is None
        for wrong in (offered("other"), ["penstock", "penstock-key.%"], ["penstock-key."]):
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await client.session.ws_connect(client.url + PATH, protocols=wrong)
            assert refused.value.status == 401

    logs.set_up("frontend", "info", "json")
    logs.flush()
    capfd.readouterr()
    run(use, config=ServerConfig(api_key=[key]))
    logs.flush()
    shown = capfd.readouterr().err
    assert '"status":200' in shown and "penstock-key" not in shown


def test_a_frame_above_the_limit_closes_the_connection_and_says_why() -> None:
    async def use(client: Client, socket: Socket) -> None:
        await socket.chat("a", "x" * 5000)
        closed = await socket.closed()
        assert closed.data == aiohttp.WSCloseCode.MESSAGE_TOO_BIG
        assert closed.extra == "A message has at most 4096 bytes (--max-body-bytes)"

    talk(use, config=ServerConfig(max_body_bytes=4096))


def test_frames_of_a_large_body_are_read_beside_the_others() -> None:
    """Other connections are answered while such a frame is read, however long that takes, whether
    it is to be refused or not."""

    async def use(client: Client, socket: Socket) -> None:
        for packs in (False, True):
            socket.packs = packs
            for fields in ({"id": "large"}, {"id": "large", "unknown": 1}):
                with no_large_body_is_read(client) as waiting:
                    body = {"prompt": [1] * 300_000, "truncate_prompt_tokens": 8}
                    await socket.send(**fields, type="completion", body=body)
                    async with connected(client) as other:
                        while not waiting():
                            await asyncio.sleep(0.001)
                        await other.chat("small")
                        assert text(await other.frames("small")) == "Hello world"
                if "unknown" in fields:
                    assert "unknown" in (await socket.error())["error"]["message"]
                else:
                    assert text(await socket.frames("large")) == "Hello world"
        while len(client.app[CONTEXT].sockets) > 1:
            await asyncio.sleep(0.01)
        assert client.app[CONTEXT].bodies.used < 20  # a pong

    talk(use)


def test_a_slow_reader_is_cut_off_and_costs_its_neighbours_nothing() -> None:
    """One connection is not read at all while another gets a whole answer token by token."""

    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(1)
        while said(work) == "flood":
            sink.on_row(0, "x" * 65536, 1)
            await asyncio.sleep(0)
        for _ in range(50):
            sink.on_row(0, "word ", 1)
            await asyncio.sleep(0)
        sink.on_row(0, ".", 1, RowExtras(end=STOP))

    async def use(client: Client, socket: Socket) -> None:
        async with connected(client) as slow:
            for name in "ab":
                await slow.chat(name, "flood")
            for turn in range(3):
                await socket.chat("quick", "words")
                frames = await socket.frames("quick")
                assert text(frames) == "word " * 50 + ".", turn
            await client.gateway.cancel_seen.wait()
            await socket.chat("quick", "words")
            assert (await socket.frames("quick"))[-1]["type"] == "end"

    gateway = talk(use, script)
    assert set(gateway.cancelled) == {1, 2}


def test_fragments_and_control_frames_between_them_make_one_frame() -> None:
    async def use(client: Client, socket: Socket) -> None:
        whole = json.dumps({"id": "f", "type": "chat", "body": HI}).encode()
        writer = socket.raw._writer.transport

        def part(opcode: int, payload: bytes) -> bytes:
            return struct.pack(">BB4s", opcode, 0x80 | len(payload), bytes(4)) + payload

        writer.write(part(0x01, whole[:20]) + part(0x89, b"ping"))
        await asyncio.sleep(0)
        writer.write(part(0x80, whole[20:]))
        assert text(await socket.frames("f")) == "Hello world"

    talk(use)


def test_the_log_has_a_line_for_each_request(capfd: pytest.CaptureFixture[str]) -> None:
    async def use(client: Client) -> None:
        async with connected(client, headers={"x-request-id": "sock"}) as socket:
            await socket.chat("a")
            assert (await socket.frames("a"))[-1]["request_id"] == "sock-1"
            await socket.chat("b", temprature=1)
            await socket.error("b")

    logs.set_up("frontend", "info", "json")
    logs.flush()
    capfd.readouterr()
    run(use, say("a"))
    logs.flush()
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    shown = [(one["id"], one["status"], one["route"]) for one in lines]
    assert shown == [("sock-1", 200, PATH), ("sock-2", 400, PATH)]
