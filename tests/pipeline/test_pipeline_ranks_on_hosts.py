"""The ranks of one engine on two hosts, started by hand: the tokens of one worker, encrypted."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.pipeline.host_process import HostProcess, is_ready, request, streamed_text
from support.pipeline.served import Served, served
from support.pipeline.simulated_hosts import (
    NamespaceHosts,
    Sniffer,
    simulated_hosts,
    why_no_namespaces,
)
from support.polling import until
from test_pipeline_tcp import ByHand

from penstock.loadtest.models.make_model import make_model

ANYWHERE = ("--bind", "tcp://0.0.0.0")
CPU = ("--device", "cpu", "--dtype", "float32", "--threads", "1", "--num-kv-blocks", "500")
TENSOR_2 = ("--tensor-parallel-size", "2")
START_SECONDS = 240.0
BEGUN_SECONDS = 0.5
"""Streams run by then: counters say so too late to cut a host off in their middle."""
BODY: dict[str, Any] = {
    "prompt": [7, 8, 9], "max_tokens": 1000, "temperature": 0.8, "seed": 3, "ignore_eos": True
}  # fmt: skip
"""As many tokens as keep a stream going for seconds on a fast machine, too."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "divided"
    made: Path = make_model(path, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2)
    return made


@pytest.fixture(scope="module")
def text_of_one(folder: Path) -> str:
    """What one worker answers."""
    with served(str(folder), *CPU[:4], *CPU[6:]) as server:
        return text_by(server)


def text_by(server: Served) -> str:
    status, answer = server.post("/v1/completions", BODY)
    assert status == 200
    text: str = answer["choices"][0]["text"]
    return text


class TwoHosts:
    """A server whose engine has rank 0 on one host and rank 1 on another."""

    def __init__(self, hosts: NamespaceHosts, model: Path, traffic: str) -> None:
        """traffic: as ``--rank-traffic`` says."""
        self.hosts, self._model, self._traffic = hosts, str(model), traffic
        self.by_hand = ByHand(hosts)
        self.frontend = self.start("frontend", "--host", "0.0.0.0", "--insecure")
        self.router = self.start("router")
        hosts.announce("router")
        self.start("tokenizer", "--model", self._model)
        self.start("scheduler", "--model", self._model, *TENSOR_2)
        self.ranks = [self.rank(0), self.rank(1)]

    def start(self, service: str, *flags: str, **more: str) -> HostProcess:
        return self.by_hand.start(service, *ANYWHERE, *flags, **more)

    def rank(self, number: int, **more: str) -> HostProcess:
        flags = ("--model", self._model, *CPU, *TENSOR_2, "--rank", str(number))
        return self.start("worker", *flags, "--rank-traffic", self._traffic, **more)

    def ready(self) -> bool:
        for number, one in enumerate(self.ranks):
            if one.process.poll() is not None:  # what a platform does
                self.ranks[number] = self.rank(number)
        return is_ready(self.by_hand.client, self.frontend.host.address)

    def text(self) -> str:
        address = self.frontend.host.address
        status, text = request(self.by_hand.client, address, "/v1/completions", BODY)
        assert status == 200, f"{text}\n{self.by_hand.output()}"
        found: str = json.loads(text)["choices"][0]["text"]
        return found

    def streamed(self) -> str:
        """The text of a stream, which has ended once and well."""
        body, address = BODY | {"stream": True}, self.frontend.host.address
        status, events = request(self.by_hand.client, address, "/v1/completions", body)
        assert (status, events.count("[DONE]")) == (200, 1), self.by_hand.output()
        return streamed_text(events)


@pytest.fixture
def two_hosts(request: pytest.FixtureRequest, folder: Path) -> Iterator[TwoHosts]:
    """With encrypted traffic of the ranks, unless a test asks for another."""
    if reason := why_no_namespaces():
        pytest.skip(f"needs hosts that are apart: {reason}")
    with simulated_hosts() as hosts:
        assert isinstance(hosts, NamespaceHosts)
        running = TwoHosts(hosts, folder, getattr(request, "param", "encrypted"))
        try:
            yield running
        finally:
            for process in running.by_hand.processes:
                process.kill()


def ports_between(sniffer: Sniffer, one: str, other: str) -> set[int]:
    """Ports of TCP between two hosts on which somebody listens or connects from."""
    wanted = {socket.gethostbyname(one), socket.gethostbyname(other)}
    segments = list(sniffer._segments())
    return {
        port
        for source, target, from_port, to_port, _ in segments
        if {source, target} == wanted
        for port in (from_port, to_port)
    }


def said_between_ranks(two_hosts: TwoHosts, text: str) -> bytes:
    """What passes from host to host while the ranks of both compute this text."""
    sniffer = Sniffer(two_hosts.hosts)
    try:
        until(two_hosts.ready, START_SECONDS, told=two_hosts.by_hand.output)
        assert two_hosts.text() == text
    finally:
        sniffer.stop()
    ports = ports_between(sniffer, *(one.host.address for one in two_hosts.ranks))
    passed = sniffer.payloads(*ports)
    assert len(passed) > 1000 * 2 * 2 * 64 * 4, "the sums of two layers, for each token"
    return passed


@pytest.mark.slow  # a host that joins has such ranks in the quick run
@pytest.mark.timeout(600)
def test_ranks_on_two_hosts_answer_as_one_worker_and_say_nothing_in_the_clear(
    two_hosts: TwoHosts, text_of_one: str
) -> None:
    passed = said_between_ranks(two_hosts, text_of_one)
    assert b"CURVE" in passed
    assert b"stage 0/all" not in passed, "what a rank writes ahead of its sums"
    stranger = two_hosts.rank(1, secret="a secret of somebody else")
    until(lambda: bool(stranger.said("--secret", "handshake")), 60, told=lambda: stranger.output)
    assert two_hosts.text() == text_of_one


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("two_hosts", ["plain"], indirect=True)
def test_ranks_on_two_hosts_of_a_closed_network_answer_by_gloo(
    two_hosts: TwoHosts, text_of_one: str
) -> None:
    passed = said_between_ranks(two_hosts, text_of_one)
    assert b"CURVE" not in passed


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seconds", [2.0, 8.0])
def test_a_host_that_is_cut_off_and_comes_back_changes_no_stream(
    seconds: float, two_hosts: TwoHosts, text_of_one: str
) -> None:
    until(two_hosts.ready, START_SECONDS, told=two_hosts.by_hand.output)
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(two_hosts.streamed) for _ in range(4)]
        time.sleep(BEGUN_SECONDS)
        with two_hosts.hosts.cut_off(two_hosts.ranks[1].host):
            assert not any(one.done() for one in asked), "too late"
            time.sleep(seconds)
        deadline = time.monotonic() + START_SECONDS
        while not all(one.done() for one in asked) and time.monotonic() < deadline:
            two_hosts.ready()
            time.sleep(0.1)
        assert [one.result(1) for one in asked] == [text_of_one] * 4, two_hosts.by_hand.output()
