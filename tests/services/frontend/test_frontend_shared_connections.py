"""Requests that share a WebSocket: what one of them leaves waiting is not held against another."""

from __future__ import annotations

import asyncio
import socket as sockets
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from support.frontend.frontend_scripted import (
    LENGTH,
    STOP,
    Client,
    Script,
    ScriptedGateway,
    logprobs_of_a_token,
    run,
)
from support.frontend.multiplex_client import PATH, Socket, said, text

from penstock.client.sink import RowExtras
from penstock.protocol.wire.messages.requests import Work

CHOICES = 128
LOGPROBS = {"n": CHOICES, "logprobs": True, "top_logprobs": 20}
"""More than 250 KB a step, which is legal."""


def small_socket(address: aiohttp.AddrInfoType) -> sockets.socket:
    """The kernel keeps no more than a few KB of what the client does not read."""
    found = sockets.socket(*address[:3])
    found.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, 4096)
    return found


def talk_slowly(use: Callable[[Socket], Awaitable[None]], script: Script) -> ScriptedGateway:
    async def connect(client: Client) -> None:
        connector = aiohttp.TCPConnector(socket_factory=small_socket)
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.ws_connect(client.url + PATH, max_msg_size=0) as raw,
        ):
            await use(Socket(raw))

    return run(connect, script)


def test_a_reader_is_not_cut_off_for_the_size_of_a_neighbours_steps() -> None:
    heavy_is_held, plain_has_ended = asyncio.Event(), asyncio.Event()
    steps = 0

    async def script(work: Work, sink: Any) -> None:
        nonlocal steps
        sink.on_accepted(1)
        if said(work) == "plain":
            await heavy_is_held.wait()
            for _ in range(50):
                sink.on_row(0, "word ", 1)
                await asyncio.sleep(0)
            sink.on_row(0, ".", 1, RowExtras(end=STOP))
            plain_has_ended.set()
            return
        details = logprobs_of_a_token(20)
        while not plain_has_ended.is_set():
            for _ in range(4):  # written at once
                steps += 1
                for choice in range(CHOICES):
                    sink.on_row(choice, " token", 1, RowExtras(details=details))
            await asyncio.sleep(0.005)
            if sink.answers[0]._stream._held_bytes > 300_000:
                heavy_is_held.set()
                await plain_has_ended.wait()
        for choice in range(CHOICES):
            sink.on_row(choice, "", 0, RowExtras(end=LENGTH))

    async def use(socket: Socket) -> None:
        await socket.chat("plain", "plain")
        await socket.chat("heavy", "heavy", **LOGPROBS)
        await plain_has_ended.wait()
        assert text(await socket.frames("plain")) == "word " * 50 + "."
        heavy = await socket.frames("heavy")
        listed = [one["logprobs"]["content"] for one in heavy if one.get("logprobs")]
        assert sum(map(len, listed)) == steps * CHOICES

    assert talk_slowly(use, script).cancelled == []


def test_a_request_ends_though_a_neighbours_frames_have_just_gone_out() -> None:
    """Both wait for the reader; when it has caught up, what one holds goes out before the end of
    the other."""
    is_full, has_ended, is_held = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def script(work: Work, sink: Any) -> None:
        sink.on_accepted(1)
        if said(work) == "ends":
            await is_full.wait()
            sink.on_row(0, ".", 1, RowExtras(end=STOP))
            has_ended.set()
            return
        await asyncio.sleep(0.02)  # its stream has started
        stream = sink.answers[0]._stream
        while stream._transport.get_write_buffer_size() <= 24 * 1024:
            sink.on_row(0, "x" * 8192, 1)
            await asyncio.sleep(0)
        is_full.set()
        await has_ended.wait()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for _ in range(160):
            sink.on_row(0, "x" * 50_000, 1)
            await asyncio.sleep(0)
        assert stream.held
        sink.on_row(0, ".", 1, RowExtras(end=STOP))
        for choice in range(1, CHOICES):
            sink.on_row(choice, ".", 1, RowExtras(end=STOP))
        is_held.set()

    async def use(socket: Socket) -> None:
        await socket.chat("goes on", "goes on", **LOGPROBS)
        await socket.chat("ends", "ends")
        await is_held.wait()
        assert (await socket.frames("ends"))[-1]["type"] == "end"
        assert len(text(await socket.frames("goes on"))) > 8_000_000

    assert talk_slowly(use, script).cancelled == []
