"""Models are loaded and unloaded while a server runs, over its admin routes."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
import psutil
import pytest
from support.chaos.victims import children, find
from support.pipeline.served import Served, added_key, served
from support.polling import until

from penstock.loadtest.models.make_model import make_model
from penstock.protocol.process.running_servers import RECORD, ServerRecord

TEXT = "/v1/completions"
STATES, LOAD, UNLOAD = (f"/v1/admin/models{path}" for path in ("", "/load", "/unload"))
STEP_MS = 15
FLAGS = ("--device", "null", "--null-step-ms", str(STEP_MS), "--frontends", "2")
WAIT_S = 60.0
SEED = 7
SLOW = pytest.mark.slow
Answer = tuple[int, Any]


class Setup(NamedTuple):
    server: Served
    dirs: Path
    ann: str
    root: str

    def ask(self, method: str, path: str, body: Any = None, key: str | None = None) -> Answer:
        """Over a connection of its own, which either frontend may take; with an admin's key."""
        headers = {"Content-Type": "application/json"}
        if key != "":
            headers["Authorization"] = f"Bearer {key or self.root}"
        connection = http.client.HTTPConnection(urlsplit(self.server.url).netloc, timeout=90)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def load(self, model: str, **more: Any) -> Answer:
        return self.ask("POST", LOAD, {"model": model, "wait_s": WAIT_S, **more})

    def unload(self, model: str, wait_s: float = WAIT_S) -> Answer:
        return self.ask("POST", UNLOAD, {"model": model, "wait_s": wait_s})

    def complete(self, model: str, max_tokens: int = 4) -> Answer:
        body = {"model": model, "prompt": [5, 6, 7], "max_tokens": max_tokens, "ignore_eos": True}
        return self.ask("POST", TEXT, {**body, "seed": SEED})

    def served(self) -> list[str]:
        return [model["id"] for model in self.ask("GET", "/v1/models")[1]["data"]]

    def states(self) -> dict[str, str]:
        return {one["id"]: one["state"] for one in self.ask("GET", STATES)[1]["data"]}

    def record(self) -> ServerRecord:
        """What the launcher leaves word of for commands of the same user."""
        folder = Path(self.server.router.removeprefix("ipc://")).parent
        return msgspec.json.decode((folder / RECORD).read_bytes(), type=ServerRecord)

    def all_ready(self) -> bool:
        """Whether both frontends are there and say so, as far as a dozen connections can tell."""
        try:
            processes = self.ask("GET", "/playground/status")[1]["processes"]
            there = [one["phase"] for one in processes if one["service"] == "frontend"]
            return there == ["ready"] * 2 and all(
                self.ask("GET", "/ready")[0] == 200 for _ in range(12)
            )
        except (OSError, http.client.HTTPException):
            return False

    def until(self, condition: Callable[[], bool], what: str) -> None:
        until(condition, WAIT_S, told=lambda: f"{what}\n{self.server.output[-4000:]}")


class Stream:
    """A streamed completion, read in a thread."""

    def __init__(self, setup: Setup, model: str, max_tokens: int) -> None:
        self.arrivals: list[float] = []
        self.texts: list[str] = []
        self.finish: str | None = None
        self.error: Any = None
        body = {"model": model, "prompt": [5, 6, 7], "max_tokens": max_tokens, "ignore_eos": True}
        self._thread = threading.Thread(
            target=self._run, args=(setup, {**body, "stream": True, "seed": SEED})
        )
        self._thread.start()
        setup.until(lambda: len(self.arrivals) > 3 or self.error, f"no token of {model}")

    def _run(self, setup: Setup, body: Any) -> None:
        connection = http.client.HTTPConnection(urlsplit(setup.server.url).netloc, timeout=90)
        headers = {"Authorization": f"Bearer {setup.ann}", "Content-Type": "application/json"}
        connection.request("POST", TEXT, json.dumps(body), headers)
        for line in connection.getresponse():
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                self.error = event
                break
            self.arrivals.append(time.monotonic())
            self.texts.append(event["choices"][0]["text"])
            self.finish = event["choices"][0]["finish_reason"] or self.finish
        connection.close()

    def end(self) -> None:
        """Wait for its end, which must be that of its length."""
        self._thread.join(WAIT_S)
        assert (self.error, self.finish) == (None, "length")


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    place = tmp_path_factory.mktemp("load")
    dirs = place / "models"
    for number, name in enumerate(("second", "third")):
        make_model(dirs / name, seed=number, max_position_embeddings=2048)
    first = make_model(place / "first", seed=9, max_position_embeddings=2048)
    broken = dirs / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]')
    late = make_model(dirs / "late", max_position_embeddings=2048)  # its tokenizer ends at once
    (late / "tokenizer.json").write_text("{}")
    (dirs / "out").symlink_to(first)
    (dirs / "linked").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (dirs / "linked" / name).symlink_to(first / name)
    keys = place / "keys"
    ann, root = added_key(keys, "ann"), added_key(keys, "root", "admin")
    dirs_flags = ("--model-dirs", str(dirs), "--keys-file", str(keys))
    with served(str(first), *FLAGS, *dirs_flags) as server:
        yield Setup(server, dirs, ann, root)


def test_a_model_is_loaded_beside_a_stream_chats_and_goes_while_its_own_stream_ends_whole(
    setup: Setup,
) -> None:
    count = len(children(setup.server))
    other = Stream(setup, "first", 1000)
    began = time.monotonic()
    status, told = setup.load("second")
    assert (status, told["state"], told["id"]) == (200, "ready", "second"), told
    during = [t for t in other.arrivals if began < t < time.monotonic()]
    assert len(during) > 20, "the stream of the other model had to wait"
    assert setup.record().models == ["first", "second"]
    for _ in range(6):  # whichever frontend answers
        assert setup.served() == ["first", "second"]
        assert setup.complete("second")[0] == 200
    assert setup.states() == {"first": "ready", "second": "ready"}
    assert setup.ask("GET", "/ready")[1]["models"] == {"first": "ready", "second": "ready"}
    processes = setup.ask("GET", "/playground/status")[1]["processes"]
    assert sum(one["service"] == "worker" for one in processes) == 2

    assert setup.load("second")[0] == 409, "its name is taken"
    status, told = setup.load("third", name="first")
    assert (status, told["error"]["code"]) == (409, "model_exists")

    own = Stream(setup, "second", 400)
    status, told = setup.unload("second", wait_s=0.0)
    assert (status, told["state"]) == (202, "draining")
    setup.until(lambda: setup.complete("second")[0] == 404, "it still takes requests")
    assert setup.served() == ["first"]
    assert own.finish is None, "its stream still runs"
    assert setup.unload("second")[1]["state"] == "unloaded"
    own.end()
    assert setup.complete("second")[0] == 404
    assert setup.states() == {"first": "ready"}
    assert setup.ask("GET", f"{STATES}/second")[0] == 404
    assert len(children(setup.server)) == count
    assert setup.ask("GET", "/ready")[0] == 200
    assert setup.record().models == ["first"]
    other.end()
    (alone,) = setup.complete("first", 200)[1]["choices"]
    assert "".join(other.texts).startswith(alone["text"]), "it is what it is alone"


def test_the_first_model_may_go_when_another_is_there_and_the_last_one_may_not(
    setup: Setup,
) -> None:
    status, told = setup.unload("first")
    assert (status, told["error"]["code"]) == (409, "last_model")
    assert setup.load("third", name="org/next")[0] == 200
    assert setup.unload("first")[1]["state"] == "unloaded"
    for _ in range(4):
        assert setup.served() == ["org/next"]
        assert setup.ask("GET", "/ready")[0] == 200
    assert setup.ask("GET", f"{STATES}/org/next")[1]["state"] == "ready"
    assert setup.unload("org/next")[1]["error"]["code"] == "last_model"
    struck = find(setup.server, "frontend", 1)
    struck.kill()  # the next one does not wait for a model that was unloaded
    struck.wait(60)
    setup.until(setup.all_ready, "a new frontend misses the first model")
    assert setup.load("second", name="first")[0] == 200
    assert setup.unload("org/next")[0] == 200
    assert setup.served() == ["first"]


@pytest.mark.parametrize(
    ("folder", "status", "code"),
    [
        ("../first", 403, "model_folder_refused"),
        ("second/../../first", 403, "model_folder_refused"),
        ("/etc", 403, "model_folder_refused"),
        (".", 403, "model_folder_refused"),
        ("out", 403, "model_folder_refused"),
        ("linked", 403, "model_folder_refused"),
        ("nobody", 404, "model_folder_refused"),
        ("second\0", 400, "model_folder_refused"),
        ("broken", 400, "model_refused"),
        ("", 400, None),
    ],
)
def test_a_folder_that_may_not_or_cannot_be_loaded_is_refused_at_once(
    setup: Setup, folder: str, status: int, code: str | None
) -> None:
    found, told = setup.load(folder)
    assert (found, told["error"]["code"]) == (status, code), told
    assert set(setup.states()) == {"first"}


def test_a_load_that_fails_says_why_and_leaves_nothing_behind(setup: Setup) -> None:
    count = len(children(setup.server))
    status, told = setup.load("late")
    assert (status, told["error"]["code"]) == (500, "model_load_failed")
    assert "tokenizer.json" in told["error"]["message"]
    state = setup.ask("GET", f"{STATES}/late")[1]
    assert state["state"] == "failed"
    assert state["reason"] in told["error"]["message"]
    setup.until(lambda: len(children(setup.server)) == count, "a process is left")
    assert setup.served() == ["first"]
    assert setup.complete("late")[0] == 404
    assert setup.ask("GET", "/ready")[0] == 200
    assert setup.unload("late")[1]["state"] == "unloaded", "it is forgotten"
    assert set(setup.states()) == {"first"}


def test_nobody_but_an_admin_sees_or_changes_what_is_loaded(setup: Setup) -> None:
    for method, path, body in (
        ("GET", STATES, None),
        ("GET", f"{STATES}/first", None),
        ("POST", LOAD, {"model": "second"}),
        ("POST", UNLOAD, {"model": "first"}),
    ):
        assert setup.ask(method, path, body, key="")[0] == 401
        status, told = setup.ask(method, path, body, key=setup.ann)
        assert (status, told["error"]["code"]) == (403, "forbidden")
    assert setup.states() == {"first": "ready"}


@pytest.mark.parametrize("role", [pytest.param("frontend", marks=SLOW), "router", "worker"])
def test_a_load_during_which_a_process_dies_ends_ready_or_failed(setup: Setup, role: str) -> None:
    before = set(children(setup.server))
    status, told = setup.ask("POST", LOAD, {"model": "second", "name": "struck"})
    assert (status, told["state"]) == (202, "loading")
    if role == "worker":
        setup.until(lambda: len(children(setup.server)) > len(before), "nothing starts")
        new = [psutil.Process(pid) for pid in set(children(setup.server)) - before]
        next(one for one in new if "worker" in " ".join(one.cmdline())).kill()
    else:
        find(setup.server, role).kill()

    def state() -> str:
        try:
            return setup.states().get("struck", "")
        except (OSError, http.client.HTTPException, KeyError):  # who would answer was killed
            return ""

    setup.until(lambda: state() in ("ready", "failed"), "it hangs")
    assert state() == ("failed" if role == "worker" else "ready")
    assert setup.unload("struck")[1]["state"] == "unloaded"
    setup.until(lambda: len(children(setup.server)) == len(before), "a process is left")
    setup.until(setup.all_ready, "the server is not ready")


def test_the_end_of_the_server_ends_a_load_as_well(setup: Setup) -> None:
    """The last test: nothing runs after it."""
    server, count = setup.server, len(children(setup.server))
    answers: list[Answer] = []
    waiting = threading.Thread(target=lambda: answers.append(setup.load("second")))
    waiting.start()
    setup.until(lambda: len(children(server)) > count, "nothing starts")
    connected = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)
    connected.request("GET", "/live")
    connected.getresponse().read()
    everybody = list(server.processes().values())
    server.process.send_signal(signal.SIGTERM)
    headers = {"Authorization": f"Bearer {setup.root}", "Content-Type": "application/json"}
    with contextlib.suppress(OSError, http.client.HTTPException):  # it may be closed by now
        state = b""
        while b"draining" not in state:
            connected.request("GET", "/ready")
            state = connected.getresponse().read()
        connected.request("POST", LOAD, '{"model": "third"}', headers)
        late = connected.getresponse()
        assert (late.status, json.load(late)["error"]["code"]) == (503, "not_ready")
    assert server.process.wait(WAIT_S) == 0, "it does not wait for who waits"
    _gone, alive = psutil.wait_procs(everybody, timeout=30)
    assert alive == []
    waiting.join(WAIT_S)
    assert answers[0][0] == 202, "who waited for it is not cut off"
