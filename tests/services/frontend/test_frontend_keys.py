"""Keys of a file: what each role may do, which models, and what a change of the file does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.frontend.frontend_scripted import Client, ScriptedGateway, run, serving
from support.frontend.key_files import Keys
from support.polling import async_until

from penstock.client.gateway_interface import Readiness, ServedModel
from penstock.protocol.config.server_fields import ServerConfig
from penstock.protocol.keys.key_file import Line
from penstock.services.frontend.context import CONTEXT
from penstock.services.frontend.errors import ApiError
from penstock.services.frontend.keys.key_table import KeyTable
from penstock.services.frontend.parse import find_model

TEXT = "/v1/completions"
ONE = {"prompt": "x", "model": "org/model"}


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


@contextlib.asynccontextmanager
async def two_models(config: ServerConfig) -> AsyncIterator[Client]:
    gateway = ScriptedGateway()
    gateway.served.append(ServedModel("org/other", ["second"], 64, 1000))
    async with serving(gateway, config) as client, asyncio.timeout(60):
        yield client


async def reread(client: Client) -> None:
    table = client.app[CONTEXT].keys.table
    assert table is not None
    await table.look()


def test_readiness_needs_no_key_and_lists_models_only_to_those_who_may_know_them(
    keys: Keys,
) -> None:
    all_models, of_one = keys.add("ann"), keys.add("bob", models=["second"])

    async def use() -> None:
        async with two_models(keys.config) as client:
            client.gateway.readiness = Readiness(
                True, {"engine": "ready"}, {"org/model": "ready", "org/other": "ready"}
            )
            for headers, listed in (
                ({}, []),
                ({"x-api-key": "wrong"}, []),
                (all_models, ["org/model", "org/other"]),
                (of_one, ["org/other"]),  # which is the first name of the second one
            ):
                status, answer, _ = await client.get("/ready", headers=headers)
                assert (status, sorted(answer["models"])) == (200, listed), answer
                status, answer, _ = await client.get("/ready?model=none", headers=headers)
                named = "org/model" in answer["error"]["message"]
                assert (status, named) == (404, headers is all_models), answer
            for headers in ({}, all_models, of_one):
                status, _, _ = await client.get("/ready?model=second", headers=headers)
                assert status == 200

    asyncio.run(use())


def test_each_role_may_do_its_own_and_is_told_by_name_what_it_may_not(keys: Keys) -> None:
    user, metrics = keys.add("ann"), keys.add("prometheus", "metrics")
    admin, flag = keys.add("root", "admin"), {"x-api-key": "of-the-flag"}

    async def use(client: Client) -> None:
        for headers, allowed in (
            (user, {TEXT, "/v1/models", "/version", "/nothing"}),
            (metrics, {"/metrics", "/version", "/nothing"}),
            (flag, {TEXT, "/v1/models", "/metrics", "/version", "/nothing"}),
            (admin, {TEXT, "/v1/models", "/metrics", "/version", "/nothing"}),
        ):
            for path in (TEXT, "/v1/models", "/metrics", "/version", "/nothing"):
                if path == TEXT:
                    status, answer, _ = await client.post(path, ONE, headers=headers)
                else:
                    status, answer, _ = await client.get(path, headers=headers)
                assert status == (404 if path == "/nothing" else 200 if path in allowed else 403)
                if status == 403:
                    assert answer["error"]["type"] == "permission_error"
        _, answer, _ = await client.get("/metrics", headers=user)
        said = "The key ann has the role user, and this route is for the role metrics"
        assert answer["error"]["message"].startswith(said)
        assert "penstock keys add NAME --role metrics" in answer["error"]["message"]
        status, _, _ = await client.get("/live")
        assert status == 200

    run(use, config=keys.config)


def test_a_key_sees_and_uses_its_own_models_under_any_of_their_names(keys: Keys) -> None:
    one, both = keys.add("ann", models=["alias"]), keys.add("bob")
    anthropic = {**one, "anthropic-version": "2023-06-01"}

    async def main() -> None:
        async with two_models(keys.config) as client:
            _, answer, _ = await client.get("/v1/models", headers=one)
            assert [card["id"] for card in answer["data"]] == ["org/model", "alias"]
            _, answer, _ = await client.get("/v1/models", headers=both)
            assert len(answer["data"]) == 4
            _, answer, _ = await client.get("/v1/models", headers=anthropic)
            assert {card["id"] for card in answer["data"]} == {"org/model", "alias", "model"}
            _, answer, _ = await client.get("/api/tags", headers=one)
            assert [card["name"] for card in answer["models"]] == ["org/model", "alias"]
            for name, expected in (("alias", 200), ("org/model", 200), ("second", 403)):
                body = {"prompt": "x", "model": name}
                status, answer, _ = await client.post(TEXT, body, headers=one)
                assert status == expected
            assert answer["error"]["code"] == "model_not_allowed"
            said = "The key ann may not use the model 'second'; it may use 'alias'"
            assert answer["error"]["message"] == said
            status, _, _ = await client.get("/v1/models/second", headers=one)
            assert status == 403
            chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
            status, answer, _ = await client.post(
                "/v1/messages", {**chat, "model": "second"}, headers=anthropic
            )
            assert (status, answer["error"]["type"]) == (403, "permission_error")

    asyncio.run(main())


def test_a_key_of_one_model_needs_name_none_and_errors_name_no_other(keys: Keys) -> None:
    one, both = keys.add("ann", models=["org/other"]), keys.add("bob")
    none = keys.add("eve", models=["gone"])
    nameless = {"prompt": "x"}

    async def main() -> None:
        async with two_models(keys.config) as client:
            status, answer, _ = await client.post(TEXT, nameless, headers=one)
            assert (status, answer.get("model")) == (200, "org/other")
            status, answer, _ = await client.post(TEXT, nameless, headers=both)
            assert (status, "'org/model', 'alias', 'org/other'" in str(answer)) == (400, True)
            unknown = {**ONE, "model": "unknown"}
            status, answer, _ = await client.post(TEXT, unknown, headers=one)
            assert status == 404
            said = "The model 'unknown' does not exist; served here: 'org/other', 'second'"
            assert answer["error"]["message"] == said
            status, answer, _ = await client.get("/v1/models/unknown", headers=one)
            assert (status, answer["error"]["message"]) == (404, said)
            for asked in ("org/model", "alias", "model"):
                for status, answer, _ in (
                    await client.post(TEXT, {**ONE, "model": asked}, headers=one),
                    await client.get(f"/v1/models/{asked}", headers=one),
                    await client.post("/api/show", {"model": asked + ":latest"}, headers=one),
                ):
                    assert (status, "may not use the model" in str(answer)) == (403, True)
            for body, expected in ((nameless, 503), (unknown, 404), (ONE, 403)):
                status, answer, _ = await client.post(TEXT, body, headers=none)
                assert (status, "second" in str(answer), "gone" in str(answer)) == (
                    expected, False, True,
                )  # fmt: skip

    asyncio.run(main())


def test_keys_that_are_over_disabled_or_unknown_are_a_401_that_says_so(keys: Keys) -> None:
    before = datetime.now(UTC) - timedelta(hours=1)
    over = keys.add("ann", expires=before)
    stopped = keys.add("bob")
    keys.change(
        lambda lines: [Line(line.text.replace('"bob"', '"bob","disabled":true')) for line in lines]
    )
    good = keys.add("carl")["Authorization"]

    async def use(client: Client) -> None:
        for headers, said in (
            (over, "The API key ann expired on"),
            (stopped, "The API key bob is disabled"),
            ({"Authorization": good[:-1] + "x"}, "The API key is not valid"),
            ({"Authorization": "Bearer sk-penstock-" + "0" * 12 + "-" + "a" * 43}, "is not valid"),
            ({}, "An API key is required"),
        ):
            status, answer, response = await client.get("/v1/models", headers=headers)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
            assert said in answer["error"]["message"]
            assert response.headers["WWW-Authenticate"] == "Bearer"

    run(use, config=keys.config)


def test_a_changed_file_is_taken_and_a_broken_one_is_not(
    keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    ann = keys.add("ann")

    async def use(client: Client) -> None:
        async def status(headers: dict[str, str]) -> int:
            await reread(client)
            return (await client.get("/v1/models", headers=headers))[0]

        bob = keys.add("bob")
        assert (await status(ann), await status(bob)) == (200, 200)
        good = keys.path.read_bytes()
        with caplog.at_level(logging.WARNING, "penstock.frontend"):
            for broken in (b"", b"{", good[:-20], b"\xff"):
                keys.path.write_bytes(broken)
                assert await status(bob) == 200
            keys.path.unlink()
            assert await status(bob) == 200
            keys.path.write_bytes(good)
            os.chmod(keys.path, 0o644)
            assert await status(bob) == 200
        assert "the keys stay as they were" in caplog.text
        assert "chmod 600" in caplog.text
        os.chmod(keys.path, 0o600)
        keys.change(lambda lines: [line for line in lines if '"bob"' not in line.text])
        assert (await status(ann), await status(bob)) == (200, 401)

    run(use, config=keys.config)


class CountingTable(KeyTable):
    looks = 0

    async def look(self) -> None:
        self.looks += 1
        await super().look()


def test_a_file_that_cannot_be_reached_is_named_once_and_taken_again_when_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "there").mkdir()
    keys = Keys(tmp_path / "there")
    way = tmp_path / "way"
    way.symlink_to("there")
    unreachable = ["x" * 300, "y" * 300]  # no file can have such a name, even for root

    def lead(target: str) -> None:
        (tmp_path / "new").symlink_to(target)
        os.replace(tmp_path / "new", way)

    async def main() -> None:
        table = CountingTable(way / "keys", look_s=0.001)
        table.begin()
        for target in unreachable:
            lead(target)
            enough = table.looks + 10
            await async_until(lambda enough=enough: table.looks > enough)
        key = keys.key("ann")
        lead("there")
        await async_until(lambda: table.find(key))
        await table.end()

    with caplog.at_level(logging.WARNING, "penstock.frontend"):
        asyncio.run(main())
    (said,) = [one.getMessage() for one in caplog.records]
    assert said == f"the keys stay as they were: {way / 'keys'}: File name too long"
    assert not any(one.exc_info for one in caplog.records)


def test_a_key_that_is_removed_begins_nothing_more_on_an_open_websocket(keys: Keys) -> None:
    ann = keys.add("ann")
    body = {"id": "1", "type": "completion", "body": ONE}

    async def use(client: Client) -> None:
        async def ask() -> dict[str, Any]:
            await socket.send_json(body)
            while True:
                frame: dict[str, Any] = await socket.receive_json()
                if frame["type"] in ("done", "error", "end"):
                    return frame

        socket: aiohttp.ClientWebSocketResponse
        async with client.session.ws_connect(client.url + "/v1/stream", headers=ann) as socket:
            assert (await ask())["type"] != "error"
            keys.change(lambda lines: lines[:1])
            await reread(client)
            assert "The API key ann was removed" in str(await ask())

    run(use, config=keys.config)


def test_a_request_without_a_model_means_the_only_adapter_where_no_more_may_be_used() -> None:
    base = ServedModel("base", [], 64, 1000)
    sql, chat = (ServedModel(name, [], 64, 1000, parent="base") for name in ("sql", "chat"))
    assert find_model(None, [base, sql, chat]) == (base, "base")
    assert find_model(None, [sql]) == (sql, "sql")
    with pytest.raises(ApiError, match="model is missing; served here: 'sql', 'chat'"):
        find_model(None, [sql, chat])
