"""Responses that are kept in a Valkey or Redis server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.frontend.frontend_scripted import Client, run
from support.frontend.resp_server import resp_server
from valkey import Valkey

from penstock.protocol.config import ConfigError, ServerConfig
from penstock.services.frontend.dialects.responses.chosen_store import make_store
from penstock.services.frontend.dialects.responses.store import StoredResponse
from penstock.services.frontend.dialects.responses.valkey_store import ValkeyStore
from penstock.services.frontend.errors import ApiError
from penstock.services.frontend.valkey_address import (
    DEFAULT_TTL_S,
    read_address,
)

PATH = "/v1/responses"
ONE, TWO = f"resp_{'1' * 32}", f"resp_{'2' * 32}"
KEPT = StoredResponse(b'{"a":1}', b"[]", ONE)
REAL = [found for name in ("valkey-server", "redis-server") if (found := shutil.which(name))]
PASSWORD = "p@ss#1"
QUOTED = "p%40ss%231"


@contextlib.contextmanager
def real_server(folder: Path) -> Iterator[int]:
    """A server from the machine's packages; its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    settings = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    process = subprocess.Popen([REAL[0], *settings, "--requirepass", PASSWORD], stdout=-1)
    try:
        while True:
            assert process.poll() is None
            with contextlib.suppress(Exception), Valkey(port=port, password=PASSWORD) as asking:
                asking.ping()
                break
        yield port
    finally:
        process.terminate()
        process.communicate()


@pytest.fixture(
    params=[
        "spoken",
        pytest.param(
            "real", marks=pytest.mark.skipif(not REAL, reason="neither server is installed")
        ),
    ]
)
def port(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    """The port of a server that wants a password."""
    if request.param == "real":
        with real_server(tmp_path) as port:
            yield port
    else:
        with resp_server(password=PASSWORD) as server:
            yield server.port


async def whole(client: Client, **body: Any) -> dict[str, Any]:
    status, answer, _ = await client.post(PATH, body)
    assert status == 200, answer
    return answer


def test_a_server_shares_responses_between_frontends(port: int, tmp_path: Path) -> None:
    secret = tmp_path / "url"
    secret.write_text(f"redis://:{QUOTED}@127.0.0.1:{port}/3?ttl_s=500\n")
    secret.chmod(0o600)
    found: list[dict[str, Any]] = []

    async def first(client: Client) -> None:
        found.append(await whole(client, input="one"))

    async def second(client: Client) -> None:
        where = f"{PATH}/{found[0]['id']}"
        assert (await client.get(where))[1] == found[0]
        await whole(client, input="two", previous_response_id=found[0]["id"])
        async with client.session.delete(client.url + where) as response:
            assert response.status == 200
        assert (await client.get(where))[0] == 404

    run(first, config=ServerConfig(response_store=f"file:{secret}"))
    url = f"valkey://:{QUOTED}@127.0.0.1:{port}/3"
    (work,) = run(second, config=ServerConfig(response_store=url)).works
    assert b"Hello world" in work.prompt.messages  # type: ignore[union-attr]


def in_store(
    url: str,
    use: Callable[[ValkeyStore], Awaitable[None]],
    *,
    operation_s: float = 10.0,
    retry_s: float = 0.0,
) -> None:
    async def main() -> None:
        store = ValkeyStore(
            read_address(url), 1024 * 1024, operation_s=operation_s, retry_s=retry_s
        )
        await store.open()
        try:
            await use(store)
        finally:
            await store.close()

    asyncio.run(main())


def test_a_response_lives_anew_when_it_is_used_and_is_its_owners(port: int) -> None:
    async def use(store: ValkeyStore) -> None:
        assert await store.get("ann", ONE) is None
        assert await store.put("ann", ONE, KEPT)
        with Valkey(port=port, password=PASSWORD) as asking:
            (key,) = asking.keys()
            assert key.startswith(b"penstock:response:")
            assert key.endswith(ONE.encode())
            asking.expire(key, 2)
            assert await store.get("ann", ONE) == KEPT
            assert 6 <= asking.ttl(key) <= 7
            asking.set(key, b"something else", ex=9)
            assert await store.get("ann", ONE) is None
        assert await store.put("ann", ONE, KEPT)
        assert await store.get("bob", ONE) is None
        assert not await store.delete("bob", ONE)
        assert await store.delete("ann", ONE)
        assert not await store.put("ann", ONE, StoredResponse(b"x" * 1024 * 1024, b""))
        assert not await store.put("ann", "resp_*", KEPT)

    in_store(f"valkey://:{QUOTED}@127.0.0.1:{port}?ttl_s=7", use)


def test_without_its_server_answers_go_out_and_what_was_kept_is_a_503(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        port = closed.getsockname()[1]

        async def use(client: Client) -> None:
            answer = await whole(client, input="one")
            status, error, response = await client.get(f"{PATH}/{answer['id']}")
            assert (status, error["error"]["code"]) == (503, "response_store_unavailable")
            assert response.headers["Retry-After"] == "1"
            body = {"input": "two", "previous_response_id": answer["id"]}
            status, error, _ = await client.post(PATH, body)
            assert (status, error["error"]["type"]) == (503, "overloaded_error")
            assert "send the conversation as input" in error["error"]["message"]

        url = f"valkey://me:hidden@127.0.0.1:{port}"
        with caplog.at_level(logging.WARNING):
            run(use, config=ServerConfig(response_store=url))
    assert f"valkey://127.0.0.1:{port}/0 cannot be used" in caplog.text
    assert "hidden" not in caplog.text


def test_a_wrong_password_and_a_full_server_are_said_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def locked_out(store: ValkeyStore) -> None:
        assert not await store.put("", ONE, KEPT)

    async def full(store: ValkeyStore) -> None:
        server.is_full = True
        assert not await store.put("", ONE, KEPT)
        server.is_full = False
        assert await store.put("", ONE, KEPT)

    with resp_server(password=PASSWORD) as server, caplog.at_level(logging.WARNING):
        in_store(f"valkey://:wrong@127.0.0.1:{server.port}", locked_out)
        assert "invalid username-password pair" in caplog.text
        in_store(f"valkey://:{QUOTED}@127.0.0.1:{server.port}", full)
        assert "used memory > 'maxmemory'" in caplog.text


def test_a_server_that_hangs_costs_the_time_of_one_operation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def use(store: ValkeyStore) -> None:
        assert await store.put("", ONE, KEPT)
        server.answers.clear()
        with pytest.raises(ApiError):
            await store.get("", ONE)
        asked = len(server.commands)
        for _ in range(3):
            with pytest.raises(ApiError):
                await store.get("", ONE)
        assert len(server.commands) == asked
        assert caplog.text.count("cannot be used") == 1

    with resp_server() as server:
        url = f"valkey://127.0.0.1:{server.port}"
        in_store(url, use, operation_s=2.0, retry_s=100.0)


def test_a_question_that_was_given_up_does_not_give_its_answer_to_the_next() -> None:
    other = StoredResponse(b"{}", b"[]")

    async def use(store: ValkeyStore) -> None:
        assert await store.put("", ONE, KEPT)
        assert await store.put("", TWO, other)
        for _ in range(3):
            server.answers.clear()
            asked = len(server.commands)
            given_up = asyncio.ensure_future(store.get("", ONE))
            while server.commands[asked:].count(b"GETEX") == 0:
                await asyncio.sleep(0.001)
            given_up.cancel()
            server.answers.set()
            with pytest.raises(asyncio.CancelledError):
                await given_up
            assert await store.get("", TWO) == other

    with resp_server() as server:
        in_store(f"valkey://127.0.0.1:{server.port}", use)


WRONG = {
    "valkey://": "the host is missing",
    "valkey://host:port/0": "host or port is wrong",
    "valkey://host/zero": "the database is 'zero'; 0 to 65535",
    "valkey://host?ttl_s=0": "ttl_s is '0'; 1 to",
    "valkey://host?ttl=5": "'ttl' is unknown; ttl_s and ca_file are known",
    "valkey://host?ca_file=x": "ca_file is only for valkeys:// and rediss://",
    "valkey://:secret#1@host": "in a password it is written %23",
    "memcached://host": "the scheme is 'memcached'; valkey, redis, valkeys, rediss are known",
    "file:/nowhere": "/nowhere: No such file",
}


@pytest.mark.parametrize("url", WRONG)
def test_what_is_wrong_with_an_address_is_said_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match=r"--response-store") as caught:
        make_store(url, 1024 * 1024)
    assert WRONG[url] in str(caught.value)
    assert "secret" not in str(caught.value)


def test_an_address_is_read_in_all_its_parts() -> None:
    found = read_address("rediss://me:a%2Fb@[::1]:7000/4?ca_file=/ca.pem&ttl_s=60")
    assert (found.host, found.port, found.db, found.ttl_s) == ("::1", 7000, 4, 60)
    assert (found.username, found.password, found.tls) == ("me", "a/b", True)
    assert (found.ca_file, str(found)) == ("/ca.pem", "valkeys://[::1]:7000/4")
    plain = read_address("redis://host")
    assert (plain.port, plain.db, plain.tls, plain.ttl_s) == (6379, 0, False, DEFAULT_TTL_S)


def test_a_missing_library_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "valkey.asyncio", None)
    with pytest.raises(ConfigError, match=r"pip install 'penstock\[valkey\]'"):
        make_store("valkey://host", 1024 * 1024)
