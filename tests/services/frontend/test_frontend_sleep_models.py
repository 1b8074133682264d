"""The routes that put models to sleep and wake them: a frontend and a launcher whose answers are
scripted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.frontend.frontend_scripted import Client
from support.frontend.key_files import Keys
from test_frontend_load_models import Launcher, use

from penstock.protocol.wire.messages.administration import MODEL_STATES, SLEEP_MODEL, WAKE_MODEL


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


def test_a_model_falls_asleep_and_who_asks_waits_for_it(keys: Keys) -> None:
    launcher = Launcher("falling asleep", "falling asleep", "asleep")

    async def act(client: Client, root: dict[str, str]) -> None:
        status, told, _ = await client.post("/sleep", {"model": "also"}, headers=root)
        assert (status, told["id"], told["state"]) == (200, "m", "asleep")

    use(keys, launcher, act)
    assert launcher.asked[0] == (SLEEP_MODEL, b"also")


def test_who_does_not_wait_hears_where_it_stands(keys: Keys) -> None:
    async def act(client: Client, root: dict[str, str]) -> None:
        body = {"model": "m", "wait_s": 0}
        status, told, response = await client.post("/wake_up", body, headers=root)
        assert (status, told["state"]) == (202, "waking")
        assert response.headers["Location"] == "/v1/admin/models/m"

    use(keys, Launcher("waking"), act)


def test_a_client_of_vllm_needs_no_body_where_there_is_one_model(keys: Keys) -> None:
    launcher = Launcher("asleep")

    async def act(client: Client, root: dict[str, str]) -> None:
        async with client.session.post(f"{client.url}/sleep?level=2", headers=root) as answer:
            assert answer.status == 200
        status, told, _ = await client.get("/is_sleeping", headers=root)
        assert (status, told) == (200, {"is_sleeping": True, "state": "asleep"})

    use(keys, launcher, act)
    assert [what for what, _ in launcher.asked] == [MODEL_STATES, SLEEP_MODEL, MODEL_STATES]


def test_a_model_that_cannot_be_woken_is_an_error_that_says_why(keys: Keys) -> None:
    launcher = Launcher("waking", "falling asleep", reason="worker 1 ended")

    async def act(client: Client, root: dict[str, str]) -> None:
        status, told, _ = await client.post("/wake_up", {"model": "m"}, headers=root)
        assert (status, told["error"]["code"]) == (500, "model_wake_failed")
        assert "worker 1 ended" in told["error"]["message"]

    use(keys, launcher, act)
    assert launcher.asked[0] == (WAKE_MODEL, b"m")


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/sleep", {"model": "m", "level": 1}, "level"),
        ("/sleep?level=1", None, "level"),
        ("/sleep?tags=weights", None, "tags"),
        ("/wake_up", {"model": "m", "tags": ["weights"]}, "tags"),
        ("/wake_up", {"wait_s": -1}, "wait_s"),
    ],
)
def test_what_is_not_done_is_refused_by_name(keys: Keys, path: str, body: Any, named: str) -> None:
    launcher = Launcher("ready")

    async def act(client: Client, root: dict[str, str]) -> None:
        if body is None:
            async with client.session.post(client.url + path, headers=root) as answer:
                status, told = answer.status, await answer.text()
        else:
            status, told, _ = await client.post(path, body, headers=root)
        assert status == 400
        assert named in str(told)

    use(keys, launcher, act)
    assert not launcher.asked


def test_nobody_but_an_admin_puts_models_to_sleep(keys: Keys) -> None:
    ann = keys.add("ann")
    launcher = Launcher("ready")

    async def act(client: Client, root: dict[str, str]) -> None:
        for path in ("/sleep", "/wake_up"):
            assert (await client.post(path, {"model": "m"}, headers=ann))[0] == 403
            assert (await client.post(path, {"model": "m"}))[0] == 401
        assert (await client.get("/is_sleeping", headers=ann))[0] == 403

    use(keys, launcher, act)
    assert not launcher.asked
