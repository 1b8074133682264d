"""Streams: framing, order, ends, usage, errors in the middle, keep-alive comments."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from support.frontend.frontend_scripted import (
    LENGTH,
    STOP,
    Client,
    parse_events,
    rejected,
    run,
    say,
)
from support.frontend.passing_time import PassingTime

from penstock.client.sink import RowExtras, Sink
from penstock.protocol.config.server_fields import ServerConfig
from penstock.protocol.wire.messages.requests import Work
from penstock.protocol.wire.messages.tokens import End, EndReason
from penstock.services.frontend.context import CONTEXT

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"prompt": "hi"}
UNICODE = ["é", "😀", "\n\n", "data: x\r\n", '"quoted\\"', "\u2028", "\x00", "漢字 ", "\ufeff"]
LINE_ENDS = [
    "a\x0bb\x0cc",
    "d\x1ce\x1df\x1e",
    "\x85",
    "g\u0085h",
    "\u2028i\u2029",
    "“j”—\u2028",
    "é\r\n",
]
"""All that ``str.splitlines`` takes for the end of a line."""


def texts(events: list[Any], index: int = 0) -> list[str]:
    found = []
    for event in events:
        if event == "[DONE]":
            continue
        for choice in event["choices"]:
            if choice["index"] == index:
                found.append(
                    choice["text"] if "text" in choice else choice["delta"].get("content", "")
                )
    return found


def test_a_chat_stream_has_one_id_a_role_with_the_first_content_and_a_done_at_the_end() -> None:
    async def use(client: Client) -> None:
        events = await client.events(CHAT, {**MESSAGES, "model": "alias"})
        assert events[-1] == "[DONE]"
        chunks = events[:-1]
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert chunks[0]["id"].startswith("chatcmpl-")
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert {chunk["model"] for chunk in chunks} == {"alias"}
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert deltas == [
            {"role": "assistant", "content": "Hello"},
            {"content": " there"},
            {"content": "!"},
        ]
        assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, "stop"]
        assert all("usage" not in chunk for chunk in chunks)

    run(use, say("Hello", " there", "!"))


def test_a_completion_stream_has_text_and_the_reason_of_its_end() -> None:
    async def use(client: Client) -> None:
        events = await client.events(TEXT, PROMPT)
        assert events[0]["id"].startswith("cmpl-")
        assert events[0]["object"] == "text_completion"
        assert texts(events) == ["a", "b"]
        assert [e["choices"][0]["finish_reason"] for e in events[:-1]] == [None, "length"]

    run(use, say("a", "b", end=LENGTH))


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_any_text_survives_the_framing(path: str) -> None:
    async def use(client: Client) -> None:
        events = await client.events(path, {**(MESSAGES if path == CHAT else PROMPT)})
        assert "".join(texts(events)) == "".join(UNICODE)

    run(use, say(*UNICODE))


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_clients_that_split_lines_at_any_line_end_get_whole_events(path: str) -> None:
    """As ``httpx.Response.iter_lines`` does."""

    async def use(client: Client) -> None:
        body = {**(MESSAGES if path == CHAT else PROMPT), "stream": True}
        async with client.session.post(client.url + path, json=body) as response:
            lines = (await response.text()).splitlines()
        assert all(line.startswith("data: ") for line in lines if line)
        events = [json.loads(line[6:]) for line in lines if line and line != "data: [DONE]"]
        assert "".join(texts(events)) == "".join(LINE_ENDS)

    run(use, say(*LINE_ENDS))


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_whole_answers_stay_on_one_line(path: str) -> None:
    async def use(client: Client) -> None:
        body = MESSAGES if path == CHAT else PROMPT
        async with client.session.post(client.url + path, json=body) as response:
            text = await response.text()
        assert len(text.splitlines()) == 1
        (choice,) = json.loads(text)["choices"]
        found = choice["text"] if path == TEXT else choice["message"]["content"]
        assert found == "".join(LINE_ENDS)

    run(use, say(*LINE_ENDS))


def test_rows_without_text_write_nothing_but_count_as_tokens() -> None:
    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(2)
        await asyncio.sleep(0.02)
        sink.on_row(0, "", 1)
        sink.on_row(0, "", 2)
        sink.on_row(0, "ab", 1)
        await asyncio.sleep(0.02)
        sink.on_row(0, "", 0, RowExtras(end=STOP))

    async def use(client: Client) -> None:
        body = {**MESSAGES, "stream_options": {"include_usage": True}}
        events = await client.events(CHAT, body)
        assert texts(events) == ["ab", ""]
        assert events[-2]["usage"]["completion_tokens"] == 4

    run(use, script)


def test_an_answer_without_any_text_still_has_role_and_finish_reason() -> None:
    async def use(client: Client) -> None:
        events = await client.events(CHAT, MESSAGES)
        choice = events[0]["choices"][0]
        assert choice["delta"] == {"role": "assistant", "content": ""}
        assert choice["finish_reason"] == "stop"
        assert events[1:] == ["[DONE]"]

    run(use, say(""))


def test_the_usage_chunk_comes_last_without_choices_and_only_when_asked_for() -> None:
    async def use(client: Client) -> None:
        body = {**MESSAGES, "stream_options": {"include_usage": True}}
        events = await client.events(CHAT, body)
        assert all(event["usage"] is None for event in events[:-2])
        assert events[-2]["choices"] == []
        assert events[-2]["usage"] == {
            "prompt_tokens": 7,
            "completion_tokens": 2,
            "total_tokens": 9,
            "prompt_tokens_details": {"cached_tokens": 4},
        }
        assert events[-1] == "[DONE]"

    run(use, say("a", "b", prompt_tokens=7, cached=4))


def test_continuous_usage_counts_up_in_every_chunk() -> None:
    async def use(client: Client) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = await client.events(TEXT, {**PROMPT, "stream_options": options})
        counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
        assert counts == [1, 2, 3, 3]

    run(use, say("a", "b", "c"))


def test_choices_of_one_prompt_are_streamed_side_by_side() -> None:
    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(1)
        for choice in (2, 0, 1, 0):
            sink.on_row(choice, f"<{choice}>", 1)
        await asyncio.sleep(0.01)
        for choice in (1, 2, 0):
            sink.on_row(choice, "", 1, RowExtras(end=STOP if choice else LENGTH))

    async def use(client: Client) -> None:
        events = await client.events(CHAT, {**MESSAGES, "n": 3})
        assert ["".join(texts(events, index)) for index in range(3)] == ["<0><0>", "<1>", "<2>"]
        ends = {
            event["choices"][0]["index"]: event["choices"][0]["finish_reason"]
            for event in events[:-1]
            if event["choices"][0]["finish_reason"]
        }
        assert ends == {0: "length", 1: "stop", 2: "stop"}
        roles = [
            event["choices"][0]["index"]
            for event in events[:-1]
            if "role" in event["choices"][0]["delta"]
        ]
        assert sorted(roles) == [0, 1, 2]

    gateway = run(use, script)
    assert [state.choice for state in gateway.works[0].choices] == [0, 1, 2]
    assert gateway.cancelled == []


def test_choices_of_several_prompts_are_numbered_through() -> None:
    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(1)
        assert not isinstance(work.prompt, bytes)
        name = getattr(work.prompt, "text", "?")
        for choice in work.choices:
            sink.on_row(choice.choice, f"{name}{choice.choice}", 1, RowExtras(end=STOP))

    async def use(client: Client) -> None:
        events = await client.events(TEXT, {"prompt": ["p", "q"], "n": 2})
        assert [texts(events, index) for index in range(4)] == [["p0"], ["p1"], ["q0"], ["q1"]]
        status, answer, _ = await client.post(TEXT, {"prompt": ["p", "q"], "n": 2})
        assert status == 200
        assert [(c["index"], c["text"]) for c in answer["choices"]] == [
            (0, "p0"),
            (1, "p1"),
            (2, "q0"),
            (3, "q1"),
        ]
        assert answer["usage"]["prompt_tokens"] == 2

    run(use, script)


def test_no_status_goes_out_before_acceptance() -> None:
    release = asyncio.Event()

    async def script(work: Work, sink: Sink) -> None:
        await release.wait()
        await say("late")(work, sink)

    async def use(client: Client) -> None:
        body = json.dumps({**PROMPT, "stream": True}).encode()
        posting = asyncio.ensure_future(client.session.post(client.url + TEXT, data=body))
        done, _ = await asyncio.wait([posting], timeout=0.1)
        assert not done
        release.set()
        async with await posting as response:
            assert response.status == 200
            assert texts(parse_events(await response.read())) == ["late"]

    run(use, script)


def test_a_stream_rejected_before_acceptance_gets_the_status_of_the_rejection() -> None:
    async def script(work: Work, sink: Sink) -> None:
        sink.on_rejected(rejected(429, "queue full", kind="overloaded_error", retry_after=2.3))

    async def use(client: Client) -> None:
        status, answer, response = await client.post(TEXT, {**PROMPT, "stream": True})
        assert status == 429
        assert answer["error"]["message"] == "queue full"
        assert answer["error"]["type"] == "overloaded_error"
        assert response.headers["Retry-After"] == "3"

    run(use, script)


def test_one_rejected_prompt_ends_all_prompts_of_the_request() -> None:
    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(1)
        if getattr(work.prompt, "text", "") == "bad":
            sink.on_rejected(rejected(400, "bad one", param="prompt"))
        await asyncio.sleep(60)

    async def use(client: Client) -> None:
        status, answer, _ = await client.post(TEXT, {"prompt": ["x", "bad", "y"]})
        assert (status, answer["error"]["message"]) == (400, "bad one")

    gateway = run(use, script)
    assert 1 in gateway.cancelled and 3 in gateway.cancelled


@pytest.mark.parametrize("how", ["rejected", "ended"])
def test_an_error_in_the_middle_is_an_event_and_no_done_follows(how: str) -> None:
    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(1)
        sink.on_row(0, "begun", 1)
        await asyncio.sleep(0.01)
        if how == "rejected":
            sink.on_rejected(rejected(503, "engine lost", kind="server_error"))
        else:
            end = End(0, EndReason.ERROR, message="engine lost", status=503)
            sink.on_row(0, "", 0, RowExtras(end=end))

    async def use(client: Client) -> None:
        events = await client.events(CHAT, MESSAGES)
        assert texts(events[:1]) == ["begun"]
        assert events[1:] == [
            {
                "error": {
                    "message": "engine lost",
                    "type": "server_error",
                    "param": None,
                    "code": None,
                }
            }
        ]
        status, answer, _ = await client.post(CHAT, MESSAGES)
        assert status == 503
        assert answer["error"]["message"] == "engine lost"

    run(use, script)


def test_a_silent_stream_gets_comments_and_a_talking_one_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sinks: list[Sink] = []

    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(1)
        sinks.append(sink)

    async def use(client: Client) -> None:
        clock = client.app[CONTEXT].clock
        body = json.dumps({**PROMPT, "stream": True}).encode()
        with monkeypatch.context() as patched:
            time = PassingTime(patched, stands=True)
            patched.setattr(clock, "now", time.now)
            response = await client.session.post(client.url + TEXT, data=body)
            while not clock._streams:
                await asyncio.sleep(0)
            for _ in range(14):  # eighths of a second: three halves, and a quarter
                await time.passes(0.125)
            for _ in range(25):
                sinks[0].on_row(0, "x", 1)
                await time.passes(0.0)
                await time.passes(0.375)
            sinks[0].on_row(0, "", 0, RowExtras(end=STOP))
            raw = await response.read()
            response.close()
        before, _, after = raw.partition(b"data: ")
        assert before.count(b": keep-alive\n\n") == 3
        assert b": keep-alive" not in after
        assert len(texts(parse_events(raw))) == 26

    run(use, script, ServerConfig(keep_alive_comment_s=0.5))


def test_a_connection_serves_further_requests_after_a_stream() -> None:
    async def read_answer(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
        head = await reader.readuntil(b"\r\n\r\n")
        body = b""
        if b"chunked" in head:
            while size := int(await reader.readline(), 16):
                body += await reader.readexactly(size)
                assert await reader.readexactly(2) == b"\r\n"
            assert await reader.readexactly(2) == b"\r\n"
        else:
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            body = await reader.readexactly(length)
        return head, body

    async def use(client: Client) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        for stream in (True, True, False, True):
            body = json.dumps({**PROMPT, "stream": stream}).encode()
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
            writer.write(b"Content-Type: application/json\r\nContent-Length: ")
            writer.write(b"%d\r\n\r\n%s" % (len(body), body))
            head, answer = await read_answer(reader)
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
            if stream:
                assert texts(parse_events(answer)) == ["Hello", " world"]
            else:
                assert json.loads(answer)["choices"][0]["text"] == "Hello world"
        writer.close()

    run(use)


def test_an_http_1_0_client_gets_the_events_bare_and_then_the_end() -> None:
    async def use(client: Client) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        body = json.dumps({**PROMPT, "stream": True}).encode()
        writer.write(b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\n")
        writer.write(b"Content-Length: %d\r\n\r\n" % len(body))
        writer.write(body)
        head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
        assert b" 200 " in head
        assert b"chunked" not in head.lower()
        assert texts(parse_events(rest)) == ["Hello", " world"]
        writer.close()

    run(use)


def test_draining_closes_connections_after_their_answer() -> None:
    async def use(client: Client) -> None:
        client.gateway.is_draining = True
        _, _, response = await client.get("/live")
        assert response.headers["Connection"] == "close"
        body = json.dumps({**PROMPT, "stream": True}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
        writer.write(b"Content-Type: application/json\r\nContent-Length: ")
        writer.write(b"%d\r\n\r\n%s" % (len(body), body))
        answer = await reader.read()  # ends only because the server closes
        assert b"Connection: close\r\n" in answer
        assert b"data: [DONE]" in answer
        writer.close()

    run(use)


def test_rows_of_one_turn_are_written_as_one_chunk() -> None:
    async def script(work: Work, sink: Sink) -> None:
        sink.on_accepted(1)
        await asyncio.sleep(0.05)
        for _ in range(3):
            for choice in range(4):
                sink.on_row(choice, "x", 1)
            await asyncio.sleep(0.05)
        for choice in range(4):
            sink.on_row(choice, "", 0, RowExtras(end=STOP))

    async def use(client: Client) -> None:
        body = json.dumps({**PROMPT, "stream": True, "n": 4}).encode()
        async with client.session.post(client.url + TEXT, data=body) as response:
            sizes = []
            async for data, is_end in response.content.iter_chunks():
                if is_end and data:
                    sizes.append(data.count(b"data: "))
        assert sizes[:4] == [4, 4, 4, 4]

    run(use, script)
