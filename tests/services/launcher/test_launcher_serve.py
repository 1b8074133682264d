"""``penstock serve`` as its user meets it: real processes, the null device."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from support.counted import cpu_seconds, wakes
from support.polling import until

from penstock.loadtest.models.make_model import make_model
from penstock.services.launcher.builtin_model import builtin_model
from penstock.services.launcher.supervisor import ECHO_SECONDS

PATIENCE = 30.0
"""Seconds for anything on a busy machine."""
IDLE_SECONDS = 1.0
"""In which it is looked how often a process wakes by itself."""
SECOND_SIGNAL_SECONDS = ECHO_SECONDS + 0.1
"""A signal that comes sooner after another is taken for the same."""


class Server:
    """One ``penstock serve`` with a runtime folder of its own."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        # Not below pytest's folder: the path of an ipc socket has at most 107 characters.
        self.runtime = Path(tempfile.mkdtemp(prefix="p"))
        self.output: list[str] = []
        kept = {n: v for n, v in os.environ.items() if not n.startswith("PENSTOCK_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock.services", "serve", *arguments],
            env={**kept, "XDG_RUNTIME_DIR": str(self.runtime), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._everyone: list[psutil.Process] = []

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.output.extend(iter(self.process.stdout.readline, ""))

    def wait_for_text(self, text: str) -> None:
        until(lambda: text in self.text)

    @property
    def text(self) -> str:
        return "".join(self.output)

    def ready(self) -> Server:
        until(lambda: self.announcement or self.process.poll() is not None)
        assert self.process.poll() is None, self.text
        self.remember()
        return self

    def remember(self) -> list[psutil.Process]:
        """The children that live now; remembered for ``processes_left``."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        self._everyone += [child for child in children if child not in self._everyone]
        return children

    def child(self, title: str) -> psutil.Process:
        """The living child whose title is ``penstock: TITLE``."""

        def find() -> psutil.Process | None:
            for child in self.remember():
                try:
                    if child.cmdline()[:1] == [f"penstock: {title}"]:
                        return child
                except psutil.Error:
                    continue
            return None

        found: psutil.Process = until(find)
        return found

    @property
    def announcement(self) -> dict[str, Any]:
        """What the server says when it is ready; empty before."""
        lines = (line for line in list(self.output) if '"event": "serving"' in line)
        return next(map(msgspec.json.decode, lines), {})

    @property
    def url(self) -> str:
        return str(self.announcement["url"])

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.HTTPError, OSError):
            return False

    def members(self) -> list[str]:
        """The services of all processes that the router knows."""
        with urllib.request.urlopen(self.url + "/playground/status", timeout=PATIENCE) as answer:
            return [one["service"] for one in msgspec.json.decode(answer.read())["processes"]]

    def ask(self, **fields: Any) -> Any:
        """The open answer to a request."""
        body = {"prompt": "hello", "max_tokens": 4, "ignore_eos": True, **fields}
        request = urllib.request.Request(
            self.url + "/v1/completions",
            msgspec.json.encode({"model": "penstock-demo", **body}),
            {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
        )
        return urllib.request.urlopen(request, timeout=PATIENCE)

    def complete(self, **fields: Any) -> Any:
        with self.ask(**fields) as answer:
            return msgspec.json.decode(answer.read())

    def stop(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code

    def processes_left(self) -> list[psutil.Process]:
        return [
            process
            for process in self._everyone
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        ]

    def nothing_is_left(self) -> None:
        assert self.processes_left() == []
        assert os.listdir(self.runtime) == []
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", self.port)) != 0

    def clean(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE)
        shutil.rmtree(self.runtime, ignore_errors=True)


SLOW_TORCH = """
import ctypes, pathlib, sys, time

class Slow:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            time.sleep(1)  # the process has joined by then
            ctypes.PyDLL(None).sleep(5)  # and holds the interpreter's lock
            pathlib.Path(__file__).with_name("was-slow").touch()

sys.meta_path.insert(0, Slow())
"""
Start = Callable[..., Server]
NULL = ("--device", "null", "--port", "0")
KEY = "s3cret-key"


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("cache")
    return str(folder)


@pytest.fixture(scope="module")
def running(cache: str) -> Iterator[Start]:
    """Gives a server with these flags that an earlier test has used, if none has ended it."""
    servers: dict[tuple[str, ...], Server] = {}

    def find(*flags: str, **environment: str) -> Server:
        if flags in servers and servers[flags].process.poll() is not None:
            servers.pop(flags).clean()
        if flags not in servers:
            servers[flags] = Server(*flags, XDG_CACHE_HOME=cache, **environment)
        return servers[flags].ready()

    yield find
    for server in servers.values():
        server.clean()


@pytest.fixture
def shared(running: Start) -> Server:
    return running(*NULL, "--null-step-ms", "50", "--tokenizers", "2", "--api-key", KEY)


@pytest.fixture(scope="module")
def repaired(cache: str) -> Iterator[Server]:
    """A server whose processes tests end; it is whole again after each, and leaves nothing."""
    server = Server(*NULL, "--log-level", "debug", XDG_CACHE_HOME=cache)
    try:
        yield server.ready()
        server.remember()
        assert server.stop() == 0, server.text
        server.nothing_is_left()
    finally:
        server.clean()


@pytest.fixture
def start(cache: str) -> Iterator[Start]:
    servers: list[Server] = []

    def begin(*arguments: str, **environment: str) -> Server:
        servers.append(Server(*arguments, XDG_CACHE_HOME=cache, **environment))
        return servers[-1]

    yield begin
    for server in servers:
        server.clean()


# --- starting


def test_launcher_logs_a_json_line_for_each_phase_where_there_is_no_terminal(
    shared: Server,
) -> None:
    said = [msgspec.json.decode(line) for line in shared.output]
    ready = {line["process"] for line in said if line["event"] == "ready"}
    assert ready == {
        *("router", "tokenizer 0", "tokenizer 1", "scheduler 0", "worker 0", "frontend 0")
    }
    assert all(line["timestamp"].endswith("Z") and line["level"] for line in said)
    assert "this built-in model is small" in shared.text
    assert "joined" not in shared.text


def test_launcher_announces_what_a_program_needs_to_know_of_it(shared: Server) -> None:
    told = shared.announcement
    assert told["model"] == "penstock-demo"
    assert told["api"] == f"{shared.url}/v1"
    assert told["device"] == "null"
    assert told["max_model_len"] == 2048
    assert told["kv_tokens"] >= 2048
    assert told["router"].startswith("ipc://")
    assert "s3cret" not in shared.text


@pytest.fixture(scope="module")
def hub_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It holds one model."""
    home = tmp_path_factory.mktemp("home")
    root = home / "hub" / "models--org--little"
    make_model(root / "snapshots" / "0123abcd")
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("0123abcd")
    return home


@pytest.fixture(scope="module")
def named_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="p") as folder:
        yield Path(folder)


@pytest.fixture
def named(running: Start, hub_cache: Path, named_folder: Path) -> tuple[Server, Path]:
    """A server of that model, in a folder that its user names."""
    flags = ("org/little", *NULL, "--no-download", "--runtime-dir", str(named_folder))
    return running(*flags, HF_HOME=str(hub_cache)), named_folder


def test_launcher_serves_a_model_of_the_hubs_cache_under_its_name(
    named: tuple[Server, Path],
) -> None:
    server, _ = named
    assert server.announcement["model"] == "org/little"
    assert server.complete(model="org/little")["usage"]["completion_tokens"] == 4


def test_launcher_starts_separate_processes_that_ps_can_tell_apart(shared: Server) -> None:
    titles = {child.cmdline()[0] for child in shared.remember()}
    assert titles == {
        f"penstock: {name}"
        for name in ("router 0", "tokenizer 0", "tokenizer 1", "scheduler 0", "worker 0")
    } | {"penstock: frontend 0"}


def test_launcher_gives_each_process_a_group_of_its_own(shared: Server) -> None:
    """A terminal's Ctrl-C goes to a whole process group; only the launcher is to get it."""
    assert all(os.getpgid(child.pid) == child.pid for child in shared.remember())


def test_launcher_puts_keys_into_no_command_line(shared: Server) -> None:
    for child in shared.remember():
        assert b"s3cret" not in Path(f"/proc/{child.pid}/cmdline").read_bytes()


def test_launcher_uses_almost_no_cpu_when_idle(shared: Server) -> None:
    """It seldom wakes, and does little then; the least of three tries."""
    most_wakes, most_cpu = 50 * IDLE_SECONDS, 0.2 * IDLE_SECONDS
    pid = shared.process.pid
    for _ in range(3):
        woke, used = wakes(pid), cpu_seconds(pid)
        time.sleep(IDLE_SECONDS)
        woken, spent = wakes(pid) - woke, cpu_seconds(pid) - used
        if woken < most_wakes and spent < most_cpu:
            break
    assert (woken < most_wakes, spent < most_cpu) == (True, True), (woken, spent)


@pytest.mark.slow
def test_launcher_waits_for_an_import_that_stops_all_threads_of_a_process(
    start: Start, tmp_path: Path
) -> None:
    """As torch's does from a cold disk: no beat comes for longer than a serving process may be
    silent."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_TORCH)
    server = start("--device", "cpu", "--port", "0", "--threads", "1", PYTHONPATH=str(tmp_path))
    first = server.child("worker 0").pid
    server.ready()
    assert (tmp_path / "was-slow").exists()
    assert "declared lost" not in server.text
    assert server.child("worker 0").pid == first
    assert server.complete()["usage"]["completion_tokens"] == 4
    assert server.stop() == 0, server.text


def test_launcher_a_process_started_by_hand_joins_and_leaves(repaired: Server, cache: str) -> None:
    server = repaired
    router = server.announcement["router"]
    environment = {**os.environ, "XDG_CACHE_HOME": cache, "PENSTOCK_ROUTER": router}
    command = [sys.executable, "-m", "penstock.services", "tokenizer"]
    joined = server.text.count("tokenizer joined")
    tokenizer = subprocess.Popen(command, env=environment)
    try:
        until(lambda: server.text.count("tokenizer joined") == joined + 1)
        for _ in range(4):
            assert server.complete()["usage"]["completion_tokens"] == 4
    finally:
        tokenizer.terminate()
        assert tokenizer.wait(PATIENCE) == 0


# --- stopping


@pytest.mark.slow  # the tests below stop servers too, and look at what is left
def test_launcher_stopped_leaves_no_process_port_or_file(start: Start) -> None:
    server = start(*NULL).ready()
    server.complete()
    assert server.stop(signal.SIGINT) == 0, server.text
    server.nothing_is_left()


def test_launcher_killed_leaves_no_process_and_the_next_one_cleans_up(
    shared: Server, start: Start
) -> None:
    """Another server of the same user is disturbed by none of them."""
    neighbour = start(*NULL, XDG_RUNTIME_DIR=str(shared.runtime)).ready()
    assert len(os.listdir(shared.runtime)) == 2
    assert shared.complete()["usage"]["completion_tokens"] == 4
    assert neighbour.complete()["usage"]["completion_tokens"] == 4
    neighbour.process.kill()
    until(lambda: not neighbour.processes_left())
    assert len(os.listdir(shared.runtime)) == 2
    following = start(*NULL, XDG_RUNTIME_DIR=str(shared.runtime))
    following.wait_for_text('"ready"')
    assert len(os.listdir(shared.runtime)) == 2
    assert following.stop() == 0
    assert len(os.listdir(shared.runtime)) == 1
    neighbour.nothing_is_left()
    assert shared.complete()["usage"]["completion_tokens"] == 4


def test_launcher_lets_running_requests_finish_and_takes_two_signals_at_once_for_one(
    shared: Server,
) -> None:
    """Two come from ``make`` or ``timeout``, which pass on what the whole process group got."""
    server = shared
    with server.ask(max_tokens=60, stream=True) as answer:  # it was accepted
        server.process.send_signal(signal.SIGTERM)
        assert server.stop(signal.SIGINT) == 0, server.text
        assert answer.read().endswith(b"data: [DONE]\n\n")
    assert "running requests have 30 s to finish (--drain-timeout-s)" in server.text
    assert "1 request runs; " in server.text
    server.nothing_is_left()


def test_launcher_refuses_the_runtime_folder_of_a_running_server(
    start: Start, named: tuple[Server, Path]
) -> None:
    first, folder = named
    assert "in use" in failed(start(*NULL, "--runtime-dir", str(folder)), 4)
    assert first.complete(model="org/little")["usage"]["completion_tokens"] == 4


def test_launcher_leaves_only_the_folder_that_the_user_named(named: tuple[Server, Path]) -> None:
    server, folder = named
    assert (folder / "router.sock").exists()
    server.child("tokenizer 0").kill()
    until(lambda: "starting it again" in server.text)
    assert server.stop() == 0, server.text
    assert os.listdir(folder) == []
    server.nothing_is_left()


@pytest.mark.slow  # `penstock stop --now` sends two signals in the quick run, and looks at the same
def test_launcher_ends_at_once_at_the_second_signal(start: Start) -> None:
    server = start(*NULL, "--null-step-ms", "1000").ready()
    with server.ask(max_tokens=1000, stream=True):  # it was accepted
        server.process.send_signal(signal.SIGINT)
        time.sleep(SECOND_SIGNAL_SECONDS)
        began = time.monotonic()
        assert server.stop() == 128 + signal.SIGINT
        assert time.monotonic() - began < 2.0
        server.nothing_is_left()


@pytest.mark.slow  # the quick run does it on a terminal
def test_launcher_can_be_stopped_while_it_starts(start: Start) -> None:
    server = start(*NULL)
    until(lambda: "ready" in server.text)
    server.remember()
    assert server.stop() == 0, server.text
    assert "ends before it was ready" in server.text and "draining" not in server.text
    assert server.processes_left() == []
    assert os.listdir(server.runtime) == []


# --- repairing


def test_launcher_starts_any_killed_process_again(repaired: Server) -> None:
    server = repaired
    for title in ("router 0", "tokenizer 0", "scheduler 0", "worker 0", "frontend 0"):
        killed = server.child(title)
        killed.kill()
        label = "router" if title == "router 0" else title
        server.wait_for_text(f"{label} was killed by SIGKILL; starting it again")
        assert server.child(title).pid != killed.pid
        until(server.is_ready)
        assert server.complete()["usage"]["completion_tokens"] == 4


def test_launcher_kills_a_process_that_hangs_and_replaces_it(repaired: Server) -> None:
    server = repaired
    said, before = "worker 0 was declared lost; killing it", len(server.output)
    hung = server.child("worker 0")
    hung.suspend()
    until(lambda: said in "".join(server.output[before:]))
    until(lambda: not hung.is_running())
    assert server.child("worker 0").pid != hung.pid
    until(server.is_ready)
    assert server.complete()["usage"]["completion_tokens"] == 4


@pytest.mark.slow
def test_launcher_replaces_a_process_that_hangs_while_the_server_starts(start: Start) -> None:
    """As on a machine that is too busy to let it beat."""
    server = start(*NULL)
    worker = server.child("worker 0")
    worker.suspend()  # so that the server is not ready meanwhile
    until(lambda: "joined" in server.text or server.text.count('"ready"') >= 2)
    server.child("scheduler 0").suspend()
    until(lambda: "scheduler 0 was declared lost; killing it" in server.text)
    worker.resume()
    server.ready()
    assert server.complete()["usage"]["completion_tokens"] == 4
    assert server.stop() == 0, server.text
    server.nothing_is_left()


@pytest.mark.slow
def test_launcher_replaces_a_process_that_no_router_ever_heard_of(start: Start) -> None:
    server = start(*NULL).ready()
    hung = server.child("worker 0")
    hung.suspend()
    server.child("router 0").kill()  # the next one does not know that there was a worker
    until(lambda: "worker 0 has not joined again for 3 s; killing it" in server.text)
    until(lambda: not hung.is_running())
    until(server.is_ready)
    assert server.complete()["usage"]["completion_tokens"] == 4
    assert server.stop() == 0, server.text
    server.nothing_is_left()


@pytest.mark.slow
def test_launcher_replaces_a_router_that_hangs(start: Start) -> None:
    server = start(*NULL, "--log-level", "debug").ready()
    hung = server.child("router 0")
    hung.suspend()
    server.wait_for_text("the router hangs; killing it")
    assert server.child("router 0").pid != hung.pid
    server.wait_for_text("router joined")
    until(server.is_ready)
    assert server.complete()["usage"]["completion_tokens"] == 4
    assert server.stop() == 0, server.text
    server.nothing_is_left()


def test_launcher_that_was_stopped_itself_joins_again(repaired: Server) -> None:
    server = repaired
    before = len(server.output)
    server.process.send_signal(signal.SIGSTOP)
    until(lambda: "launcher" not in server.members())
    server.process.send_signal(signal.SIGCONT)
    until(lambda: "joining again" in "".join(server.output[before:]))
    killed = server.child("tokenizer 0")
    killed.kill()
    until(lambda: server.child("tokenizer 0").pid != killed.pid)
    until(server.is_ready)


# --- failing


def failed(server: Server, code: int) -> str:
    """Wait for a start that fails; returns what the user reads last. Where that is all there is, no
    process has begun before."""
    assert server.wait() == code, server.text
    assert "Traceback" not in server.text
    assert os.listdir(server.runtime) == []
    return server.output[-1]


def test_launcher_says_at_once_that_the_model_is_not_there(start: Start) -> None:
    server = start("/nowhere/at/all", *NULL)
    assert "/nowhere/at/all: no such folder" in failed(server, 3)
    assert len(server.output) == 1


def test_launcher_says_at_once_that_the_model_cannot_be_read(start: Start, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ')
    server = start(str(tmp_path), *NULL)
    assert f"{tmp_path}/config.json: not valid JSON" in failed(server, 3)
    assert len(server.output) == 1


def test_launcher_says_at_once_that_the_port_is_in_use(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        server = start("--device", "null", "--port", str(port))
        text = failed(server, 4)
    assert f"127.0.0.1:{port}" in text
    assert "--port" in text
    assert len(server.output) == 1


@pytest.mark.slow
def test_launcher_a_truncated_shard_ends_the_start_with_the_workers_message(
    start: Start, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(builtin_model(), folder)
    shard = next(folder.glob("*.safetensors"))
    os.truncate(shard, shard.stat().st_size - 100)
    server = start(str(folder), "--device", "cpu", "--port", "0", "--threads", "1")
    text = failed(server, 3)
    assert text.startswith("penstock: worker 0 ended with exit code 3 before the server was ready:")
    assert shard.name in text


def test_launcher_says_once_why_a_process_cannot_start(start: Start) -> None:
    server = start(*NULL, "--max-model-len", "100000")
    text = failed(server, 2)
    assert "--max-model-len 100000" in text
    assert "2048" in text
    assert "\n".join(server.output).count("--max-model-len 100000") == 1


def test_launcher_gives_up_when_the_server_is_not_ready_in_time(start: Start) -> None:
    server = start(*NULL, "--startup-timeout-s", "0.01")
    text = failed(server, 6)
    assert "not ready within 0.01 s" in text
    assert "--startup-timeout-s" in text
