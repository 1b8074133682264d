"""The services on several hosts, started by hand with flags: order, names, secrets, lost hosts."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from support.pipeline.host_process import HostProcess, is_ready, request
from support.pipeline.simulated_hosts import (
    Host,
    LoopbackHosts,
    NamespaceHosts,
    simulated_hosts,
    why_no_namespaces,
)
from support.polling import until

ROUTER = "tcp://router:5570"
SECRET = "a secret that all hosts share"
NULL = ["--device", "null"]


class ByHand:
    """Processes that a user starts on several hosts, each with its flags."""

    def __init__(self, hosts: LoopbackHosts | NamespaceHosts) -> None:
        self.hosts = hosts
        self.client = hosts.add("client", ["net"])
        self.processes: list[HostProcess] = []

    def start(self, service: str, *flags: str, secret: str = SECRET) -> HostProcess:
        return self.start_on(self.hosts.add(service, ["net"]), service, *flags, secret=secret)

    def start_on(self, host: Host, service: str, *flags: str, secret: str = SECRET) -> HostProcess:
        words = [self.hosts.settings(host, word) for word in ("--router", ROUTER, *flags)]
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": os.environ.get("HOME", "/"),
            "PENSTOCK_LOG_FORMAT": "json",
            **({"PENSTOCK_SECRET": secret} if secret else {}),
        }
        arguments = [sys.executable, "-m", "penstock.services", service, *words]
        process = HostProcess(service, host, arguments, environment)
        self.processes.append(process)
        return process

    def output(self) -> str:
        return "\n".join(process.output for process in self.processes)


@pytest.fixture
def by_hand() -> Iterator[ByHand]:
    with simulated_hosts() as hosts:
        cluster = ByHand(hosts)
        try:
            yield cluster
        finally:
            for process in cluster.processes:
                process.kill()


def isolated(by_hand: ByHand) -> NamespaceHosts:
    if not isinstance(by_hand.hosts, NamespaceHosts):
        pytest.skip(f"needs hosts that are apart: {why_no_namespaces()}")
    return by_hand.hosts


def ask(by_hand: ByHand, frontend: HostProcess, tokens: int = 8) -> int:
    """Have some tokens made. Returns how many the answer says there are."""
    body = {"model": "penstock-demo", "prompt": "hello", "max_tokens": tokens, "ignore_eos": True}
    status, text = request(by_hand.client, frontend.host.address, "/v1/completions", body)
    assert status == 200, text
    return int(json.loads(text)["usage"]["completion_tokens"])


def listening(process: HostProcess) -> set[tuple[str, int]]:
    """Where a process accepts connections."""
    if not process.host.namespace:
        connections = psutil.Process(process.process.pid).net_connections("tcp")
        return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}
    table = Path(f"/proc/{process.process.pid}/net/tcp").read_text()  # nobody else is on its host
    rows = [line.split() for line in table.splitlines()[1:]]
    found = [row[1].split(":") for row in rows if row[3] == "0A"]
    return {(socket.inet_ntoa(bytes.fromhex(ip)[::-1]), int(port, 16)) for ip, port in found}


def test_the_router_may_come_last_even_its_name(by_hand: ByHand) -> None:
    router_host = by_hand.hosts.add("router", ["net"])
    ports = ("--port-range", "20000-20009")
    anywhere = ("--bind", "tcp://0.0.0.0", *ports)
    frontend = by_hand.start("frontend", *anywhere, "--host", "0.0.0.0", "--insecure")
    tokenizer = by_hand.start("tokenizer", *anywhere)
    worker = by_hand.start("worker", *anywhere, *NULL)
    scheduler = by_hand.start("scheduler", *ports)  # binds the address of its route to the router
    early = [frontend, tokenizer, worker, scheduler]
    if by_hand.hosts.isolated:
        for process in early:
            until(
                lambda p=process: bool(p.said(ROUTER, "still trying")),
                told=lambda p=process: p.output,
            )
    router = by_hand.start_on(router_host, "router", "--bind", "tcp://0.0.0.0")
    by_hand.hosts.announce("router")
    address = frontend.host.address
    until(lambda: is_ready(by_hand.client, address), 60, told=by_hand.output)
    assert ask(by_hand, frontend) == 8
    for process in early:
        said = [line for line in process.lines if '"level": "info"' not in line]
        said = [line for line in said if '"event":"request"' not in line]
        assert len(said) == by_hand.hosts.isolated, "one complaint, no more"
        inboxes = {port for _, port in listening(process)} - {8000}
        assert len(inboxes) == 1, process.name
        assert inboxes <= set(range(20000, 20010)), process.name
    if by_hand.hosts.isolated:
        assert {ip for ip, _ in listening(scheduler)} == {scheduler.host.address}
    assert 5570 in {port for _, port in listening(router)}
    for process in (*early, router):
        assert process.end() == 0, process.output


def test_a_process_that_waits_for_a_name_ends_when_told_to(by_hand: ByHand) -> None:
    isolated(by_hand)
    process = by_hand.start("scheduler")
    until(lambda: bool(process.said("still trying")), 60, told=lambda: process.output)
    assert process.end(seconds=8) == 0, process.output


@pytest.mark.parametrize("service", ["router", "tokenizer"])
def test_without_a_secret_only_loopback_is_bound(by_hand: ByHand, service: str) -> None:
    by_hand.hosts.announce("router")
    process = by_hand.start_on(
        by_hand.hosts.add("router", ["net"]), service, "--bind", "tcp://*", secret=""
    )
    assert process.wait() == 2, process.output
    assert len(process.lines) == 1
    assert process.said("--bind tcp://*", "--secret"), process.output


def test_a_secret_that_others_can_read_is_refused(by_hand: ByHand, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("5" * 64)
    path.chmod(0o644)
    process = by_hand.start("router", "--bind", "tcp://127.0.0.1", secret=f"file:{path}")
    assert process.wait() == 2, process.output
    assert process.said("chmod 600", str(path))


def runs_one(by_hand: ByHand, address: str) -> bool:
    _, metrics = request(by_hand.client, address, "/metrics")
    return re.search(r"^penstock_requests_running\S* 1(\.0)?$", metrics, re.MULTILINE) is not None


@pytest.mark.slow
def test_a_router_whose_host_vanishes_is_replaced_by_one_at_another_address(
    by_hand: ByHand,
) -> None:
    """No packet says that the old one is gone: connections to it must end by themselves. What
    runs meanwhile goes on."""
    hosts = isolated(by_hand)
    anywhere = ("--bind", "tcp://0.0.0.0")
    router = by_hand.start("router", *anywhere)
    hosts.announce("router")
    frontend = by_hand.start("frontend", *anywhere, "--host", "0.0.0.0", "--insecure")
    by_hand.start("tokenizer", *anywhere)
    by_hand.start("scheduler", *anywhere)
    by_hand.start("worker", *anywhere, *NULL, "--null-step-ms", "20")
    address = frontend.host.address
    until(lambda: is_ready(by_hand.client, address), 60, told=by_hand.output)
    with ThreadPoolExecutor(1) as thread:
        long = thread.submit(ask, by_hand, frontend, 200)  # four seconds
        until(lambda: runs_one(by_hand, address))
        hosts.unplug(router.host)
        successor = by_hand.start("router", *anywhere, "--log-level", "debug")
        assert successor.host.address != router.host.address
        assert long.result(20) == 200
    services = ("router", "frontend", "tokenizer", "scheduler", "worker")
    until(lambda: all(successor.said(f"{s} joined") for s in services), 60, told=by_hand.output)
    until(lambda: is_ready(by_hand.client, address), 60, told=by_hand.output)
    assert ask(by_hand, frontend) == 8
