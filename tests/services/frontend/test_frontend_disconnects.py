"""Clients that leave, and clients that read slowly or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import socket
from typing import Any

import pytest
from aiohttp import web
from support.frontend.frontend_scripted import (
    LENGTH,
    STOP,
    Client,
    forever,
    logprobs_of_a_token,
    parse_events,
    run,
    say,
    waiting,
)
from support.polling import async_until

from penstock.client.sink import RowExtras, Sink
from penstock.protocol.config.server_fields import ServerConfig
from penstock.protocol.wire.messages.requests import Work
from penstock.services.frontend.context import CONTEXT
from penstock.services.frontend.stream import STALL_S, EventStream

PATH = "/v1/completions"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def request_bytes(**fields: Any) -> bytes:
    body = json.dumps({"prompt": "x", **fields}).encode()
    return b"%sContent-Length: %d\r\n\r\n%s" % (POST, len(body), body)


async def connect(client: Client, *, receive_buffer: int | None = None) -> socket.socket:
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", client.port))
    return sock


async def was_cut_off(sock: socket.socket) -> bool:
    """Read to the end of the connection: whether the last chunk of the answer is missing."""
    end = b""
    try:
        while data := await asyncio.get_running_loop().sock_recv(sock, 1 << 20):
            end = (end + data)[-20:]
    except ConnectionResetError:
        return True
    return not end.endswith(b"\r\n0\r\n\r\n")


def open_streams(client: Client) -> int:
    return len(client.app[CONTEXT].clock._streams)


async def accepted_and_silent(work: Work, sink: Sink) -> None:
    sink.on_accepted(1)
    await asyncio.sleep(60)


@pytest.mark.parametrize("script", [waiting, accepted_and_silent, forever])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("reset", [True, False])
def test_a_client_that_leaves_cancels_its_request(script: Any, stream: bool, reset: bool) -> None:
    """Two of the scripts write nothing by which it could be noticed later."""

    async def use(client: Client) -> None:
        loop = asyncio.get_running_loop()
        sock = await connect(client)
        await loop.sock_sendall(sock, request_bytes(stream=stream, n=2))
        await async_until(lambda: client.gateway.works)
        await asyncio.sleep(0.03)
        assert client.gateway.cancelled == []
        if reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        sock.close()
        await client.gateway.cancel_seen.wait()
        await asyncio.sleep(0.02)
        assert client.gateway.cancelled == [1]
        _, text, _ = await client.get("/metrics")
        assert b'requests_finished_total{reason="abort"} 2.0\n' in text

    run(use, script)


def test_all_prompts_of_a_client_that_leaves_are_cancelled() -> None:
    async def use(client: Client) -> None:
        sock = await connect(client)
        await asyncio.get_running_loop().sock_sendall(sock, request_bytes(prompt=["a", "b", "c"]))
        await async_until(lambda: len(client.gateway.works) == 3)
        sock.close()
        await async_until(lambda: len(client.gateway.cancelled) == 3)
        assert sorted(client.gateway.cancelled) == [1, 2, 3]

    run(use, waiting)


def test_a_finished_request_is_not_cancelled() -> None:
    async def use(client: Client) -> None:
        for stream in (True, False):
            async with client.session.post(
                client.url + PATH, json={"prompt": "x", "stream": stream, "n": 3}
            ) as response:
                await response.read()

    assert run(use, say("a", "b")).cancelled == []


def test_a_slow_reader_gets_all_text_merged_into_few_events() -> None:
    rows, piece = 30_000, "word "
    sent = asyncio.Event()

    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(1)
        await asyncio.sleep(0.05)
        for row in range(rows):
            sink.on_row(0, piece, 1)
            if row % 100 == 0:
                await asyncio.sleep(0)
        sink.on_row(0, "", 0, RowExtras(end=STOP))
        sent.set()

    async def use(client: Client) -> None:
        loop = asyncio.get_running_loop()
        sock = await connect(client, receive_buffer=4096)
        request = request_bytes(stream=True, stream_options={"include_usage": True})
        await loop.sock_sendall(sock, request)
        await sent.wait()
        await asyncio.sleep(0.1)
        raw = b""
        while b"[DONE]" not in raw:
            raw += await loop.sock_recv(sock, 1 << 20)
        sock.close()
        events = parse_events(dechunk(raw.partition(b"\r\n\r\n")[2]))
        text = "".join(e["choices"][0]["text"] for e in events[:-2])
        assert text == piece * rows
        assert events[-2]["usage"]["completion_tokens"] == rows
        assert len(events) < rows

    assert run(use, script).cancelled == []


def dechunk(raw: bytes) -> bytes:
    out = b""
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        out += raw[: int(size, 16)]
        raw = raw[int(size, 16) + 2 :]
        if int(size, 16) == 0:
            break
    return out


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
def test_a_reader_is_not_cut_off_for_the_size_of_a_legal_answers_steps(path: str) -> None:
    """128 choices with 20 logprobs are more than 250 KB a step."""
    steps, choices = 24, 128
    all_said = asyncio.Event()

    async def script(work: Work, sink: Sink) -> None:
        details = logprobs_of_a_token(20)
        sink.on_accepted(1)
        for step in range(steps):
            await asyncio.sleep(0.005)
            for choice in range(choices):
                end = LENGTH if step == steps - 1 else None
                sink.on_row(choice, " token", 1, RowExtras(end=end, details=details))
        all_said.set()

    async def use(client: Client) -> None:
        chat = path != PATH
        logprobs = {"logprobs": True, "top_logprobs": 20} if chat else {"logprobs": 20}
        prompt = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
        body = {**prompt, **logprobs, "n": choices, "stream": True}
        loop, data = asyncio.get_running_loop(), json.dumps(body).encode()
        sock = await connect(client, receive_buffer=4096)
        head = POST.replace(PATH.encode(), path.encode())
        await loop.sock_sendall(sock, b"%bContent-Length: %d\r\n\r\n%b" % (head, len(data), data))
        await all_said.wait()  # meanwhile it takes no more than a buffer
        raw = b""
        while not raw.endswith(b"0\r\n\r\n") and (piece := await loop.sock_recv(sock, 1 << 20)):
            raw += piece
        sock.close()
        events = parse_events(dechunk(raw.partition(b"\r\n\r\n")[2]))
        assert events.pop() == "[DONE]"
        listed = 0
        for event in events:
            for choice in event["choices"]:
                found = choice["logprobs"]
                if found is not None:
                    listed += len(found["content"] if chat else found["tokens"])
        assert listed == steps * choices

    assert run(use, script).cancelled == []


def test_a_reader_that_falls_too_far_behind_is_given_up_and_its_memory_is_bounded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    written = 0

    async def script(work: Work, sink: Sink) -> None:
        nonlocal written
        sink.on_accepted(1)
        await asyncio.sleep(0.05)
        while True:
            sink.on_row(0, "x" * 8000, 1)
            written += 8000
            await asyncio.sleep(0)

    async def use(client: Client) -> None:
        loop = asyncio.get_running_loop()
        sock = await connect(client, receive_buffer=4096)
        await loop.sock_sendall(sock, request_bytes(stream=True))
        await client.gateway.cancel_seen.wait()
        assert client.gateway.cancelled == [1]
        assert written < 16 * 1024 * 1024  # the kernel's buffers and 256 KiB
        assert await was_cut_off(sock)
        sock.close()

    run(use, script)
    (record,) = [record for record in caplog.records if "cut off" in record.getMessage()]
    line = record.getMessage()
    assert re.search(r"is cut off: \d{6} bytes wait for it; 262144 may$", line)
    assert record.__dict__["id"].startswith("req-")


@pytest.mark.parametrize("ends", [True, False])
def test_a_reader_that_takes_nothing_for_too_long_is_given_up(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = asyncio.Event()

    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(1)
        await asyncio.sleep(0.05)
        for _ in range(80):  # more than the kernel's buffers take, less than the limit
            sink.on_row(0, "x" * 50_000, 1)
            await asyncio.sleep(0.001)
            if held(sink):
                break
        sink.on_row(0, "x" * 70_000, 1, RowExtras(end=STOP) if ends else None)
        told.set()
        await asyncio.sleep(60)

    def held(sink: Any) -> bool:
        return bool(sink.answers[0]._stream.held)

    async def use(client: Client) -> None:
        loop = asyncio.get_running_loop()
        sock = await connect(client, receive_buffer=4096)
        now = 0.0
        monkeypatch.setattr(client.app[CONTEXT].clock, "now", lambda: now)
        await loop.sock_sendall(sock, request_bytes(stream=True))
        await told.wait()
        assert open_streams(client) == 1
        while open_streams(client):  # the kernel may take some more, which counts as progress
            now += STALL_S + 1
            await asyncio.sleep(0.01)
        assert await was_cut_off(sock)
        sock.close()
        assert client.gateway.cancelled == ([] if ends else [1])

    run(use, script)


def test_a_stream_that_fails_takes_no_other_along(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush = EventStream.flush

    def failing(stream: EventStream, now: float) -> None:
        if any(b"poison" in frame for frame in stream.pending):
            raise RuntimeError("poisoned")
        flush(stream, now)

    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(1)
        for _ in range(10):
            await asyncio.sleep(0.01)
            sink.on_row(0, work.head.tenant, 1)
        sink.on_row(0, "", 0, RowExtras(end=STOP))

    async def use(client: Client) -> None:
        monkeypatch.setattr(EventStream, "flush", failing)
        users = ["good", "poison", "fine"]
        answers = await asyncio.gather(
            *(client.events(PATH, {"prompt": "x", "user": user}) for user in users),
            return_exceptions=True,
        )
        assert [isinstance(answer, list) for answer in answers] == [True, False, True]
        assert len(client.gateway.cancelled) == 1

    gateway = run(use, script)
    assert "poisoned" in caplog.text
    (name,) = (work.head.request_id for work in gateway.works if work.head.tenant == "poison")
    assert {getattr(line, "id", "") for line in caplog.records} == {name}


def test_no_timer_is_left_when_no_stream_is_open() -> None:
    async def use(client: Client) -> None:
        assert not client.app[CONTEXT].clock._ticking
        await client.events(PATH, {"prompt": "x"})
        assert open_streams(client) == 0
        await async_until(lambda: not client.app[CONTEXT].clock._ticking)

    run(use, config=ServerConfig(keep_alive_comment_s=0.2))


def finished(client: Client) -> float:
    """Requests that have ended or were cancelled."""
    samples = client.gateway.registry.report().samples
    found = [one for one in samples if one.name == "requests_finished_total"]
    ends = {tuple(one.labels): one.values[0] for one in found}
    return ends.get(("stop",), 0) + ends.get(("abort",), 0)


def test_four_hundred_requests_cancelled_at_random_end_exactly_once() -> None:
    async def script(work: Work, sink: Sink) -> None:
        draw = random.Random(work.params.seed)
        await asyncio.sleep(draw.random() * 0.02)
        sink.on_accepted(1)
        for _ in range(draw.randrange(5)):
            await asyncio.sleep(draw.random() * 0.01)
            sink.on_row(0, "ab", 1)
        sink.on_row(0, "", 1, RowExtras(end=STOP))

    async def one(client: Client, seed: int, gate: asyncio.Semaphore) -> bool:
        draw = random.Random(-seed)
        body = {"prompt": "x", "seed": seed, "stream": draw.random() < 0.5}
        async with gate:
            posting = asyncio.ensure_future(
                client.post(PATH, body) if not body["stream"] else client.events(PATH, body)
            )
            if draw.random() < 0.2:
                await asyncio.sleep(draw.random() * 0.03)
                posting.cancel()
            try:
                await posting
            except asyncio.CancelledError:
                return False
            return True

    async def use(client: Client) -> None:
        gate = asyncio.Semaphore(50)
        done = await asyncio.gather(*(one(client, seed, gate) for seed in range(400)))
        assert done.count(True) >= 300
        await async_until(lambda: finished(client) >= len(client.gateway.works))
        await asyncio.sleep(0.05)
        assert finished(client) == len(client.gateway.works)

    run(use, script)


def test_a_client_that_leaves_as_the_headers_go_out_is_no_error_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prepare = web.StreamResponse.prepare

    async def prepare_too_late(response: web.StreamResponse, request: web.BaseRequest) -> Any:
        assert request.transport is not None
        request.transport.abort()
        return await prepare(response, request)

    async def use(client: Client) -> None:
        for stream in (True, False):
            sock = await connect(client)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(sock, request_bytes(stream=stream))
            with contextlib.suppress(ConnectionResetError):
                assert await loop.sock_recv(sock, 1000) == b""
            sock.close()

    with monkeypatch.context() as patched:
        patched.setattr(web.StreamResponse, "prepare", prepare_too_late)
        run(use, say("yes"))
    assert caplog.records == []
