"""Limits that several frontends share through a real Valkey server, and what they do without it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from frontend_scripted import Client, Script, ScriptedGateway, say, serving
from key_files import Keys
from resp_server import resp_server
from valkey_process import BINARY, ValkeyProcess, valkey_process

from penstock.client.sink import Sink
from penstock.protocol.wire.messages.membership import Capacity, Identity, Peer
from penstock.protocol.wire.messages.requests import Work
from penstock.services.frontend.context import CONTEXT
from penstock.services.frontend.keys.shared_limits import WAIT_SECONDS, SharedLimits

TEXT = "/v1/completions"
ONE = {"prompt": [1, 2, 3], "max_tokens": 10}
needs_server = pytest.mark.skipif(not BINARY, reason="neither Valkey nor Redis is installed")


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyProcess]:
    with valkey_process(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def valkey(process: ValkeyProcess) -> ValkeyProcess:
    process.forget()
    return process


def frontend(number: int) -> Peer:
    return Peer("frontend", "", number, Identity(number, "host"), "ready", "", Capacity(), 0)


@contextlib.asynccontextmanager
async def frontends(
    keys: Keys, count: int = 3, script: Script | None = None
) -> AsyncIterator[list[Client]]:
    """So many servers over gateways of their own that read the same file of keys. They wait longer
    for the server of limits than others do, since a busy machine may be slow."""
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for _ in range(count):
            gateway = ScriptedGateway(script)
            gateway.peers = [frontend(number) for number in range(count)]
            client = await stack.enter_async_context(serving(gateway, keys.config))
            if (limits := client.app[CONTEXT].limits.shared) is not None:
                limits.wait_s = 5.0
            clients.append(client)
        await stack.enter_async_context(asyncio.timeout(30))
        yield clients


async def statuses(
    clients: list[Client], count: int, headers: dict[str, str], body: dict[str, Any] | None = None
) -> Counter[int]:
    """The answers to so many requests, in turn to each of the servers."""
    asked = (
        clients[number % len(clients)].post(TEXT, body or ONE, headers=headers)
        for number in range(count)
    )
    return Counter(status for status, _, _ in await asyncio.gather(*asked))


def shared(client: Client) -> SharedLimits:
    found = client.app[CONTEXT].limits.shared
    assert found is not None
    return found


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.01)


def test_without_a_server_each_frontend_lets_its_part_in(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    ann = keys.add("ann", requests_per_minute=30)

    async def main() -> None:
        async with frontends(keys) as clients:
            assert await statuses(clients, 60, ann) == {200: 30, 429: 30}
            assert await statuses(clients[:1], 5, ann) == {429: 5}

    asyncio.run(main())


@needs_server
def test_three_frontends_let_in_exactly_the_limit_together(
    tmp_path: Path, valkey: ValkeyProcess
) -> None:
    keys = Keys(tmp_path, limits_url=valkey.url)
    requests, tokens = keys.add("a", requests_per_minute=30), keys.add("b", tokens_per_minute=130)
    day, unused = keys.add("c", tokens_per_day=130), keys.add("d", tokens_per_minute=20)
    exact = {**ONE, "max_tokens": 2}

    async def main() -> None:
        async with frontends(keys) as clients:
            assert await statuses(clients[:1], 20, requests) == {200: 20}  # not a part: all of it
            assert await statuses(clients, 40, requests) == {200: 10, 429: 30}
            for key in (tokens, day):
                assert await statuses(clients, 40, key, exact) == {200: 26, 429: 14}
            for status, client in zip((200, 200, 429), clients, strict=True):
                assert await statuses([client], 1, unused) == {status: 1}  # 5 of 13 were used
                await asyncio.sleep(0.2)
            status, answer, response = await clients[0].post(TEXT, ONE, headers=tokens)
            assert status == 429
            assert "has used 130 of its 130 tokens a minute" in answer["error"]["message"]
            assert response.headers["x-ratelimit-limit-tokens"] == "130"
            assert response.headers["x-ratelimit-remaining-tokens"] == "0"
            assert 50 < float(response.headers["x-ratelimit-reset-tokens"].rstrip("s")) <= 60.3

    asyncio.run(main())


@needs_server
def test_requests_that_run_are_counted_over_all_frontends_and_end_with_their_frontend(
    tmp_path: Path, valkey: ValkeyProcess
) -> None:
    keys = Keys(tmp_path, limits_url=valkey.url)
    ann = keys.add("ann", concurrent=4)
    go_on = asyncio.Event()

    async def script(work: Work, sink: Sink) -> None:
        await go_on.wait()
        await say("x")(work, sink)

    async def main() -> None:
        async with frontends(keys, script=script) as clients:
            running = asyncio.create_task(statuses(clients, 4, ann))
            await until(lambda: sum(len(one.gateway.works) for one in clients) == 4)
            assert await statuses(clients, 3, ann) == {429: 3}
            go_on.set()
            assert await running == {200: 4}
            await asyncio.sleep(0.2)
            assert await statuses(clients, 4, ann) == {200: 4}

    asyncio.run(main())


@needs_server
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_server_that_is_gone_costs_no_request_and_is_used_again_when_it_is_back(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(valkey: ValkeyProcess) -> None:
        keys = Keys(tmp_path, limits_url=valkey.url)
        ann = keys.add("ann", requests_per_minute=60)
        async with frontends(keys) as clients:
            assert await statuses(clients, 30, ann) == {200: 30}
            if how == "killed":
                valkey.kill()
            else:
                valkey.pause()
            for client in clients:
                shared(client).wait_s = WAIT_SECONDS
            slowest = 0.0
            for _ in range(8):
                for client in clients:
                    began = time.monotonic()
                    assert await statuses([client], 1, ann) == {200: 1}
                    slowest = max(slowest, time.monotonic() - began)
            assert slowest < 1.0  # 50 ms, where the machine is free
            # Each has let in 18 of its part of 20.
            assert await statuses(clients, 12, ann) == {200: 6, 429: 6}
            assert not any(shared(one).answers for one in clients)
            if how == "killed":
                valkey.start()
            else:
                valkey.go_on()
            for client in clients:
                shared(client).wait_s = 5.0
            await until(lambda: all(shared(one).answers for one in clients))
            left = (await statuses(clients, 60, ann))[200]
            # One that was killed remembers what came while it was gone, and has forgotten the rest.
            assert left == (30 if how == "killed" else 0)

    with caplog.at_level(logging.INFO, "penstock.frontend"), valkey_process(tmp_path) as valkey:
        asyncio.run(main(valkey))
    said = [one.getMessage() for one in caplog.records if "the limits at" in one.getMessage()]
    for words in ("cannot be used", "can be used again"):  # once for each, where nothing is slow
        assert 3 <= sum(words in one for one in said) <= 6
    assert all(f"valkey://127.0.0.1:{valkey.port}/0" in one for one in said)


def test_a_server_that_speaks_nonsense_counts_as_gone(tmp_path: Path) -> None:
    with resp_server(password="") as server:
        keys = Keys(tmp_path, limits_url=f"valkey://127.0.0.1:{server.port}")
        ann = keys.add("ann", requests_per_minute=9)

        async def main() -> None:
            async with frontends(keys) as clients:
                assert await statuses(clients, 12, ann) == {200: 9, 429: 3}
                assert not any(shared(one).answers for one in clients)

        asyncio.run(main())


def test_a_server_that_cannot_be_reached_is_named_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = Keys(tmp_path, limits_url="valkey://127.0.0.1:1")
    ann = keys.add("ann")

    async def main() -> None:
        async with frontends(keys, 1) as clients:
            await until(lambda: not shared(clients[0]).answers)
            assert await statuses(clients, 5, ann) == {200: 5}

    asyncio.run(main())
    assert "the limits at valkey://127.0.0.1:1/0 cannot be used" in caplog.text


@needs_server
def test_a_frontend_ends_soon_whatever_the_server_of_limits_does(tmp_path: Path) -> None:
    async def main(valkey: ValkeyProcess) -> float:
        keys = Keys(tmp_path, limits_url=valkey.url)
        ann = keys.add("ann", tokens_per_minute=10**6)
        async with frontends(keys, 1) as clients:
            await statuses(clients, 40, ann)
            valkey.pause()
            shared(clients[0]).wait_s = WAIT_SECONDS
            await statuses(clients, 4, ann)
            began = time.monotonic()
        return time.monotonic() - began

    with valkey_process(tmp_path) as valkey:
        assert asyncio.run(main(valkey)) < 10.0
