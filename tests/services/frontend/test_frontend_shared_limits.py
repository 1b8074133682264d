"""Limits that several frontends share through a real Valkey server, and what they do without it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.frontend.frontend_scripted import Client, Script, ScriptedGateway, say, serving
from support.frontend.key_files import Keys
from support.frontend.lossy_proxy import LossyProxy, lossy_proxy
from support.frontend.resp_server import resp_server
from support.pipeline.valkey_process import BINARY, ValkeyProcess, valkey_process
from support.polling import async_until
from valkey import Valkey

from penstock.client.sink import Sink
from penstock.protocol.wire.messages.membership import Capacity, Identity, Peer
from penstock.protocol.wire.messages.requests import Tokens, Work
from penstock.services.frontend.context import CONTEXT
from penstock.services.frontend.keys.shared_limits import WAIT_SECONDS, SharedLimits

TEXT = "/v1/completions"
ONE = {"prompt": [1, 2, 3], "max_tokens": 10}
ONE_PROMPT = Tokens(array("i", [1, 2, 3]).tobytes())
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
        await stack.enter_async_context(asyncio.timeout(60))
        yield clients


def seconds(duration: str) -> float:
    """Of ``59.5s`` or ``1m1s``, which are rounded up."""
    minutes, _, rest = duration.removesuffix("s").rpartition("m")
    return 60 * int(minutes or 0) + float(rest)


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


async def all_told(valkey: ValkeyProcess) -> None:
    """Until the server has heard of the end of each request that it knows."""
    await async_until(lambda: runs(valkey) == 0)


def runs(valkey: ValkeyProcess) -> int:
    """Requests of which the server knows that they run."""
    with Valkey(port=valkey.port) as asking:
        names = asking.keys("penstock:limits:*:request:*")
        states = asking.mget(names) if names else []
    return sum(state not in (b"x", None) for state in states)


def test_without_a_server_each_frontend_lets_its_part_in(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    ann = keys.add("ann", requests_per_minute=30)

    async def main() -> None:
        async with frontends(keys) as clients:
            assert await statuses(clients, 60, ann) == {200: 30, 429: 30}
            assert await statuses(clients[:1], 5, ann) == {429: 5}

    asyncio.run(main())


def test_a_request_larger_than_a_frontends_part_is_let_in_and_one_larger_than_the_limit_never(
    tmp_path: Path,
) -> None:
    keys = Keys(tmp_path)
    ann = keys.add("ann", tokens_per_minute=30)

    async def main() -> None:
        async with frontends(keys) as clients:
            assert await statuses(clients[:1], 1, ann) == {200: 1}  # 13, of a part of 10
            status, answer, response = await clients[0].post(TEXT, ONE, headers=ann)
            assert status == 429
            said = "has used 5 of its 10 tokens a minute (this frontend's part of 30)"
            assert said in answer["error"]["message"]
            assert 0 < int(response.headers["retry-after-ms"]) <= 60_300
            never = {**ONE, "max_tokens": 28}
            status, answer, response = await clients[1].post(TEXT, never, headers=ann)
            assert status == 429
            said = "may take 31 tokens (prompt and max_tokens), and the key ann has 30 a minute"
            assert said in answer["error"]["message"]
            assert response.headers["x-should-retry"] == "false"

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
                await all_told(valkey)
            status, answer, response = await clients[0].post(TEXT, ONE, headers=tokens)
            assert status == 429
            assert "has used 130 of its 130 tokens a minute" in answer["error"]["message"]
            assert response.headers["x-ratelimit-limit-tokens"] == "130"
            assert response.headers["x-ratelimit-remaining-tokens"] == "0"
            assert 50 < seconds(response.headers["x-ratelimit-reset-tokens"]) <= 61

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
            await async_until(lambda: sum(len(one.gateway.works) for one in clients) == 4)
            assert await statuses(clients, 3, ann) == {429: 3}
            go_on.set()
            assert await running == {200: 4}
            await all_told(valkey)
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
            await all_told(valkey)
            if how == "killed":
                valkey.kill()
            else:
                valkey.pause()
            for client in clients:
                shared(client).wait_s = WAIT_SECONDS
            slow = 0
            for _ in range(8):
                for client in clients:
                    began = time.monotonic()
                    assert await statuses([client], 1, ann) == {200: 1}
                    slow += time.monotonic() - began > 1.0
            assert slow < 6  # none, where the machine is free; no more than 50 ms are waited
            # Each has let in 18 of its part of 20.
            assert await statuses(clients, 12, ann) == {200: 6, 429: 6}
            assert not any(shared(one).answers for one in clients)
            if how == "killed":
                valkey.start()
            else:
                valkey.go_on()
            for client in clients:
                shared(client).wait_s = 5.0
            await async_until(lambda: all(shared(one).answers for one in clients))
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
            await async_until(lambda: not shared(clients[0]).answers)
            assert await statuses(clients, 5, ann) == {200: 5}

    asyncio.run(main())
    assert "the limits at valkey://127.0.0.1:1/0 cannot be used" in caplog.text


@contextlib.asynccontextmanager
async def behind_a_proxy(
    folder: Path, valkey: ValkeyProcess, limits: dict[str, Any], script: Script | None = None
) -> AsyncIterator[tuple[LossyProxy, Client, Client, dict[str, str]]]:
    """A proxy, a frontend that asks through it, one that asks the server itself, and a key of both
    with these limits."""
    keys = Keys(folder)
    ann, first = keys.add("ann", **limits), keys.add("first", concurrent=9)
    async with lossy_proxy(valkey.port) as proxy, contextlib.AsyncExitStack() as stack:
        clients = []
        for url in (proxy.url, valkey.url):
            config = msgspec.structs.replace(keys.config, limits_url=url)
            client = await stack.enter_async_context(serving(ScriptedGateway(script), config))
            shared(client).wait_s = 5.0
            body = {"prompt": [1], "max_tokens": 1}
            assert await statuses([client], 1, first, body) == {200: 1}
            clients.append(client)
        await all_told(valkey)
        await stack.enter_async_context(asyncio.timeout(60))
        yield proxy, clients[0], clients[1], ann


async def left(client: Client, headers: dict[str, str]) -> tuple[str, str]:
    """What a request of one token is told of requests and tokens that are left after it."""
    body = {"prompt": [1], "max_tokens": 1}
    status, _, response = await client.post(TEXT, body, headers=headers)
    assert status == 200
    names = ("requests", "tokens")
    found = [response.headers[f"x-ratelimit-remaining-{name}"] for name in names]
    return found[0], found[1]


MANY: dict[str, Any] = {
    "requests_per_minute": 100,
    "tokens_per_minute": 1000,
    "tokens_per_day": 1000,
}


@needs_server
def test_an_answer_that_comes_late_leaves_a_running_request_in_the_count(
    tmp_path: Path, valkey: ValkeyProcess
) -> None:
    go_on = asyncio.Event()

    async def script(work: Work, sink: Sink) -> None:
        if work.prompt == ONE_PROMPT:
            await go_on.wait()
        await say("x")(work, sink)

    async def main() -> None:
        limits = {**MANY, "concurrent": 1}
        async with behind_a_proxy(tmp_path, valkey, limits, script) as (proxy, late, other, ann):
            shared(late).wait_s = WAIT_SECONDS
            proxy.go_on.clear()
            running = asyncio.create_task(statuses([late], 1, ann))
            await async_until(lambda: len(late.gateway.works) == 2)  # it has not waited
            shared(late).wait_s = 5.0
            proxy.go_on.set()
            assert await statuses([late], 1, ann) == {429: 1}  # is asked for behind the late answer
            await async_until(lambda: not shared(late)._untold)
            await async_until(lambda: runs(valkey) == 1)
            assert await statuses([other], 1, ann) == {429: 1}
            go_on.set()
            assert await running == {200: 1}
            await all_told(valkey)
            assert await left(other, ann) == ("98", "994")  # 4 for the one, 2 for this

    asyncio.run(main())


@needs_server
@pytest.mark.parametrize("call", ["of the charge", "of the end"])
def test_a_request_counts_once_when_a_reply_is_lost(
    tmp_path: Path, valkey: ValkeyProcess, call: str
) -> None:
    go_on = asyncio.Event()

    async def script(work: Work, sink: Sink) -> None:
        if work.prompt == ONE_PROMPT:
            await go_on.wait()
        await say("a", "b")(work, sink)

    async def main() -> None:
        async with behind_a_proxy(tmp_path, valkey, MANY, script) as (proxy, lossy, other, ann):
            asked = asyncio.create_task(statuses([lossy], 1, ann))
            if call == "of the end":
                await async_until(lambda: len(lossy.gateway.works) == 2)
            proxy.loses = 1
            go_on.set()
            assert await asked == {200: 1}
            await proxy.lost.wait()
            await async_until(lambda: not shared(lossy).answers)
            await async_until(lambda: shared(lossy).answers)
            await async_until(lambda: not shared(lossy)._untold)
            await all_told(valkey)
            assert await left(other, ann) == ("98", "993")  # 5 for the one, 2 for this

    asyncio.run(main())


@needs_server
def test_a_client_that_leaves_while_a_reply_is_lost_leaves_no_charge(
    tmp_path: Path, valkey: ValkeyProcess
) -> None:
    async def main() -> None:
        limits = {**MANY, "concurrent": 1}
        async with behind_a_proxy(tmp_path, valkey, limits) as (proxy, lossy, other, ann):
            proxy.go_on.clear()
            proxy.loses = 1
            leaving = asyncio.create_task(statuses([lossy], 1, ann))
            await async_until(lambda: not proxy.loses)
            await asyncio.sleep(0.1)
            leaving.cancel()
            await asyncio.sleep(0.1)
            proxy.go_on.set()
            await asyncio.sleep(0.1)
            await all_told(valkey)
            assert await left(other, ann) == ("99", "998")

    asyncio.run(main())


@needs_server
def test_a_key_that_the_server_cannot_count_is_told_of_once_and_costs_no_other_key_anything(
    tmp_path: Path, valkey: ValkeyProcess, caplog: pytest.LogCaptureFixture
) -> None:
    keys = Keys(tmp_path, limits_url=valkey.url)
    ann, bob = keys.add("ann", **MANY), keys.add("bob", **MANY)
    go_on = asyncio.Event()

    async def script(work: Work, sink: Sink) -> None:
        if work.prompt == ONE_PROMPT:
            await go_on.wait()
        await say("x")(work, sink)

    async def main() -> None:
        async with frontends(keys, 1, script) as (client,):
            running = asyncio.create_task(statuses([client], 2, ann))
            await async_until(lambda: len(client.gateway.works) == 2)
            with Valkey(port=valkey.port) as asking:
                (broken,) = asking.keys("penstock:limits:*[}]")
                asking.set(broken, "no hash")
            go_on.set()
            assert await running == {200: 2}
            assert await left(client, bob) == ("99", "998")
            await async_until(lambda: "cannot count the key ann" in caplog.text)
            await all_told(valkey)
            assert await left(client, bob) == ("98", "994")
            assert await statuses([client], 3, ann) == {200: 3}  # by its own count
            assert shared(client).answers

    with caplog.at_level(logging.INFO, "penstock.frontend"):
        asyncio.run(main())
    said = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert len(said) == 1, said
    assert "cannot count the key ann (WRONGTYPE" in said[0]


@needs_server
def test_what_a_server_refuses_to_hear_for_long_is_given_up_and_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def allow(port: int, rule: str) -> None:
        with Valkey(port=port) as asking:
            asking.execute_command("ACL", "SETUSER", "default", rule)

    async def main(valkey: ValkeyProcess) -> None:
        keys = Keys(tmp_path, limits_url=valkey.url)
        ann = keys.add("ann", **MANY)
        async with frontends(keys, 1) as (client,):
            limits = shared(client)
            limits.retry_s = 0.02
            await asyncio.to_thread(allow, valkey.port, "-evalsha")
            assert await statuses([client], 3, ann) == {200: 3}
            await async_until(lambda: "were not told of" in caplog.text)
            await asyncio.to_thread(allow, valkey.port, "+evalsha")
            await async_until(lambda: limits.answers)
            assert await left(client, ann) == ("99", "998")

    with caplog.at_level(logging.INFO, "penstock.frontend"), valkey_process(tmp_path) as valkey:
        asyncio.run(main(valkey))
    said = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert len(said) == 3, said
    assert "cannot be used" in said[0]
    assert "were not told of 3 requests that have ended" in said[1]


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
        assert asyncio.run(main(valkey)) < 20.0  # 6 s, where nothing else is slow
