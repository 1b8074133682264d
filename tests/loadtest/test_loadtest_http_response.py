"""Reading HTTP/1.1 responses in pieces of any size."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.loadtest.client.http_response import BadResponse, ResponseReader

HEAD = b"HTTP/1.1 200 OK\r\nServer: x\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
RESPONSES = {
    "length": (HEAD + b"Content-Length: 11\r\n\r\nhello world", b"hello world"),
    "empty": (HEAD + b"Content-Length: 0\r\n\r\n", b""),
    "chunked": (
        CHUNKED + b"5\r\nhello\r\nA;name=x\r\n wor\r\nld!!\r\n0\r\n\r\n",
        b"hello wor\r\nld!!",
    ),
    "trailer": (CHUNKED + b"2\r\nhi\r\n0\r\nX: y\r\nZ: w\r\n\r\n", b"hi"),
    "continue": (b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED + b"1\r\n!\r\n0\r\n\r\n", b"!"),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
}


class Kept:
    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.data = b""

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.status, self.headers = status, headers

    def body(self, data: bytes) -> None:
        assert data
        self.data += data


def read(*pieces: bytes) -> tuple[Kept, ResponseReader]:
    kept = Kept()
    reader = ResponseReader(kept)
    for piece in pieces:
        reader.feed(piece)
    return kept, reader


@pytest.mark.parametrize("name", RESPONSES)
@given(cuts=st.lists(st.integers(0, 200), max_size=8))
@settings(max_examples=60, deadline=None)
def test_a_response_reads_the_same_however_it_is_cut(name: str, cuts: list[int]) -> None:
    data, body = RESPONSES[name]
    places = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    kept, reader = read(*(data[a:b] for a, b in pairwise(places)))
    assert reader.finished
    assert reader.keep_alive
    assert kept.data == body


@pytest.mark.parametrize("name", RESPONSES)
def test_a_response_is_finished_with_its_last_byte_and_not_before(name: str) -> None:
    data, body = RESPONSES[name]
    kept, reader = read(*(bytes([byte]) for byte in data[:-1]))
    assert not reader.finished
    with pytest.raises(BadResponse, match="closed before the end"):
        reader.end_of_input()
    reader.feed(data[-1:])
    assert reader.finished
    assert kept.data == body


def test_names_of_headers_are_in_lower_case() -> None:
    kept, _ = read(RESPONSES["length"][0])
    assert kept.status == 200
    assert kept.headers["content-type"] == "text/event-stream"


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    kept, reader = read(HEAD + b"\r\nall ", b"of it")
    assert not reader.finished
    reader.end_of_input()
    assert reader.finished
    assert not reader.keep_alive
    assert kept.data == b"all of it"


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n", False),
        (b"HTTP/1.0 200 OK\r\n", False),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n", True),
    ],
)
def test_the_connection_lives_on_if_the_server_says_so(head: bytes, expected: bool) -> None:
    _, reader = read(head + b"Content-Length: 0\r\n\r\n")
    assert reader.keep_alive is expected


@pytest.mark.parametrize(
    "data",
    [
        b"SMTP ready\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        HEAD + b"Content-Length: -1\r\n\r\n",
        CHUNKED + b"xyz\r\n",
        HEAD + b"Content-Length: 1\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000,
        CHUNKED + b"1" * 70_000,
    ],
)
def test_what_is_no_response_is_refused(data: bytes) -> None:
    with pytest.raises(BadResponse):
        read(data)
