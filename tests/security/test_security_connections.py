"""Connections that no honest client makes: broken framing, bombs, floods, and silence."""

from __future__ import annotations

import gzip
import json
import socket
import time
import zlib

import pytest
from support.security.siege import CHAT, COMPLETIONS, Attacker, refused

GET = b"GET /live HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
HIDDEN = b"GET /hidden-in-a-body HTTP/1.1\r\nHost: localhost\r\n\r\n"
BODY = b'{"prompt": "x", "max_tokens": 1}'
MAX_BODY = 8 * 1024 * 1024

FRAMING: dict[str, bytes] = {
    "length_and_chunks": POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"0\r\n\r\n" + HIDDEN,
    "chunks_and_length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n"
    b"0\r\n\r\n" + HIDDEN,
    "two_lengths": POST + b"Content-Length: 0\r\nContent-Length: 60\r\n\r\n" + HIDDEN,
    "a_list_of_lengths": POST + b"Content-Length: 0, 60\r\n\r\n" + HIDDEN,
    "a_length_with_a_sign": POST + b"Content-Length: +5\r\n\r\nhello" + HIDDEN,
    "a_negative_length": POST + b"Content-Length: -5\r\n\r\n" + HIDDEN,
    "a_hexadecimal_length": POST + b"Content-Length: 0x5\r\n\r\nhello" + HIDDEN,
    "bare_line_feeds": b"GET /live HTTP/1.1\nHost: localhost\n\n" + HIDDEN,
    "a_null_in_the_path": b"GET /\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a_null_in_a_header": GET + b"A: \x00\r\n\r\n",
    "two_hosts": GET + b"Host: evil.example\r\n\r\n",
    "no_host": b"GET /live HTTP/1.1\r\n\r\n",
    "a_folded_header": GET + b"A: b\r\n c: d\r\n\r\n",
    "a_space_before_the_colon": GET + b"A : b\r\n\r\n",
    "a_bad_chunk_extension": CHUNKED + b"5;a=\n\r\nhello\r\n0\r\n\r\n" + HIDDEN,
    "a_negative_chunk": CHUNKED + b"-5\r\nhello\r\n0\r\n\r\n",
    "a_chunk_past_64_bits": CHUNKED + b"f" * 17 + b"\r\nhello\r\n0\r\n\r\n",
    "a_length_in_a_trailer": CHUNKED + b"0\r\nContent-Length: 5\r\n\r\n" + HIDDEN,
    "an_unknown_encoding": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "two_encodings": POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n"
    b"0\r\n\r\n" + HIDDEN,
    "a_header_of_nine_kilobytes": GET + b"A: " + b"x" * 9000 + b"\r\n\r\n",
    "two_hundred_headers": GET + b"A: b\r\n" * 200 + b"\r\n",
    "an_endless_path": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "http_2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 50,
    "a_pickle": b"\x80\x04\x95\x1e\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94.",
}


@pytest.mark.parametrize("first", [True, False])
def test_broken_framing_is_refused_once_and_nothing_behind_it_is_read(
    attack: Attacker, first: bool
) -> None:
    for case, data in FRAMING.items():
        began = time.monotonic()
        with attack.connect() as client:
            if not first:  # behind a good request on the same connection
                client.sendall(GET + b"\r\n")
                assert client.recv(4096).startswith(b"HTTP/1.1 200 OK"), case
            client.sendall(data)
            raw = attack.read_all(client)
        assert time.monotonic() - began < 5.0, case
        head, _, body = raw.partition(b"\r\n\r\n")
        assert head.split()[1] == b"400", (case, raw)
        assert f"content-length: {len(body)}".encode() in head.lower(), (case, raw)
        assert json.loads(body)["error"]["code"] == "malformed_http"


def test_bodies_over_the_limit_are_refused_before_they_are_read(attack: Attacker) -> None:
    with attack.connect(POST + b"Content-Length: %d\r\n\r\n" % (MAX_BODY + 1)) as client:
        assert client.recv(100).startswith(b"HTTP/1.1 413 ")
    for size in (MAX_BODY + 1, 10 * MAX_BODY):
        sent = 0
        with attack.connect(CHUNKED) as client:
            try:
                while sent < size:
                    client.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
                    sent += 65536
            except OSError:  # cut off in the middle
                continue
            assert client.recv(100).startswith(b"HTTP/1.1 413 ")


def test_a_compressed_body_counts_by_what_it_holds(attack: Attacker) -> None:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = b"".join(packer.compress(b" " * 1_000_000) for _ in range(64)) + packer.flush()
    assert len(bomb) < 1_000_000
    for encoding, body in (
        ("gzip", bomb),
        ("deflate", zlib.compress(b" " * 50_000_000)),
        ("gzip", gzip.compress(gzip.compress(b" " * 50_000_000))),
        ("gzip", b"\x1f\x8b" + b"x" * 100),
        ("br", b"x" * 100),
        ("zstd", b"x" * 100),
        ("gzip, gzip", bomb),
    ):
        answer = attack.post(COMPLETIONS, body, Content_Encoding=encoding)
        assert answer.status in (400, 413), (encoding, answer.body)
    assert attack.post(COMPLETIONS, gzip.compress(BODY), Content_Encoding="gzip").status == 200


TEXTS = {"letters": "a", "carets": "^", "spaces": " ", "cjk": "水", "joined": "👩\u200d👧\u200d👦",
         "marks": "e\u0301\u0316", "digits": "7", "right_to_left": "אב", "lines": "\n",
         "controls": "<|im_start|>", "half_controls": "<|im_"}  # fmt: skip


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_texts_of_megabytes_hold_nobody_up(attack: Attacker, path: str) -> None:
    for case, text in TEXTS.items():
        # A line feed takes two bytes of JSON.
        size = (MAX_BODY - 200) // max(len(text.encode()), len(json.dumps(text)) - 2) // 4
        asked = {"prompt": text * size} if path == COMPLETIONS else {
            "messages": [{"role": "user", "content": text * size}]}  # fmt: skip
        body = json.dumps({**asked, "max_tokens": 1}, ensure_ascii=False).encode()
        answer = attack.post(path, body)
        assert answer.status == 400, (case, answer.body)
        assert "512" in answer.message
        assert answer.seconds < 15.0, case


def test_requests_that_come_faster_than_they_are_answered_wait_in_the_clients_memory(
    attack: Attacker,
) -> None:
    """Pipelined; the server reads no more while many wait to be answered."""
    with attack.connect(timeout=60.0) as client:
        client.setblocking(False)
        flood, sent, answered = (GET + b"\r\n") * 1000, 0, 0
        deadline = time.monotonic() + 60
        while answered < 3000 and time.monotonic() < deadline:
            try:
                sent += client.send(flood[sent % len(flood) :])
            except BlockingIOError:
                pass
            try:
                answered += client.recv(1 << 20).count(b"HTTP/1.1 200 OK")
            except BlockingIOError:
                time.sleep(0.001)
        assert answered >= 3000


@pytest.mark.parametrize("count", [20_000, pytest.param(1_000_000, marks=pytest.mark.chaos)])
def test_a_body_of_one_byte_chunks_is_read_like_any_other(attack: Attacker, count: int) -> None:
    body = b'{"prompt": "x", "max_tokens": 1' + b" " * count + b"}"
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    data = CHUNKED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + chunks + b"0\r\n\r\n"
    assert attack.raw(data).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("count", [1000, pytest.param(1_000_000, marks=pytest.mark.chaos)])
def test_endless_trailers_and_bad_cookies_leave_no_trace(attack: Attacker, count: int) -> None:
    said = len(attack.server.lines)
    with attack.connect(CHUNKED + b"%x\r\n%b\r\n0\r\n" % (len(BODY), BODY)) as client:
        try:
            for _ in range(count // 100):
                client.sendall(b"A: b\r\n" * 100)
            client.sendall(b"\r\n")
            status = client.recv(100).split()[1]
        except OSError:  # cut off
            status = b"400"
    assert status in (b"200", b"400")
    cookie = b"Cookie: " + b'a="\\"; $=; =;;' * 100 + b"\r\n\r\n"
    with attack.connect() as client:
        for _ in range(min(count, 10_000) // 10):
            client.sendall(GET + cookie)
            assert client.recv(4096).startswith(b"HTTP/1.1 200 ")
    assert len(attack.server.lines) - said < 10


@pytest.mark.parametrize(
    "count",
    [pytest.param(200, marks=pytest.mark.slow), pytest.param(2000, marks=pytest.mark.chaos)],
)
def test_half_headers_are_closed_within_their_time(attack: Attacker, count: int) -> None:
    parts = (b"", b"G", GET, POST + b"Content-Le")
    held = [attack.connect(parts[number % len(parts)]) for number in range(count)]
    began = time.monotonic()
    for client in held:
        client.settimeout(max(0.1, began + 25 - time.monotonic()))
        attack.read_all(client)  # to the end: closed by the server
        client.close()
    assert time.monotonic() - began < 25  # 10 s on an idle machine


@pytest.mark.chaos
def test_unfinished_bodies_are_closed_within_their_time(attack: Attacker) -> None:
    head = POST + b"Content-Length: 1000\r\n\r\n{"
    held = [attack.connect(head) for _ in range(2000)]
    began = time.monotonic()
    for client in held:
        client.settimeout(max(0.1, began + 75 - time.monotonic()))
        assert b" 408 " in attack.read_all(client)[:20]
        client.close()
    assert time.monotonic() - began < 75  # 30 s, and 10 s to read the answer in


def test_clients_that_never_read_their_stream_hold_nobody_up(attack: Attacker) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 500, "stream": True, "n": 4,
                       "ignore_eos": True}).encode()  # fmt: skip
    held = []
    for _ in range(20):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((attack.host, attack.port))
        client.sendall(POST + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        held.append(client)
    for _ in range(5):
        assert attack.request("GET", "/live").status == 200
    for client in held:
        client.close()


def test_protocols_that_are_not_spoken_are_not_begun(attack: Attacker) -> None:
    upgrade = (
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\n"
        b"Upgrade: websocket\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    raw = attack.raw(upgrade + b"\x81\xfe\xff\xff" + b"x" * 1000)
    assert raw.startswith(b"HTTP/1.1 200 ")
    assert b"pgrade" not in raw
    for path in ("/v1/realtime", "/ws", "/inference.GRPCInferenceService/ModelInfer"):
        refused(
            attack.post(path, b"\x00\x00\x00\x00\x05hello", Content_Type="application/grpc"), 404
        )
    connect = b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    assert attack.raw(connect).split()[1] in (b"400", b"404")


def test_no_text_of_a_client_becomes_a_header(attack: Attacker) -> None:
    for text in ("%0d%0aX-Evil:%201", "%0aX-Evil:1", "%E5%98%8A%E5%98%8DX-Evil:1", "%00", "%ff"):
        for path in (f"/v1/models/{text}", f"/{text}", f"/v1/models?x={text}"):
            answer = attack.request("GET", path)
            assert answer.status in (200, 400, 404)
            assert "x-evil" not in answer.headers
    model = {"prompt": "x", "model": "a\r\nX-Evil: 1"}
    assert "x-evil" not in attack.post(COMPLETIONS, model).headers


def test_pages_of_others_are_refused_even_under_a_name_that_leads_here(attack: Attacker) -> None:
    evil = f"evil.example:{attack.port}"
    here = f"{attack.host}:{attack.port}"
    asked = {"prompt": "x", "max_tokens": 1}
    for headers in (
        {"Host": evil},
        {"Host": evil, "Origin": f"http://{evil}"},
        {"Host": here, "Origin": "null"},
        {"Host": here, "Origin": "https://evil.example", "Content_Type": "text/plain"},
        {"Host": here, "Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors"},
    ):
        posted, deleted = (
            attack.post(COMPLETIONS, asked, **headers),
            attack.request("DELETE", "/", **headers),
        )
        for answer in (posted, deleted):
            refused(answer, 403)
            assert not [name for name in answer.headers if name.startswith("access-control")]
    assert attack.post(COMPLETIONS, asked, Host=here, Origin=f"http://{here}").status == 200
