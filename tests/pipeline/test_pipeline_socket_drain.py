"""A server goes down while WebSockets are open."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import aiohttp
import psutil
from support.pipeline.served import NULL, Served, SharedServers

Frame = dict[str, Any]
TOKENS = 100
"""Of an answer that runs when the signal comes."""


async def frame_of(socket: aiohttp.ClientWebSocketResponse) -> Frame:
    frame: Frame = await socket.receive_json(timeout=30)
    return frame


def asked(name: str, tokens: int) -> Frame:
    body = {"prompt": "hello", "max_tokens": tokens, "ignore_eos": True}
    return {"id": name, "type": "completion", "body": body}


def created(tokens: int, lane: str) -> Frame:
    fields = {"input": "hello", "max_output_tokens": tokens, "ignore_eos": True}
    return {"type": "response.create", "stream_id": lane, **fields}


async def end_of(socket: aiohttp.ClientWebSocketResponse, ends: dict[str, Frame]) -> None:
    """Take a frame, and keep it by its request where it ends one."""
    frame = await frame_of(socket)
    if frame["type"] in ("end", "error"):
        ends[frame["id"]] = frame


def workers(server: Served) -> list[psutil.Process]:
    return [one for one in server.processes().values() if server.role_of(one) == "worker"]


def test_running_requests_end_new_ones_are_refused_and_the_connections_are_closed(
    shared_server: SharedServers,
) -> None:
    async def use(server: Served) -> None:
        address = server.url.replace("http", "ws")
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"{address}/v1/stream") as idle,
            session.ws_connect(f"{address}/v1/stream") as stream,
            session.ws_connect(f"{address}/v1/responses") as responses,
        ):
            await stream.send_json(asked("a", TOKENS))
            await responses.send_json(created(TOKENS, "runs"))
            assert (await frame_of(stream))["type"] == "text"
            while (await frame_of(responses))["type"] != "response.output_text.delta":
                pass
            (worker,) = workers(server)
            worker.suspend()  # what runs cannot end before the others have been refused
            server.process.send_signal(signal.SIGTERM)
            assert (await idle.receive(timeout=30)).data == aiohttp.WSCloseCode.GOING_AWAY
            await stream.send_json(asked("new", 1))
            await responses.send_json(created(1, "new"))
            ends = dict[str, Frame]()
            events = list[Frame]()
            while "new" not in ends:
                await end_of(stream, ends)
            while not events or events[-1]["type"] != "error":
                events.append(await frame_of(responses))
            worker.resume()
            while "a" not in ends:
                await end_of(stream, ends)
            while events[-1]["type"] != "response.incomplete":
                events.append(await frame_of(responses))
            assert ends["a"]["choices"][0]["finish_reason"] == "length"
            assert ends["a"]["usage"]["completion_tokens"] == TOKENS
            assert events[-1]["response"]["usage"]["output_tokens"] == TOKENS
            (error,) = [event for event in events if event["type"] == "error"]
            for refusal in (ends["new"], error):
                status, code = refusal["status"], refusal["error"]["code"]
                assert (status, code) == (503, "server_shutting_down")
            for socket in (stream, responses):
                closed = await socket.receive(timeout=30)
                assert closed.data == aiohttp.WSCloseCode.GOING_AWAY
                assert "shutting down" in closed.extra
        assert await asyncio.to_thread(server.process.wait, 30) == 0

    with shared_server.ending(*NULL) as server:
        asyncio.run(use(server))
