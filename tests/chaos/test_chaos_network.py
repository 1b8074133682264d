"""The network between two hosts fails in one direction for a while: no request is lost."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.pipeline.host_process import HostProcess, is_ready, request
from support.pipeline.reference_models import write_model
from support.pipeline.simulated_hosts import NamespaceHosts, simulated_hosts, why_no_namespaces
from support.polling import until
from test_pipeline_tcp import ByHand

pytestmark = pytest.mark.chaos

ANYWHERE = ("--bind", "tcp://0.0.0.0")
SERVICES = ("router", "tokenizer", "scheduler", "frontend")
SHORT = 2.0
"""Seconds; nobody is declared lost."""
LONG = 8.0
"""Somebody is, where the router no longer hears of it."""
BEGUN_SECONDS = 0.3
"""Requests of two seconds run by then: counters say so too late to break a link in their middle."""


class Hosts:
    """A server whose processes each have a host of their own, and a place to ask from."""

    def __init__(self, hosts: NamespaceHosts, model: Path) -> None:
        self._model = str(model)
        self.hosts = hosts
        self.by_hand = ByHand(hosts)
        self.processes = {service: self.start(service) for service in (*SERVICES, "worker")}
        hosts.announce("router")
        until(self.ready, 60, told=self.by_hand.output)

    def start(self, service: str) -> HostProcess:
        flags = list(ANYWHERE)
        if service == "frontend":
            flags += ["--host", "0.0.0.0", "--insecure"]
        if service in ("tokenizer", "scheduler", "worker"):
            flags += ["--model", self._model]
        if service == "worker":
            flags += ["--device", "cpu", "--dtype", "float32", "--threads", "1"]
        return self.by_hand.start(service, *flags)

    def ready(self) -> bool:
        return is_ready(self.by_hand.client, self.processes["frontend"].host.address)

    def whole(self) -> bool:
        """Ready again; what was declared lost is started again meanwhile."""
        self.restart_the_ended()
        return self.ready()

    def ask(self) -> tuple[str, int]:
        body = {"prompt": [7, 8, 9], "max_tokens": 900, "temperature": 0, "ignore_eos": True}
        frontend = self.processes["frontend"].host.address
        status, text = request(self.by_hand.client, frontend, "/v1/completions", body)
        assert status == 200, f"{text}\n{self.by_hand.output()}"
        answer = json.loads(text)
        return answer["choices"][0]["text"], answer["usage"]["completion_tokens"]

    def restart_the_ended(self) -> None:
        """What a platform does for a process that was declared lost."""
        for service, process in self.processes.items():
            if process.process.poll() is not None:
                self.processes[service] = self.start(service)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Hosts]:
    if reason := why_no_namespaces():
        pytest.skip(f"needs hosts that are apart: {reason}")
    with simulated_hosts() as hosts:
        assert isinstance(hosts, NamespaceHosts)
        running = Hosts(hosts, write_model("qwen3", tmp_path / "tiny"))
        try:
            yield running
        finally:
            for process in running.by_hand.processes:
                process.kill()


@pytest.mark.parametrize("seconds", [SHORT, LONG])
@pytest.mark.parametrize(
    ("speaker", "listener"),
    [
        ("scheduler", "tokenizer"),
        ("tokenizer", "scheduler"),
        ("tokenizer", "frontend"),
        ("frontend", "tokenizer"),
        ("worker", "scheduler"),
        ("scheduler", "worker"),
        ("scheduler", "router"),
        ("router", "tokenizer"),
    ],
)
def test_a_link_that_fails_in_one_direction_heals_without_a_lost_request(
    server: Hosts, speaker: str, listener: str, seconds: float
) -> None:
    expected = server.ask()
    assert expected[1] == 900
    source, target = server.processes[speaker].host, server.processes[listener].host
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(server.ask) for _ in range(4)]
        time.sleep(BEGUN_SECONDS)
        with server.hosts.deaf(target, source):
            assert not any(one.done() for one in asked), "too late"
            time.sleep(seconds)
        deadline = time.monotonic() + 60
        while not all(one.done() for one in asked) and time.monotonic() < deadline:
            server.restart_the_ended()
            time.sleep(0.1)
        assert [one.result(1) for one in asked] == [expected] * 4, server.by_hand.output()
    until(server.whole, 60, told=server.by_hand.output)
    assert server.ask() == expected
