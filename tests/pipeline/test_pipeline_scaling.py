"""Tokenizers and frontends come and go under load, and no client notices."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import psutil
import pytest
from support.chaos.victims import members
from support.pipeline.clients import Answer, ask
from support.pipeline.served import NULL, Served, SharedServers, served, start_service
from support.polling import async_until, until

from penstock.loadtest.models.make_model import make_model
from penstock.services.frontend.service import LINGER_SECONDS


class Load:
    """Clients that ask without a pause until told to stop."""

    def __init__(self, url: str, clients: int) -> None:
        self.url = url
        self.answers: list[Answer] = []
        self.failures: list[str] = []
        self._stop = asyncio.Event()
        self._tasks = [asyncio.create_task(self._client(n)) for n in range(clients)]

    async def _client(self, number: int) -> None:
        # A connection for each request: new ones are spread over all frontends.
        connector = aiohttp.TCPConnector(force_close=number % 2 == 0)
        async with aiohttp.ClientSession(connector=connector) as session:
            while not self._stop.is_set():
                body = {
                    "prompt": f"client {number}",
                    "max_tokens": 20,
                    "stream": number % 3 == 0,
                    "ignore_eos": True,
                }
                try:
                    answer = await ask(session, self.url, body)
                except aiohttp.ClientError as error:
                    self.failures.append(repr(error))
                    continue
                if answer.status != 200 or not answer.done:
                    self.failures.append(str(answer))
                self.answers.append(answer)

    async def goes_on(self) -> None:
        """Until each client has had another answer or two."""
        enough = len(self.answers) + 2 * len(self._tasks)
        await async_until(lambda: len(self.answers) >= enough)

    async def stop(self) -> None:
        self._stop.set()
        await asyncio.gather(*self._tasks)


def worked(process: subprocess.Popen[str]) -> float:
    """Seconds of CPU that a process has used."""
    times = psutil.Process(process.pid).cpu_times()
    return float(times.user + times.system)


async def scale(server: Served) -> Load:
    load = Load(server.url, 12)
    port = str(urlsplit(server.url).port)
    await load.goes_on()
    added: list[subprocess.Popen[str]] = []
    for _ in range(2):
        added.append(start_service(server, "tokenizer"))
        added.append(start_service(server, "frontend", "--port", port))
    pids = {process.pid for process in added}
    await asyncio.to_thread(until, lambda: members(server.url) >= pids)
    before = [worked(process) for process in added]

    def shares() -> list[float]:
        return [worked(process) - start for process, start in zip(added, before, strict=True)]

    await async_until(
        lambda: min(shares()) > 0.05, told=lambda: f"an added process took no share: {shares()}"
    )
    codes = []
    for process in added:
        process.send_signal(signal.SIGTERM)
        codes.append(await asyncio.to_thread(process.wait, 15))
        await load.goes_on()
    await load.stop()
    assert codes == [0, 0, 0, 0], [process.communicate()[0] for process in added]
    return load


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """The second test ends it."""
    with served("--device", "null", "--null-step-ms", "100", "--drain-timeout-s", "2") as server:
        yield server


def test_a_frontend_that_goes_serves_who_is_connected(server: Served) -> None:
    target = urlsplit(server.url)
    (frontend,) = (p for p in server.processes().values() if server.role_of(p) == "frontend")
    body = json.dumps({"prompt": "hello", "max_tokens": 4, "ignore_eos": True})
    headers = {"Content-Type": "application/json"}
    idle = http.client.HTTPConnection(target.hostname or "", target.port, timeout=30)
    idle.request("POST", "/v1/completions", body, headers)
    assert idle.getresponse().read()
    frontend.send_signal(signal.SIGTERM)
    idle.request("POST", "/v1/completions", body, headers)
    answer = idle.getresponse()
    assert answer.status == 200, answer.read()
    assert json.load(answer)["usage"]["completion_tokens"] == 4
    idle.close()
    frontend.wait(30)


def test_what_outlasts_the_drain_ends_with_an_error_event_and_the_server_with_success(
    server: Served,
) -> None:
    target = urlsplit(server.url)
    stream = http.client.HTTPConnection(target.hostname or "", target.port, timeout=60)
    probe = http.client.HTTPConnection(target.hostname or "", target.port, timeout=60)
    body = {"prompt": "hello", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    headers = {"Content-Type": "application/json"}
    stream.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = stream.getresponse()
    assert answer.readline().startswith(b"data: ")
    server.process.send_signal(signal.SIGTERM)
    status, state, refused = 200, b"", True
    with contextlib.suppress(OSError):  # nobody new is let in
        while status == 200:
            probe.request("GET", "/ready")
            ready = probe.getresponse()
            status, state = ready.status, ready.read()
        refused = False
    assert refused or (status == 503 and b"draining" in state), (status, state)
    rest = answer.read().decode()
    assert "the server is shutting down" in rest and "[DONE]" not in rest
    assert server.process.wait(60) == 0


@pytest.mark.slow
def test_a_frontend_waits_at_its_end_only_for_those_who_are_connected() -> None:
    def seconds_to_end(server: Served) -> float:
        (frontend,) = (p for p in server.processes().values() if server.role_of(p) == "frontend")
        began = time.monotonic()
        frontend.send_signal(signal.SIGTERM)
        frontend.wait(30)
        return time.monotonic() - began

    with served("--device", "null") as server:
        alone = seconds_to_end(server)
    with served("--device", "null") as server:
        target = urlsplit(server.url)
        idle = http.client.HTTPConnection(target.hostname or "", target.port, timeout=30)
        idle.request("GET", "/ready")
        assert idle.getresponse().read()
        connected = seconds_to_end(server)
    assert alone < LINGER_SECONDS < connected


def test_whoever_has_connected_when_a_server_goes_down_is_answered() -> None:
    """A connection counts from its handshake on, which the kernel does by itself."""
    seen: Counter[str] = Counter()
    ended = threading.Event()

    def ask_often(address: tuple[str, int]) -> None:
        """Connect and ask as fast as possible, and read all the answers only then."""
        while not ended.is_set():
            asked = []
            for _ in range(20):
                client = socket.socket()
                client.settimeout(30)
                try:
                    client.connect(address)
                except ConnectionRefusedError:
                    client.close()
                    return
                client.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
                asked.append(client)
            for client in asked:
                with client:
                    try:
                        seen[client.recv(4096).partition(b"\r\n")[0].decode()] += 1
                    except OSError as error:
                        seen[type(error).__name__] += 1

    with served("--device", "null", "--frontends", "2") as server:
        target = urlsplit(server.url)
        address = (target.hostname or "", target.port or 0)
        clients = [threading.Thread(target=ask_often, args=(address,)) for _ in range(8)]
        for client in clients:
            client.start()
        until(lambda: seen.total() > 500)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        ended.set()
        for client in clients:
            client.join(60)
    assert seen.keys() == {"HTTP/1.1 200 OK"}, seen


def test_a_tokenizer_of_other_files_under_the_same_name_is_refused_with_the_remedy(
    tmp_path: Path, shared_server: SharedServers
) -> None:
    other, name = make_model(tmp_path / "other"), "penstock-demo"
    server = shared_server(*NULL)
    process = start_service(server, "tokenizer", "--served-model-name", name, str(other))
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 5, output
    assert f"tokenizer has the model '{name}'" in output
    assert "start all processes of a model with the same MODEL" in output


@pytest.mark.slow
def test_one_to_three_to_one_without_a_failed_request() -> None:
    with served("--device", "null", "--null-step-ms", "5") as server:
        load = asyncio.run(scale(server))
    assert load.failures == []
    assert all(answer.status == 200 for answer in load.answers)
