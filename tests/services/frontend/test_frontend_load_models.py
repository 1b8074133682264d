"""The routes that load and unload models, before a launcher whose answers are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.frontend.frontend_scripted import Client, run
from support.frontend.key_files import Keys
from support.polling import async_until

from penstock.client.gateway_interface import Readiness
from penstock.protocol.wire.messages.administration import (
    LOAD_MODEL,
    MODEL_STATES,
    UNLOAD_MODEL,
    LoadModel,
    ModelAnswer,
    ModelState,
)
from penstock.protocol.wire.messages.membership import Capacity, Identity, Peer, Phase
from penstock.services.frontend.requests import model_routes
from penstock.services.frontend.requests.model_routes import LOAD, STATES, UNLOAD

LAUNCHER = Peer("launcher", "", 1, Identity(1, "host"), Phase.READY, "", Capacity(), 0)
encode = msgspec.msgpack.encode


class Launcher:
    """Answers each question with the next of its states, and the last one again and again."""

    def __init__(self, *states: str, name: str = "m", reason: str = "") -> None:
        self.asked: list[tuple[str, bytes]] = []
        self._states = list(states)
        self._name = name
        self._reason = reason

    def __call__(self, what: str, about: bytes) -> bytes:
        self.asked.append((what, about))
        state = self._states[0] if len(self._states) == 1 else self._states.pop(0)
        if state == "silent":
            return b""
        if state == "gone":
            return encode(ModelAnswer([]))
        found = ModelState(self._name, ["also"], "/m", state, 1.0, self._reason, "")
        return encode(ModelAnswer([found]))


def use(keys: Keys, launcher: Callable[[str, bytes], bytes] | None, act: Any) -> None:
    root = keys.add("root", "admin")

    async def with_launcher(client: Client) -> None:
        if launcher is not None:
            client.gateway.peers = [LAUNCHER]
            client.gateway.launcher_answer = launcher
        await act(client, root)

    run(with_launcher, config=keys.config)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_routes, "LOOK_SECONDS", 0.005)


def test_a_load_is_on_its_way_at_once_and_says_where_its_state_is(keys: Keys) -> None:
    launcher = Launcher("loading", name="org/m")

    async def act(client: Client, root: dict[str, str]) -> None:
        body = {"model": "folder", "name": "org/m", "memory_share": 0.25}
        status, told, response = await client.post(LOAD, body, headers=root)
        assert (status, told["state"], told["aliases"]) == (202, "loading", ["also"])
        assert response.headers["Location"] == f"{STATES}/org/m"
        status, told, _ = await client.get(response.headers["Location"], headers=root)
        assert (status, told["id"]) == (200, "org/m")
        assert (await client.get(f"{STATES}/also", headers=root))[0] == 200
        assert (await client.get(f"{STATES}/nobody", headers=root))[0] == 404
        _, metrics, _ = await client.get("/metrics", headers=root)
        assert b'{route="/v1/admin/models/{model:.+}",status="404"} 1' in metrics

    use(keys, launcher, act)
    asked = encode(LoadModel("folder", "org/m", 0.25))
    assert launcher.asked[0] == (LOAD_MODEL, asked)
    assert launcher.asked[1] == (MODEL_STATES, b"")


def test_who_waits_hears_when_it_is_ready_here_as_well(keys: Keys) -> None:
    launcher = Launcher("loading", "silent", "ready")

    async def act(client: Client, root: dict[str, str]) -> None:
        client.gateway.readiness = Readiness(False, {})
        body = {"model": "folder", "wait_s": 20}
        asked = asyncio.create_task(client.post(LOAD, body, headers=root))
        await async_until(lambda: len(launcher.asked) > 5)
        assert not asked.done(), "this frontend has not heard of it yet"
        client.gateway.readiness = Readiness(True, {})
        status, told, _ = await asked
        assert (status, told["state"]) == (200, "ready")

    use(keys, launcher, act)


def test_who_waits_for_longer_than_it_takes_hears_how_far_it_is(keys: Keys) -> None:
    async def act(client: Client, root: dict[str, str]) -> None:
        body = {"model": "folder", "wait_s": 0.3}
        status, told, _ = await client.post(LOAD, body, headers=root)
        assert (status, told["state"]) == (202, "loading")

    use(keys, Launcher("loading"), act)


def test_who_waits_for_a_load_that_fails_hears_why(keys: Keys) -> None:
    async def act(client: Client, root: dict[str, str]) -> None:
        body = {"model": "folder", "wait_s": 20}
        status, told, _ = await client.post(LOAD, body, headers=root)
        assert (status, told["error"]["code"]) == (500, "model_load_failed")
        assert "worker 1 ended" in told["error"]["message"]

    use(keys, Launcher("loading", "failed", reason="worker 1 ended"), act)


def test_who_waits_does_not_hold_up_the_end_of_the_server(keys: Keys) -> None:
    launcher = Launcher("loading")

    async def act(client: Client, root: dict[str, str]) -> None:
        body = {"model": "folder", "wait_s": 20}
        asked = asyncio.create_task(client.post(LOAD, body, headers=root))
        await async_until(lambda: len(launcher.asked) > 1)
        client.gateway.is_draining = True
        async with asyncio.timeout(15):
            assert (await asked)[0] == 202

    use(keys, launcher, act)


def test_an_unloading_is_over_when_the_launcher_has_forgotten_the_model(keys: Keys) -> None:
    launcher = Launcher("draining", "draining", "gone")

    async def act(client: Client, root: dict[str, str]) -> None:
        status, told, _ = await client.post(UNLOAD, {"model": "m", "wait_s": 20}, headers=root)
        assert (status, told["id"], told["state"]) == (200, "m", "unloaded")

    use(keys, launcher, act)
    assert launcher.asked[0] == (UNLOAD_MODEL, b"m")


def test_an_unloading_answers_at_once_where_nobody_waits(keys: Keys) -> None:
    async def act(client: Client, root: dict[str, str]) -> None:
        status, told, response = await client.post(UNLOAD, {"model": "m"}, headers=root)
        assert (status, told["state"]) == (202, "draining")
        assert response.headers["Location"] == f"{STATES}/m"

    use(keys, Launcher("draining"), act)


def test_what_the_launcher_refuses_is_told_as_it_says_it(keys: Keys) -> None:
    refusal = ModelAnswer([], 409, "model_exists", "there is one already")

    async def act(client: Client, root: dict[str, str]) -> None:
        status, told, _ = await client.post(LOAD, {"model": "folder"}, headers=root)
        assert (status, told["error"]["code"]) == (409, "model_exists")
        assert told["error"]["message"] == "There is one already"

    use(keys, lambda what, about: encode(refusal), act)


def test_without_a_launcher_the_answer_says_how_it_is_done_by_hand(keys: Keys) -> None:
    async def act(client: Client, root: dict[str, str]) -> None:
        answers = [
            await client.get(STATES, headers=root),
            await client.get(f"{STATES}/m", headers=root),
            await client.post(LOAD, {"model": "folder"}, headers=root),
            await client.post(UNLOAD, {"model": "m"}, headers=root),
        ]
        for status, told, _ in answers:
            assert (status, told["error"]["code"]) == (501, "no_launcher")
            assert "penstock worker --router ADDRESS" in told["error"]["message"]

    use(keys, None, act)


def test_a_launcher_that_does_not_answer_is_a_503(keys: Keys) -> None:
    async def act(client: Client, root: dict[str, str]) -> None:
        status, told, response = await client.post(LOAD, {"model": "folder"}, headers=root)
        assert (status, told["error"]["code"]) == (503, "launcher_silent")
        assert response.headers["Retry-After"] == "1"

    use(keys, Launcher("silent"), act)
