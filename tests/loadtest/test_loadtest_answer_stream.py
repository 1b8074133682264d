"""What counts as a token's time in a stream of events."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.counted import instructions

from penstock.loadtest.client.answer_stream import AnswerStream
from penstock.loadtest.client.http_response import ResponseReader

STREAM = {"content-type": "text/event-stream; charset=utf-8"}


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def text(piece: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": piece, "finish_reason": finish}]})


def delta(finish: str | None = None, **members: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": members, "finish_reason": finish}]})


def read(*pieces: bytes) -> AnswerStream:
    stream = AnswerStream(keep_text=True)
    stream.head(200, STREAM)
    for piece in pieces:
        stream.body(piece)
    stream.close()
    return stream


WHOLE = (
    b": hello\n\n" + text("a") + b"event: x\r\ndata: " + text("\n\nb\r\n")[6:-2] + b"\r\n\r\n"
    b'data: {"choices":\ndata: [{"text":"c"}]}\n\n' + text("d", "stop")
    + event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}})
    + b"data: [DONE]\n\n"
)  # fmt: skip


@given(cuts=st.lists(st.integers(0, len(WHOLE)), max_size=10))
@settings(max_examples=200, deadline=None)
def test_a_stream_reads_the_same_however_it_is_cut(cuts: list[int]) -> None:
    places = sorted({0, len(WHOLE), *cuts})
    stream = read(*(WHOLE[a:b] for a, b in pairwise(places)))
    assert stream.failure is None
    assert stream.done
    assert "".join(stream.text) == "a\n\nb\r\ncd"
    assert len(stream.stamps) == 4
    assert stream.usage is not None
    assert (stream.usage.prompt_tokens, stream.usage.completion_tokens) == (3, 5)
    assert stream.finish_reason == "stop"


def test_a_chunk_without_content_has_no_time() -> None:
    stream = read(
        delta(role="assistant", content=""), delta(content="a"), delta(), delta("stop", content="")
    )
    assert len(stream.stamps) == 1
    assert stream.failure is None


def test_a_content_of_null_is_none() -> None:
    assert not read(delta("stop", content=None, tool_calls=None)).stamps


@pytest.mark.parametrize(
    "members",
    [
        {"content": "a"},
        {"reasoning_content": "a"},
        {"reasoning": "a"},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
    ],
)
def test_reasoning_and_tool_calls_are_content(members: dict[str, Any]) -> None:
    assert len(read(delta("stop", **members)).stamps) == 1


def test_the_answer_ends_with_its_last_choice_and_not_with_usage() -> None:
    stream = AnswerStream()
    stream.head(200, STREAM)
    stream.body(text("a"))
    stream.body(delta("stop"))
    last = stream.last
    time.sleep(0.002)
    stream.body(event({"choices": [], "usage": {"completion_tokens": 1}}) + b"data: [DONE]\n\n")
    assert stream.close() is None
    assert stream.last == last > stream.stamps[0]


@pytest.mark.parametrize(
    ("pieces", "kind"),
    [
        ([text("a")], "truncated"),
        ([], "truncated"),
        ([b"data: [DONE]\n\n"], "no tokens"),
        ([text("a"), event({"error": {"message": "gone"}})], "error event"),
        ([b"data: {]\n\n", text("a", "stop")], "malformed"),
        ([b'data: {"choices": 3}\n\n'], "malformed"),
        ([b"data: " + b"x" * (17 * 2**20)], "malformed"),
    ],
)
def test_a_stream_that_is_not_whole_has_failed(pieces: list[bytes], kind: str) -> None:
    failure = read(*pieces).failure
    assert failure is not None
    assert failure.kind == kind


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "slow down"}}', "slow down"),
        (b'{"error": "slow down"}', "slow down"),
        (b"<html>slow down", "<html>slow down"),
        (b'{"detail": 1}', '{"detail": 1}'),
        (b"", ""),
    ],
)
def test_the_message_of_a_refusal_is_found(body: bytes, message: str) -> None:
    stream = AnswerStream()
    stream.head(503, {"content-type": "application/json"})
    if body:
        stream.body(body)
    failure = stream.close()
    assert failure is not None
    assert (failure.kind, failure.message) == ("http 503", message)


def test_an_event_takes_less_than_four_hundred_instructions() -> None:
    """HTTP chunk to time stamp, as our own server frames them; about 2 µs."""
    one = event(
        {
            "id": "cmpl-0123456789abcdef0123456789abcdef", "object": "text_completion",
            "created": 1, "model": "m" * 20,
            "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": None}],
            "usage": None,
        }
    )  # fmt: skip
    frame = b"%x\r\n%s\r\n" % (len(one), one)
    stream = AnswerStream()
    reader = ResponseReader(stream)
    reader.feed(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n"
    )
    for _ in range(2000):
        reader.feed(frame)
    assert max(instructions(lambda: reader.feed(frame)) for _ in range(100)) < 400
    assert len(stream.stamps) == 2100
