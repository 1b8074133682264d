"""WebSockets of the Responses API: who may open one, what it may hold, and how it ends."""

from __future__ import annotations

import asyncio
import json
import struct
import threading
from collections.abc import Callable
from socket import SO_RCVBUF, SOL_SOCKET
from typing import Any

import aiohttp
import pytest
from support.frontend.frontend_scripted import STOP, Client, ScriptedGateway, run, say, serving
from support.frontend.large_frames import no_large_body_is_read
from support.frontend.passing_time import PassingTime
from support.frontend.responses_client import (
    PATH,
    ROUTE,
    Socket,
    connected,
    talk,
    text,
    until_cancelled,
)

from penstock.client.sink import RowExtras, Sink
from penstock.protocol.config.server_fields import ServerConfig
from penstock.protocol.process import logs
from penstock.protocol.wire.messages.requests import Work
from penstock.services.frontend.context import CONTEXT
from penstock.services.frontend.dialects.responses import lane_turn
from penstock.services.frontend.dialects.responses import session as sessions
from penstock.services.frontend.dialects.responses.state import RESPONSES


def test_lanes_and_waiting_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_LANES", 2)
    monkeypatch.setattr(sessions, "MAX_WAITING", 3)

    async def use(client: Client, socket: Socket) -> None:
        for lane in ("a", "b", "a"):
            await socket.create(input="long", stream_id=lane)
        await socket.create(input="x", stream_id="c")
        *_, error = await socket.until("error")
        assert error["error"]["code"] == "websocket_queue_full" and "2 lanes" in error["message"]
        await socket.create(input="x", stream_id="a")
        *_, error = await socket.until("error")
        assert "3 requests" in error["message"]

    async def main(client: Client) -> None:
        async with connected(client) as socket:
            await use(client, socket)
        while client.app[CONTEXT].sockets:
            await asyncio.sleep(0.01)

    gateway = run(main, until_cancelled)
    assert gateway.cancelled == [1, 2]


def test_each_request_is_counted_with_those_over_http() -> None:
    async def use(client: Client) -> None:
        async with connected(client) as socket:
            await socket.answer(input="hi")
            await socket.answer(input="hi", generate=False)
            await socket.error(input="hi", previous_response_id="resp_none")
            await socket.error(inputs="hi")
            await socket.raw.send_str("no message")
            await socket.until("error")
            await client.post(PATH, {"input": "hi"})
            assert await client.counted(PATH) == {"200": 3, "400": 3}
            await socket.create(input="long")
            await socket.create(input="waits")
            await socket.until("response.output_text.delta")
        while client.app[CONTEXT].sockets:
            await asyncio.sleep(0.01)
        assert await client.counted(PATH) == {"101": 1, "200": 3, "400": 3, "499": 2}

    run(use, until_cancelled)


def test_an_internal_error_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(client: Client, socket: Socket) -> None:
        with monkeypatch.context() as broken:
            broken.setattr(lane_turn, "whole_turn", lambda *_, **__: 1 / 0)
            error = await socket.error(input="hi")
        assert error["status"] == 500 and "Internal error in request" in error["message"]
        assert text(await socket.answer(input="hi")) == "Hello world"
        assert await client.counted(PATH) == {"200": 1, "500": 1}

    talk(use)


def test_a_connection_that_goes_cancels_what_runs_and_frees_what_it_held() -> None:
    async def use(client: Client) -> None:
        async with connected(client) as socket:
            await socket.create(input="long")
            await socket.until("response.output_text.delta")
        await client.gateway.cancel_seen.wait()
        while client.app[CONTEXT].sockets:
            await asyncio.sleep(0.01)
        assert client.app[CONTEXT].bodies.used == 0
        assert client.app[RESPONSES].running == {}

    run(use, until_cancelled)


def test_a_connection_ends_when_its_time_is_over() -> None:
    async def use(client: Client) -> None:
        client.app[RESPONSES].limit_s = 0.05
        async with connected(client) as socket:
            (error,) = await socket.until("error")
            assert error["error"]["code"] == "websocket_connection_limit_reached"
            assert await socket.closed() == aiohttp.WSCloseCode.OK

    run(use)


def test_a_silent_connection_ends_as_any_other_when_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with serving(ScriptedGateway()) as client:
            client.app[RESPONSES].limit_s += 1.0
            async with connected(client) as socket:
                time = PassingTime(monkeypatch)
                await time.passes(3600.5)
                await time.passes(1.0)
                (error,) = await socket.until("error")
                assert error["error"]["code"] == "websocket_connection_limit_reached"
                assert await socket.closed() == aiohttp.WSCloseCode.OK

    asyncio.run(main())


def test_requests_that_wait_behind_one_whose_client_has_gone_are_counted() -> None:
    sessions_open: list[Any] = []

    async def script(work: Work, sink: Sink) -> None:
        while len(sessions_open) < 1:
            await asyncio.sleep(0)
        (session,) = sessions_open
        sink.on_accepted(1)
        session.socket.transport.abort()

    async def use(client: Client) -> None:
        async with connected(client) as socket:
            for _ in range(3):
                await socket.create(input="x")
            (session,) = client.app[CONTEXT].sockets._open
            while session._waiting < 3 or not client.gateway.works:
                await asyncio.sleep(0)
            sessions_open.append(session)
            while client.app[CONTEXT].sockets:
                await asyncio.sleep(0.001)
        assert await client.counted(PATH) == {"499": 1 + 3}  # with the connection
        assert client.app[CONTEXT].bodies.used == 0

    run(use, script)


def test_a_server_that_goes_down_lets_a_response_end_and_takes_no_other() -> None:
    go = asyncio.Event()

    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(1)
        sink.on_row(0, "a", 1)
        await go.wait()
        sink.on_row(0, "b", 1, RowExtras(end=STOP))

    async def use(client: Client, socket: Socket) -> None:
        await socket.create(input="x")
        await socket.create(input="waits")
        await socket.until("response.output_text.delta")
        client.gateway.is_draining = True
        client.app[CONTEXT].sockets.drain()
        (error,) = await socket.until("error")
        assert error["error"]["code"] == "server_shutting_down"
        error = await socket.error(input="x")
        assert error["status"] == 503
        go.set()
        assert text((await socket.until("response.completed"))[-1]["response"]) == "ab"
        assert await socket.closed() == aiohttp.WSCloseCode.GOING_AWAY
        assert await ROUTE.refused(client) == 503

    talk(use, script)


def test_who_may_not_call_may_not_connect() -> None:
    async def use(client: Client) -> None:
        assert await ROUTE.refused(client) == 401
        key = {"Authorization": "Bearer right"}
        assert await ROUTE.refused(client, **key, Origin="https://evil.example") == 403
        async with connected(client, headers=key) as socket:
            assert text(await socket.answer(input="x")) == "Hello world"

    run(use, config=ServerConfig(api_key=["right"]))


def test_a_plain_get_is_told_what_the_route_is_for() -> None:
    async def use(client: Client) -> None:
        status, body, response = await client.get(PATH)
        assert status == 426 and "Upgrade" in body["error"]["message"]
        assert response.headers["Upgrade"] == "websocket"

    run(use)


def test_a_message_above_the_limit_closes_the_connection() -> None:
    async def use(client: Client, socket: Socket) -> None:
        await socket.create(input="x" * 5000)
        assert await socket.closed() == aiohttp.WSCloseCode.MESSAGE_TOO_BIG

    talk(use, config=ServerConfig(max_body_bytes=4096))


@pytest.mark.slow
def test_messages_that_never_come_whole_are_held_against_the_bodies() -> None:
    async def use(client: Client) -> None:
        bodies = client.app[CONTEXT].bodies
        begin = struct.pack(">BBQ4s", 0x81, 0x80 | 127, 4 * 1024 * 1024, b"mask")
        async with connected(client) as first, connected(client) as second:
            for socket in (first, second):
                transport = socket.raw.get_extra_info("socket")
                assert transport is not None
                socket.raw._writer.transport.write(begin + bytes(300_000))  # type: ignore[union-attr]
                while bodies.used < 300_000:
                    await asyncio.sleep(0.01)
                bodies.limit = 500_000
            assert (await second.raw.receive()).type in (
                aiohttp.WSMsgType.CLOSED,
                aiohttp.WSMsgType.CLOSE,
                aiohttp.WSMsgType.ERROR,
            )
            assert not first.raw.closed and bodies.used <= 500_000
        while client.app[CONTEXT].sockets:
            await asyncio.sleep(0.01)
        assert bodies.used == 0

    run(use)


def test_a_large_steering_message_is_read_beside_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[str] = []

    def noted(work: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*given: Any, **named: Any) -> Any:
            threads.append(threading.current_thread().name)
            return work(*given, **named)

        return noting

    async def use(client: Client, socket: Socket) -> None:
        for name in ("decode_body", "failed_steer"):
            monkeypatch.setattr(sessions, name, noted(getattr(sessions, name)))
        with no_large_body_is_read(client) as waiting:
            await socket.steer("resp_none", "x" * 300_000)
            while not waiting():
                await asyncio.sleep(0.001)
            async with connected(client) as other:
                assert text(await other.answer(input="x")) == "Hello world"
            threads.clear()
        (failed,) = await socket.until("response.steer.failed")
        assert failed["error"]["code"] == "response_not_found"
        assert threads == ["large-body_0"] * 2

    talk(use)


def test_a_reader_that_reads_nothing_is_cut_off() -> None:
    async def flood(work: Work, sink: Sink) -> None:
        sink.on_accepted(1)
        while True:
            sink.on_row(0, "x" * 65536, 1)
            await asyncio.sleep(0)

    async def use(client: Client, socket: Socket) -> None:
        await socket.create(input="x")
        socket.raw.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_RCVBUF, 4096)
        await client.gateway.cancel_seen.wait()  # the client's buffer is bounded as well

    talk(use, flood)


def test_the_log_has_a_line_for_each_response(capfd: pytest.CaptureFixture[str]) -> None:
    async def use(client: Client) -> None:
        async with connected(client, headers={"x-request-id": "sock"}) as socket:
            await socket.answer(input="x")
            await socket.error(input="x", previous_response_id="resp_x")

    logs.set_up("frontend", "info", "json")
    logs.flush()
    capfd.readouterr()
    run(use, say("a"))
    logs.flush()
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    shown = [(one["id"], one["status"], one["route"], one.get("error")) for one in lines]
    assert shown == [
        ("sock-1", 200, PATH, None),
        ("sock-2", 400, PATH, "previous_response_not_found"),
    ]
