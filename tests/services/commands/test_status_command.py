"""``penstock status`` and ``stop``, and how commands find a server on this host."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import psutil
import pytest
from support.commands.command_run import call, environment
from support.commands.emulator import terminal
from support.commands.scripted_api import scripted_api
from support.pipeline.served import Served, leftovers

from penstock.protocol.process.metrics import Registry
from penstock.protocol.process.pipeline_status import pipeline_status
from penstock.protocol.process.running_servers import (
    FOLDER_VARIABLE,
    RECORD,
    Registration,
    running_servers,
)
from penstock.protocol.wire.messages.membership import MetricsAnswer, ProcessMetrics
from penstock.services.commands.api_client import ApiClient
from penstock.services.commands.endpoint import endpoint
from penstock.services.commands.failure import CommandError
from penstock.services.commands.servers_here import server_here, url_here
from penstock.services.commands.status_text import rates
from penstock.services.launcher.runtime_folder import listed_folder, server_folder

PROCESSES = ["frontend", "tokenizer", "router", "scheduler", "worker"]


def place(server: Served) -> str:
    """The ``XDG_RUNTIME_DIR`` of a server."""
    return str(Path(server.router.removeprefix("ipc://")).parent.parent)


def listening(port: int) -> set[str]:
    """Inodes of the sockets that listen there (proc_net(5)): another server may get the port of one
    that has ended."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    return {row[9] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")}


def completion(url: str, tokens: int) -> subprocess.Popen[bytes]:
    flags = ("--max-tokens", str(tokens), "--set", "ignore_eos=true")
    return subprocess.Popen(
        [sys.executable, "-m", "penstock.services", "complete", "x", "--url", url, *flags],
        stdout=subprocess.PIPE,
        env=environment(),
    )


@pytest.mark.parametrize("asked", ["by its runtime folder", "over HTTP"])
def test_status_tells_the_processes_and_what_they_do_now(server: Served, asked: str) -> None:
    where = () if asked == "by its runtime folder" else (server.url,)
    more = {} if where else {"XDG_RUNTIME_DIR": place(server)}
    busy = completion(server.url, 1500)
    assert busy.stdout is not None
    assert busy.stdout.read(1)
    done = call("status", "--json", "--interval", "1.5", *where, **more)
    busy.kill()
    busy.communicate()
    found = json.loads(done.stdout)
    assert [one["service"] for one in found["processes"]] == PROCESSES
    assert {one["pid"] for one in found["processes"]} < server.processes().keys()
    assert (found["ready"], found["url"]) == (True, server.url)
    assert found["running"] == 1
    assert found["rates"]["generation_tokens_per_s"] > 5
    assert found["inter_token_latency_s"]["p50"] > 0
    assert 0 < found.get("uptime_s", 1) < 3600
    assert (found.get("pid") == server.process.pid) == (not where)


def test_what_status_does_not_understand_of_an_answer_is_left_out_and_named() -> None:
    process = {"service": "worker", "pid": 7, "phase": "ready", "load": 0, "host": "h"}
    engine = {**process, "service": "scheduler", "engine": "1", "role": "decode"}
    state = {
        "version": 3, "ready": True, "running": "many", "kv_blocks_total": 10, "unknown": [1],
        "time_to_first_token_s": {"p50": None}, "inter_token_latency_s": {"p50": 0.1, "p99": 0.2},
        "requests_finished": {"stop": []}, "models": [{"name": "m"}, "no model"],
        "processes": [process, {"service": "router"}, 5, engine],
    }  # fmt: skip
    with scripted_api() as api:
        api.whole["/playground/status"] = state
        asked = ("status", api.url, "--interval", "0.1")
        done, as_json = call(*asked), json.loads(call(*asked, "--json").stdout)
        api.whole["/playground/status"] = ["no", "state"]
        none = call(*asked)
    assert (done.returncode, done.stderr) == (0, "")
    assert "models     m\n" in done.stdout
    assert "ITL        100 ms, p99 200 ms" in done.stdout
    assert "not understood: version (Expected `str`, got `int`), " in done.stdout
    assert as_json["unknown"] == [1]
    assert {one.partition(":")[0] for one in as_json["not_understood"]} == {
        "version", "running", "requests_finished", "time_to_first_token_s", "models[1]",
        "processes[1]", "processes[2]",
    }  # fmt: skip
    assert as_json["processes"] == [process, engine]
    assert "scheduler 1 (decode) " in done.stdout
    assert "not understood: the answer is no JSON object" in none.stdout


@pytest.mark.parametrize("how", ["not at all", "a byte at a time", "too much"])
def test_no_answer_is_waited_for_for_ever_or_read_without_end(how: str) -> None:
    done = threading.Event()

    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(4096)
            if how == "not at all":
                done.wait(20)
                return
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n[")
            while not done.is_set():
                connection.sendall(b" " if how == "a byte at a time" else b" " * (1 << 20))
                time.sleep(0.01 if how == "a byte at a time" else 0)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        url = f"127.0.0.1:{listener.getsockname()[1]}"
        limit = 20.0 if how == "too much" else 0.3
        client = ApiClient(endpoint(url, "", {}), answer_s=limit)
        said = "more than 16 MiB" if how == "too much" else "did not answer within 0.3 s"
        with pytest.raises(CommandError, match=said):
            client.get("/playground/status")
        done.set()
        thread.join()


def test_status_is_drawn_in_its_place_and_ctrl_c_ends_it(server: Served) -> None:
    chosen = environment(XDG_RUNTIME_DIR=place(server))
    with terminal("status", "--watch", "--interval", "0.1", environment=chosen) as seen:
        seen.sees("scheduler 0")
        drawn = seen.raw.count(b"scheduler 0")
        seen.until(lambda: seen.raw.count(b"scheduler 0") > drawn + 3, "drawn again")
        assert seen.text.count("Penstock") == 1
        assert "worker 0" in seen.lines[-1]
        assert max(map(len, seen.lines)) < 80, seen.text
        seen.type("\x03")
        assert seen.ended() == 0


def test_a_command_without_a_url_asks_the_only_server_of_its_user(server: Served) -> None:
    assert "penstock-demo" in call("models", XDG_RUNTIME_DIR=place(server)).stdout


@pytest.mark.slow  # the launcher's tests drain by the same signal in the quick run
def test_stop_waits_for_running_requests_and_says_how_many_there_are(short_folder: Path) -> None:
    chosen = {"XDG_RUNTIME_DIR": str(short_folder)}
    server = Served("--device", "null", "--null-step-ms", "5", environment=chosen)
    try:
        busy = completion(server.url, 1000)
        assert busy.stdout is not None
        assert busy.stdout.read(1)
        done = call("stop", server.url, **chosen)
        assert (done.returncode, done.stderr) == (0, "")
        first, *_, last = done.stdout.splitlines()
        assert first == (
            f"{server.url} (process {server.process.pid}): running requests have 30 s to finish"
        )
        assert "1 request runs; " in done.stdout
        assert last.startswith("stopped after ")
        assert busy.wait(60) == 0  # the request was served to its end
        assert server.process.wait(30) == 0
        assert leftovers(short_folder) == []
        again = call("stop", server.url, **chosen)
        assert (again.returncode, again.stderr.count("no server of yours")) == (4, 1)
    finally:
        server.kill()


def test_stop_now_does_not_wait_and_leaves_nothing(short_folder: Path) -> None:
    chosen = {"XDG_RUNTIME_DIR": str(short_folder)}
    server = Served("--device", "null", "--null-step-ms", "20", environment=chosen)
    try:
        busy = completion(server.url, 2000)
        assert busy.stdout is not None
        assert busy.stdout.read(1)
        folder = str(Path(server.router.removeprefix("ipc://")).parent)
        port = int(server.url.rpartition(":")[2])
        sockets = listening(port)
        assert sockets
        # One that a busy machine lets wait takes what it was sent in that time all at once.
        server.process.send_signal(signal.SIGSTOP)
        threading.Timer(1.0, server.process.send_signal, (signal.SIGCONT,)).start()
        processes, began = list(server.processes().values()), time.monotonic()
        done = call("stop", folder, "--now", **chosen)
        assert time.monotonic() - began < 20.0, "the request alone would have taken 40"
        assert done.returncode == 0
        assert busy.wait(60) != 0
        assert server.process.wait(30) == 128 + signal.SIGTERM
        assert psutil.wait_procs(processes, 30)[1] == []
        assert leftovers(short_folder) == []
        assert not sockets & listening(port)
    finally:
        server.kill()


def test_the_record_of_a_launcher_that_is_gone_is_no_server(tmp_path: Path) -> None:
    folder = tmp_path / "penstock-serve-x"
    folder.mkdir()
    registration = Registration(folder, "ipc:///x", 3.0, [("a", "/models/a")])
    chosen = {"XDG_RUNTIME_DIR": str(tmp_path)}
    (found,) = running_servers(chosen)
    assert (found.record.pid, found.record.url, found.record.models) == (os.getpid(), "", ["a"])
    registration.ready("http://127.0.0.1:1")
    assert running_servers(chosen, str(folder))[0].record.url == "http://127.0.0.1:1"
    process = found.open_process()
    assert process is not None
    os.close(process)

    earlier = msgspec.structs.replace(found.record, started_ticks=found.record.started_ticks - 1)
    (folder / RECORD).write_bytes(msgspec.json.encode(earlier))
    assert running_servers(chosen) == []
    assert msgspec.structs.replace(found, record=earlier).open_process() is None
    (folder / RECORD).write_text("no record")
    assert running_servers(chosen) == []
    registration.remove()
    registration.remove()
    assert running_servers(chosen) == []


def test_where_no_folder_can_hold_a_socket_there_is_no_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in", "/tmp")

    monkeypatch.setattr("tempfile.gettempdir", none)
    assert running_servers({}) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_record_that_another_user_has_put_there_is_not_believed(tmp_path: Path) -> None:
    folder = tmp_path / "penstock-serve-x"
    folder.mkdir()
    Registration(folder, "ipc:///x", 3.0, [])
    assert len(running_servers({"XDG_RUNTIME_DIR": str(tmp_path)})) == 1
    os.chown(folder, 1234, 1234)
    assert running_servers({"XDG_RUNTIME_DIR": str(tmp_path)}) == []


def test_several_servers_are_named_for_a_choice(tmp_path: Path) -> None:
    for name in "ab":
        folder = tmp_path / f"penstock-serve-{name}"
        folder.mkdir()
        Registration(folder, "ipc:///x", 3.0, []).ready(f"http://127.0.0.1:{ord(name)}")
    done = call("stop", XDG_RUNTIME_DIR=str(tmp_path))
    assert done.returncode == 2
    assert "http://127.0.0.1:97, http://127.0.0.1:98" in done.stderr


def test_a_server_with_a_folder_of_its_own_is_found_where_commands_look(tmp_path: Path) -> None:
    root, own, linked = tmp_path / "root", tmp_path / "own", tmp_path / "link"
    root.mkdir()
    linked.symlink_to(own)
    chosen = {"XDG_RUNTIME_DIR": str(root)}
    with server_folder(chosen, str(own)) as folder, listed_folder(chosen, folder) as listed:
        registration = Registration(folder, "ipc:///x", 3.0, [("a", "/models/a")], listed)
        asked = call("models", **chosen)
        assert (asked.returncode, asked.stdout) == (4, "")
        assert f"your server in {own} is still starting" in asked.stderr
        registration.ready("http://127.0.0.1:97")
        (found,) = running_servers(chosen)
        assert (found.folder, found.record.url) == (str(own), "http://127.0.0.1:97")
        for name in (own, linked):  # its two records are one server
            assert len(running_servers({**chosen, FOLDER_VARIABLE: str(name)})) == 1
        assert len(running_servers({FOLDER_VARIABLE: str(own), "XDG_RUNTIME_DIR": "/"})) == 1

        with server_folder(chosen) as other, listed_folder(chosen, other) as none:
            assert none is None
            Registration(other, "ipc:///y", 3.0, []).ready("http://127.0.0.1:98")
            done = call("stop", **chosen)
            assert done.returncode == 2
            assert "http://127.0.0.1:97, http://127.0.0.1:98" in done.stderr
        registration.remove()
    assert os.listdir(root) == []


@pytest.mark.parametrize("command", [("stop",), ("status",), ("models",), ("embed", "x")])
def test_a_command_takes_no_other_server_than_the_one_whose_folder_is_named(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    (other := tmp_path / "penstock-serve-x").mkdir()
    (own := tmp_path / "own").mkdir()
    chosen = {"XDG_RUNTIME_DIR": str(tmp_path), FOLDER_VARIABLE: str(own)}
    with scripted_api() as api:
        Registration(other, "ipc:///x", 3.0, []).ready(api.url)
        done = call(*command, **chosen)
        assert done.returncode == 4
        assert f"no server of yours runs in {own}, which {FOLDER_VARIABLE} names" in done.stderr
        assert server_here(api.url, chosen) is not None, "a URL wins over the variable"

        api.whole["/v1/models"] = {"data": [{"id": "mine"}]}
        Registration(own, "ipc:///y", 3.0, []).ready(api.url)
        assert url_here(chosen) == api.url
        found = server_here(None, chosen)
        assert found is not None
        assert found.folder == str(own)


@pytest.mark.slow  # a server of its own, for what the tests above see without one
def test_a_server_whose_folder_was_named_is_asked_and_stopped(short_folder: Path) -> None:
    chosen = {"XDG_RUNTIME_DIR": str(short_folder)}
    own = short_folder / "own"
    server = Served("--device", "null", "--runtime-dir", str(own), environment=chosen)
    try:
        for how in ({}, {FOLDER_VARIABLE: str(own)}):
            found = json.loads(
                call("status", "--json", "--interval", "0.1", **chosen, **how).stdout
            )
            assert (found["url"], found["pid"]) == (server.url, server.process.pid)
        assert call("stop", **chosen).returncode == 0
        assert server.process.wait(30) == 0
        assert leftovers(short_folder) == [str(own)]
        assert os.listdir(own) == []
    finally:
        server.kill()


def test_latencies_are_quantiles_of_what_all_frontends_have_seen() -> None:
    registry = Registry()
    for milliseconds in range(1, 101):
        registry.observe("time_to_first_token_seconds", milliseconds / 1000)
    state = pipeline_status(MetricsAnswer([ProcessMetrics("frontend", 7, registry.report())]), [])
    spread = state["time_to_first_token_s"]
    assert spread["count"] == 100
    assert spread["p50"] == pytest.approx(0.05, abs=0.003)
    assert spread["p99"] == pytest.approx(0.099, abs=0.003)
    assert state["inter_token_latency_s"] == {}


def test_rates_are_what_was_counted_between_two_looks() -> None:
    before = {"prompt_tokens": 10, "generation_tokens": 100, "requests_finished": {"stop": 2}}
    now = {
        "prompt_tokens": 30,
        "generation_tokens": 300,
        "requests_finished": {"stop": 3, "abort": 4},
    }
    assert rates(before, now, 2.0) == {
        "prompt_tokens_per_s": 10.0, "generation_tokens_per_s": 100.0, "requests_per_s": 2.5,
    }  # fmt: skip
    assert rates(now, before, 2.0)["generation_tokens_per_s"] == 0.0  # a router that began anew
