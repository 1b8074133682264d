"""What two frontends of a server know together: its keys, the lives of its requests, the responses
that it keeps, and what an admin has said."""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import openai
import pytest
from support.pipeline.served import Served, added_key, served

from penstock.loadtest.models.make_model import make_model

TEXT = "/v1/completions"
LONG = {"prompt": [1, 2, 3], "max_tokens": 1000, "ignore_eos": True}
"""It takes 20 s."""


class Setup(NamedTuple):
    server: Served
    keys: Path
    runtime: Path
    ann: str
    root: str


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    folder = tmp_path_factory.mktemp("keys")
    model, keys = make_model(folder / "tiny", max_position_embeddings=1024), folder / "keys"
    runtime = folder / "run"
    ann, root = added_key(keys, "ann"), added_key(keys, "root", "admin")
    with served(
        *(str(model), "--device", "null", "--null-step-ms", "20", "--frontends", "2"),
        *("--keys-file", str(keys), "--runtime-dir", str(runtime)),
    ) as server:
        yield Setup(server, keys, runtime, ann, root)


def ask(
    setup: Setup, key: str, method: str, path: str, body: Any = None, name: str = ""
) -> tuple[int, Any]:
    """Over a connection of its own, which either frontend may take."""
    connection = http.client.HTTPConnection(urlsplit(setup.server.url).netloc, timeout=30)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    if name:
        headers["x-request-id"] = name
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return found


class Running:
    """A request in a thread."""

    def __init__(self, setup: Setup, name: str, **fields: Any) -> None:
        self.answer: tuple[int, Any] = (0, None)
        self._body = {**LONG, **fields}
        self._thread = threading.Thread(target=self._run, args=(setup, name))
        self._thread.start()

    def _run(self, setup: Setup, name: str) -> None:
        self.answer = ask(setup, setup.ann, "POST", TEXT, self._body, name)

    def wait(self) -> tuple[int, Any]:
        self._thread.join(30)
        return self.answer


def life(setup: Setup, key: str, name: str, state: str) -> Any:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        status, found = ask(setup, key, "GET", f"/v1/requests/{name}")
        if status == 200 and found["state"] == state:
            return found
        time.sleep(0.02)
    raise AssertionError(found)


def test_any_frontend_tells_of_a_request_and_an_admin_ends_it(setup: Setup) -> None:
    running = Running(setup, "mine")
    found = life(setup, setup.ann, "mine", "first_token")
    assert (found["key"], found["prompt_tokens"]) == ("ann", 3)
    for _ in range(12):  # whichever answers
        assert ask(setup, setup.ann, "GET", "/v1/requests/mine")[0] == 200
        assert ask(setup, setup.root, "GET", "/v1/requests/mine")[0] == 200
    assert ask(setup, setup.ann, "GET", "/v1/requests/other")[0] == 404
    path = "/v1/admin/requests/mine/abort"
    assert ask(setup, setup.ann, "POST", path, {})[0] == 403
    assert ask(setup, setup.root, "POST", path, {}) == (200, {"id": "mine", "aborted": 1})
    status, answer = running.wait()
    assert (status, answer["error"]["code"]) == (499, "aborted")
    assert life(setup, setup.ann, "mine", "aborted")["error"].startswith("The request was aborted")
    ask(setup, setup.ann, "POST", TEXT, {**LONG, "max_tokens": 2}, "short")
    found = life(setup, setup.ann, "short", "finished")
    assert (found["engine"], found["preemptions"], found["finish"]) == ("0", 0, "length")
    assert 'key": "ann"' in setup.server.output.replace('":"', '": "')


def test_a_key_that_is_added_is_let_in_without_a_restart(setup: Setup) -> None:
    bob = added_key(setup.keys, "bob")
    deadline = time.monotonic() + 20
    let_in = 0
    while let_in < 6:
        assert time.monotonic() < deadline
        let_in = let_in + 1 if ask(setup, bob, "GET", "/v1/models")[0] == 200 else 0
        time.sleep(0.02)


def test_the_level_of_the_log_changes_in_every_process(setup: Setup) -> None:
    status, answer = ask(setup, setup.root, "POST", "/v1/admin/log_level", {"level": "debug"})
    assert (status, answer) == (200, {"level": "debug", "processes": 6})
    ask(setup, setup.root, "POST", "/v1/admin/log_level", {"level": "info"})


def test_the_sdk_has_an_exception_of_its_own_for_a_wrong_key(setup: Setup) -> None:
    for key, right in ((setup.ann, True), ("wrong", False)):
        address = f"{setup.server.url}/v1"
        with openai.OpenAI(base_url=address, api_key=key, max_retries=0) as client:
            if right:
                assert client.models.retrieve("tiny").id == "tiny"
            else:
                with pytest.raises(openai.AuthenticationError):
                    client.models.list()


def respond(setup: Setup, **more: Any) -> str:
    """The id of a response that is kept."""
    body = {"input": "hello", "max_output_tokens": 2, **more}
    status, answer = ask(setup, setup.ann, "POST", "/v1/responses", body)
    assert status == 200, answer
    assert answer.get("previous_response_id") == more.get("previous_response_id")
    return str(answer["id"])


def kept(setup: Setup) -> list[Path]:
    return list(setup.runtime.rglob("*.response"))


def test_a_response_is_known_to_every_frontend_of_a_server(setup: Setup) -> None:
    before, rounds = len(kept(setup)), 12
    latest = respond(setup)
    for _ in range(rounds):  # whichever frontend takes it
        latest = respond(setup, previous_response_id=latest)
    assert len(kept(setup)) == before + rounds + 1
    assert all(os.stat(path).st_mode & 0o077 == 0 for path in kept(setup))


def test_draining_by_an_admin_finishes_what_runs_and_ends_the_server(setup: Setup) -> None:
    respond(setup)
    assert kept(setup)
    running = Running(setup, "last", max_tokens=200)
    life(setup, setup.ann, "last", "first_token")
    status, answer = ask(setup, setup.root, "POST", "/v1/admin/drain", {})
    assert (status, answer) == (202, {"status": "draining", "scope": "server"})
    status, answer = running.wait()
    assert (status, answer["usage"]["completion_tokens"]) == (200, 200)
    assert setup.server.process.wait(30) == 0
    assert not kept(setup), "a response ends with the server"
