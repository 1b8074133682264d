"""HTTP over TLS, and what is believed of proxies in front."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
import uvloop
from aiohttp.test_utils import make_mocked_request
from support.frontend.frontend_scripted import Client, ScriptedGateway, run, say
from yarl import URL

from penstock.protocol.config import ConfigError
from penstock.protocol.config.server_fields import ServerConfig
from penstock.services.frontend.app import make_app, start
from penstock.services.frontend.connection import ConnectionLimits
from penstock.services.frontend.forwarded import TrustedProxies
from penstock.services.frontend.grpc.tls import credentials_of
from penstock.services.frontend.handshakes import TURNED_AWAY
from penstock.services.frontend.service import FrontendService
from penstock.services.frontend.tls import Certificates

needs_openssl = pytest.mark.skipif(not shutil.which("openssl"), reason="openssl makes the pairs")


def make_pair(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate that signs itself, and its key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", f"/CN={name}", "-keyout", str(key)),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


Use = Callable[[int, Certificates], Awaitable[None]]


def serve(
    pair: tuple[Path, Path], use: Use, limits: ConnectionLimits | None = None, **loop: Any
) -> None:
    """loop: as ``asyncio.Runner`` takes it."""

    async def main() -> None:
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        gateway, certificates = ScriptedGateway(say("a", "b")), Certificates(*pair)
        app = make_app(ServerConfig(), gateway, gateway.registry)
        runner = await start(app, sock, limits, certificates)
        try:
            async with asyncio.timeout(60):
                await use(sock.getsockname()[1], certificates)
        finally:
            await runner.cleanup()

    with asyncio.Runner(**loop) as runner:
        runner.run(main())


async def ask(port: int, trusted: Path) -> str:
    """A streamed answer of a server whose certificate must be this one."""
    context = ssl.create_default_context(cafile=trusted)
    body = {"prompt": "x", "stream": True}
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session,
        session.post(f"https://127.0.0.1:{port}/v1/completions", json=body) as response,
    ):
        return (await response.read()).decode()


@needs_openssl
def test_streams_come_over_tls_and_plain_http_gets_nothing(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "one")

    async def use(port: int, certificates: Certificates) -> None:
        assert (await ask(port, pair[0])).rstrip().endswith("data: [DONE]")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"HTTP" not in await reader.read()
        writer.close()
        old = ssl.create_default_context(cafile=pair[0])
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=old)) as session,
            session.get(f"https://127.0.0.1:{port}/live") as response,
        ):
            assert response.status == 200

    serve(pair, use)


@needs_openssl
def test_a_new_pair_is_used_and_a_broken_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = make_pair(tmp_path, "one"), make_pair(tmp_path, "two")
    live = tmp_path / "live.pem", tmp_path / "live.key"
    for source, target in zip(one, live, strict=True):
        shutil.copy(source, target)

    async def use(port: int, certificates: Certificates) -> None:
        await ask(port, one[0])
        shutil.copy(two[0], live[0])  # its key has not come yet
        with caplog.at_level(logging.WARNING, "penstock.frontend"):
            certificates.look()
        assert "the certificate stays as it was" in caplog.text
        await ask(port, one[0])
        shutil.copy(two[1], live[1])
        certificates.look()
        await ask(port, two[0])
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await ask(port, one[0])
        live[1].unlink()
        certificates.look()
        await ask(port, two[0])

    serve(live, use)


@needs_openssl
@pytest.mark.parametrize("when", [1, 2], ids=["before the key", "behind the key"])
def test_files_that_change_while_they_are_read_are_never_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, when: int
) -> None:
    old, one, two = (make_pair(tmp_path, name) for name in ("old", "one", "two"))
    live = tmp_path / "live.pem", tmp_path / "live.key"

    def put(pair: tuple[Path, Path]) -> None:
        for source, target in zip(pair, live, strict=True):
            shutil.copy(source, target)

    put(old)
    certificates = Certificates(*live)
    given: list[Any] = []
    monkeypatch.setattr(
        grpc,
        "dynamic_ssl_server_credentials",
        lambda first, changed: given.extend((first, changed)),
    )
    credentials_of(certificates)
    put(one)
    read, count = Path.read_bytes, 0

    def changing(path: Path) -> bytes:
        nonlocal count
        found = read(path)
        count += 1
        if count == when:
            put(two)
        return found

    monkeypatch.setattr(Path, "read_bytes", changing)
    with caplog.at_level(logging.WARNING, "penstock.frontend"):
        configuration = given[1]()
    pair = certificates.pair
    if when == 1:
        assert "--tls-cert" in caplog.text and "KEY_VALUES_MISMATCH" in caplog.text
        assert (configuration, pair.certificate) == (None, old[0].read_bytes())
    else:
        assert configuration is not None
        assert (pair.certificate, pair.key) == (one[0].read_bytes(), one[1].read_bytes())
    assert given[1]() is not None  # the further change is seen, and both serve it
    assert given[1]() is None
    pair = certificates.pair
    assert (pair.certificate, pair.key) == (two[0].read_bytes(), two[1].read_bytes())


async def until_closed(port: int, sent: bytes = b"") -> float:
    """Seconds until the server closes a connection whose handshake does not come."""
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    with contextlib.suppress(ConnectionError):
        await reader.read()
    writer.close()
    return time.monotonic() - began


LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])


@needs_openssl
@LOOPS
def test_a_handshake_has_no_more_time_than_a_header(
    tmp_path: Path, loop: Callable[[], Any]
) -> None:
    pair = make_pair(tmp_path, "one")

    async def use(port: int, certificates: Certificates) -> None:
        begun = b"\x16\x03\x01\x00\xc8\x01\x00\x00\xc4\x03\x03"
        took = await asyncio.gather(until_closed(port), until_closed(port, begun))
        assert all(0.4 <= seconds < 10 for seconds in took)
        assert (await ask(port, pair[0])).rstrip().endswith("data: [DONE]")

    serve(pair, use, ConnectionLimits(header_s=0.5), loop_factory=loop)


@needs_openssl
@LOOPS
def test_handshakes_that_do_not_end_are_counted_among_the_connections(
    tmp_path: Path, loop: Callable[[], Any]
) -> None:
    pair = make_pair(tmp_path, "one")

    async def use(port: int, certificates: Certificates) -> None:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2 + TURNED_AWAY)]
        assert await until_closed(port) < 4  # the others have theirs
        for reader, writer in silent:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
        assert (await ask(port, pair[0])).rstrip().endswith("data: [DONE]")

    serve(pair, use, ConnectionLimits(connections=2, header_s=4), loop_factory=loop)


@needs_openssl
def test_one_connection_too_many_is_told_so_over_tls_too(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "one")

    async def use(port: int, certificates: Certificates) -> None:
        context = ssl.create_default_context(cafile=pair[0])
        _, held = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
        for one in (held, writer):
            one.close()

    serve(pair, use, ConnectionLimits(connections=1))


@needs_openssl
@LOOPS
def test_late_handshakes_of_a_frontend_that_goes_down_do_not_wait_for_each_other(
    tmp_path: Path, loop: Callable[[], Any]
) -> None:
    pair = make_pair(tmp_path, "one")

    async def main() -> None:
        service: Any = FrontendService.__new__(FrontendService)
        service.loop = asyncio.get_running_loop()
        sock = service._listener = service._inherited = socket.socket()
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        gateway = ScriptedGateway(say("a", "b"))
        app = make_app(ServerConfig(), gateway, gateway.registry)
        limits = ConnectionLimits(header_s=30)
        runner: Any = await start(app, sock, limits, Certificates(*pair))
        service._runner = runner
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        late = socket.create_connection(("127.0.0.1", port))  # none has been accepted yet
        late.setblocking(False)
        closing = asyncio.create_task(service._close_port(runner))
        context = ssl.create_default_context(cafile=pair[0])
        try:
            async with asyncio.timeout(60):
                reader, writer = await asyncio.open_connection(
                    sock=late, ssl=context, server_hostname="127.0.0.1"
                )
                writer.write(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
                await closing
                assert not runner.server.is_idle()
                writer.close()
        finally:
            async with asyncio.timeout(60):
                await runner.cleanup()
        for one in silent:
            one.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


@needs_openssl
def test_files_that_are_no_pair_are_refused_at_the_start(tmp_path: Path) -> None:
    one, two = make_pair(tmp_path, "one"), make_pair(tmp_path, "two")
    junk = tmp_path / "junk"
    junk.write_text("no certificate")
    for pair in ((one[0], two[1]), (junk, one[1]), (one[0], junk), (tmp_path / "none", one[1])):
        with pytest.raises(ConfigError, match=r"--tls-cert .* cannot be used"):
            Certificates(*pair)


@pytest.mark.parametrize(
    ("trusted", "header", "client"),
    [
        ([], "1.2.3.4", "10.0.0.9"),
        (["192.168.0.0/16"], "1.2.3.4", "10.0.0.9"),
        (["10.0.0.0/8"], "1.2.3.4", "1.2.3.4"),
        (["10.0.0.9"], "6.6.6.6, 1.2.3.4", "1.2.3.4"),
        (["10.0.0.0/8"], "6.6.6.6, 1.2.3.4, 10.0.0.7", "1.2.3.4"),
        (["10.0.0.0/8"], "10.0.0.8, 10.0.0.7", "10.0.0.8"),
        (["10.0.0.0/8"], "1.2.3.4:5678", "1.2.3.4"),
        (["10.0.0.0/8"], "[2001:DB8::1]:5678", "2001:db8::1"),
        (["10.0.0.0/8"], "1.2.3.4, junk", "10.0.0.9"),
        (["10.0.0.0/8"], "1.2.3.4, ", "10.0.0.9"),
        (["10.0.0.0/8"], "evil\x01, 10.0.0.7", "10.0.0.7"),
        (["::/0"], "1.2.3.4", "10.0.0.9"),
    ],
)
def test_an_address_is_believed_as_far_as_trusted_proxies_say_it(
    trusted: list[str], header: str, client: str
) -> None:
    request = make_mocked_request("GET", "/", headers={"X-Forwarded-For": header})
    request = request.clone(remote="10.0.0.9")
    assert TrustedProxies(trusted).client_of(request) == client


def test_who_asks_without_a_key_is_told_apart_by_the_address_that_a_proxy_names() -> None:
    async def use(client: Client) -> None:
        for address in ("1.2.3.4", "1.2.3.5"):
            headers = {"X-Forwarded-For": address}
            await client.post("/v1/completions", {"prompt": "x"}, headers=headers)

    trusting = ServerConfig(trusted_proxies=["127.0.0.0/8"])
    for config, seen in ((trusting, {"at 1.2.3.4", "at 1.2.3.5"}), (None, {"at 127.0.0.1"})):
        assert {work.head.tenant for work in run(use, config=config).works} == seen


def test_a_prefix_that_a_proxy_leaves_is_taken_off_once_and_opens_nothing() -> None:
    config = ServerConfig(root_path="/llm", api_key=["key"])
    key = {"x-api-key": "key"}

    async def use(client: Client) -> None:
        for path, headers, expected in (
            ("/llm/v1/models", key, 200),
            ("/llm/v1/models", {}, 401),
            ("/v1/models", key, 200),
            ("/llm/live?x=/v1", {}, 200),
            ("/llm/llm/live", key, 404),
            ("/llm2/live", key, 404),
            ("/llm/../v1/models", {}, 401),
            ("/llm/v1/models?x=/live", {}, 401),
            ("/llm//live", key, 404),
        ):
            url = URL(client.url + path, encoded=True)
            async with client.session.get(url, headers=headers) as response:
                assert response.status == expected, path
        for path in ("/llm", "/llm/"):
            async with client.session.get(client.url + path) as response:
                assert (response.status, response.content_type) == (200, "text/html")
        status, answer, _ = await client.post("/llm/v1/completions", {"prompt": "x"}, headers=key)
        assert (status, answer["object"]) == (200, "text_completion")

    run(use, config=config)
