"""Bytes that are no HTTP are answered like everything else: JSON, an id, and the cause."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
from support.frontend.frontend_scripted import Client, run

POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
GET = b"GET /live HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"

MALFORMED: dict[str, tuple[bytes, str]] = {
    # bytes, words in the message
    "an_unknown_method": (b"GARBAGE\r\n\r\n", "GARBAGE"),
    "an_unknown_version": (b"GET /live HTTP/9.9\r\nHost: localhost\r\n\r\n", "HTTP/9.9"),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", "HTTPS"),
    "a_url_that_is_none": (b"GET http://[::1 HTTP/1.1\r\nHost: localhost\r\n\r\n", "URL http://[::1"),
    "a_long_url": (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", "8190"),
    "a_space_in_a_header's_name": (GET + b"Bad Header: 1\r\n\r\n", "header Bad"),
    "a_null_in_a_header": (GET + b"A: \x00\r\n\r\n", "header"),
    "a_long_header": (GET + b"A: " + b"x" * 9000 + b"\r\n\r\n", "8190"),
    "many_headers": (GET + b"A: b\r\n" * 500 + b"\r\n", "headers"),
    "no_host": (b"GET /live HTTP/1.1\r\n\r\n", "Host"),
    "a_length_that_is_no_number": (POST + b"Content-Length: abc\r\n\r\n", "Content-Length abc"),
    "a_negative_length": (POST + b"Content-Length: -1\r\n\r\n", "Content-Length -1"),
    "a_length_past_64_bits": (POST + b"Content-Length: 9" + b"9" * 30 + b"\r\n\r\n", "overflow"),
    "two_lengths": (POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello", "Length: 6"),
    "length_and_chunks": (
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nhello",
        "Transfer-Encoding Content-Length",
    ),
    "an_unknown_transfer_encoding": (
        POST + b"Transfer-Encoding: bogus\r\n\r\nhello", "Transfer-Encoding"
    ),
    "a_chunk_size_that_is_no_number": (CHUNKED + b"zz\r\nhello\r\n", "chunk zz"),
    "a_compression_that_is_not_read": (
        POST + b"Content-Encoding: br\r\nContent-Length: 5\r\n\r\nhello", "br gzip deflate"
    ),
    "a_chunk_longer_than_its_size": (CHUNKED + b"5\r\nhelloXX5\r\n", "chunk"),
}  # fmt: skip

IN_PARTS: dict[str, list[bytes]] = {
    "a_bad_first_chunk": [CHUNKED, b"zz\r\nhello\r\n"],
    "a_bad_later_chunk": [CHUNKED + b"5\r\nhello\r\n", b"zz\r\n"],
    "a_chunk_that_does_not_end": [CHUNKED, b"5\r\nhelloXX\r\n"],
}
"""The request line and headers are in order; the handler already waits for the body."""


async def exchange(client: Client, *parts: bytes) -> bytes:
    """Send the parts one by one; returns all that came until the server closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    for part in parts:
        writer.write(part)
        await asyncio.sleep(0.05 if len(parts) > 1 else 0)
    async with asyncio.timeout(60):
        answer = await reader.read()
    writer.close()
    return answer


def check_answer(raw: bytes, case: str) -> str:
    """Exactly one 400 in the shape of all errors; returns its message."""
    head, _, body = raw.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    assert status.split()[1] == "400", (case, raw)
    assert headers["content-type"] == "application/json", case
    assert headers["x-request-id"].startswith("req-"), case
    assert headers["server"] == "penstock", case
    assert headers["x-content-type-options"] == "nosniff", case
    assert int(headers["content-length"]) == len(body), (case, raw)
    answer = json.loads(body)
    assert set(answer) == {"error"}, case
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}, case
    assert error["type"] == "invalid_request_error", case
    assert error["message"].isprintable(), case
    assert len(error["message"]) < 400, case
    return str(error["message"])


def test_malformed_http_is_answered_in_the_shape_of_all_errors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def use(client: Client) -> None:
        for case, (data, words) in MALFORMED.items():
            message = check_answer(await exchange(client, data), case)
            for word in words.split():
                assert word in message, (case, message)
        assert (await client.get("/live"))[0] == 200

    gateway = run(use)
    assert gateway.works == []
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []
    counted = [
        sample.values
        for sample in gateway.registry.report().samples
        if sample.name == "http_requests_total" and sample.labels == ["other", "400"]
    ]
    assert counted == [[len(MALFORMED)]]


def test_a_body_that_breaks_off_its_encoding_is_refused_at_once_and_only_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def use(client: Client) -> None:
        for case, parts in IN_PARTS.items():
            message = check_answer(await exchange(client, *parts), case)
            assert "Transfer-Encoding" in message, case

    assert run(use).works == []
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_a_good_request_before_malformed_bytes_is_still_answered() -> None:
    async def use(client: Client) -> None:
        raw = await exchange(client, GET + b"\r\n", b"GARBAGE\r\n\r\n")
        first, second = raw.split(b"HTTP/1.1 200 OK", 1)[1].split(b"HTTP/1.0 400", 1)
        assert b'{"status":"live"}' in first
        assert b"GARBAGE" in second

    run(use)
