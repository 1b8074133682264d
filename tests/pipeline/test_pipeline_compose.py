"""docker-compose.yml, run without Docker: each service's own command with its own settings as a
process on a host of its own, with the packages that its image has and no others.

What stays untested is Docker's part: building the images, user, volumes, limits and health checks.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.pipeline import install_set
from support.pipeline.compose_file import (
    ROOT,
    SECRETS,
    Service,
    dependency_group,
    make_secret,
    read_compose,
    read_dockerfile,
    stop_order,
)
from support.pipeline.host_process import HostProcess, is_ready, request, streamed_text
from support.pipeline.name_service import NameService
from support.pipeline.simulated_hosts import (
    Host,
    LoopbackHosts,
    NamespaceHosts,
    Sniffer,
    simulated_hosts,
    why_no_namespaces,
)
from support.polling import until

from penstock.protocol.wire.mailbox import Mailbox
from penstock.protocol.wire.messages.membership import MetricsAnswer, MetricsQuery
from penstock.protocol.wire.security import CurveKeys

SCALE = {"tokenizer": 2, "frontend": 2}
ROLES = ("router", "worker", "scheduler", "tokenizer", "frontend")
MARKER = "quicksilver"
"""A word that is looked for on the wire."""
START_SECONDS = 60.0


@dataclass
class Deployment:
    """All containers of the compose file, as processes."""

    hosts: LoopbackHosts | NamespaceHosts
    services: dict[str, Service]
    folder: Path
    client: Host
    """A host on both networks that runs nothing of ours."""
    containers: dict[str, list[HostProcess]] = field(default_factory=dict)
    sniffer: Sniffer | None = None
    completions: int = 0
    """Requests that were answered."""

    @property
    def secret(self) -> str:
        return f"file:{self.folder}/secrets/penstock"

    @property
    def frontends(self) -> list[str]:
        network = "edge"
        return [process.host.addresses[network] for process in self.containers["frontend"]]

    @property
    def router(self) -> HostProcess:
        return self.containers["router"][0]

    def adapted(self, host: Host, text: str) -> str:
        return self.hosts.settings(host, text.replace(SECRETS, f"{self.folder}/secrets"))

    def launch(self, name: str, **changed: str) -> HostProcess:
        """Start one container of a service."""
        service = self.services[name]
        host = self.hosts.add(name, service.networks)
        command = [self.adapted(host, part) for part in service.command]
        assert command[0] == "penstock"
        group = dependency_group(read_dockerfile(), service.target)
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "XDG_CACHE_HOME": f"{self.folder}/cache",
            "OMP_NUM_THREADS": "2",
            "PENSTOCK_THREADS": "1",  # for all of them, as by a file .env
            **install_set.environment(group, self.folder / "site"),
            **{key: self.adapted(host, value) for key, value in service.environment.items()},
            **changed,
        }
        arguments = [sys.executable, "-m", "penstock.services", *command[1:]]
        return HostProcess(name, host, arguments, environment)

    def output(self) -> str:
        return "\n".join(p.output for group in self.containers.values() for p in group)

    def is_up(self) -> bool:
        """Whether both frontends serve. Raises when a container has ended."""
        for group in self.containers.values():
            for process in group:
                assert process.process.poll() is None, process.output
        return all(is_ready(self.client, address) for address in self.frontends)

    def mailbox(self, secret: str) -> Mailbox:
        """A mailbox on the pipeline's network that nobody has admitted yet."""
        keys = CurveKeys(secret) if secret else None
        address = self.client.addresses["pipeline"]
        if keys is None:
            address = "127.0.0.1"  # nothing else may be bound without a secret
        with self.client.entered():
            return Mailbox(f"tcp://{address}", keys=keys)

    def ask_router(self, mailbox: Mailbox) -> None:
        with self.client.entered():
            target = f"tcp://{self.router.host.address}:5570"
            mailbox.send(target, MetricsQuery(mailbox.address))

    def is_answered(self, mailbox: Mailbox) -> bool:
        """Whether the router has told its metrics to the owner of this mailbox."""
        with self.client.entered():
            mailbox.flush()
            return any(isinstance(m, MetricsAnswer) for _, m in mailbox.drain())


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Everything up: two tokenizers, two frontends, one of each of the others."""
    folder = tmp_path_factory.mktemp("compose")
    services = read_compose({})
    make_secret(services["secret"], folder / "secrets")
    with simulated_hosts() as hosts:
        client = hosts.add("client", ["edge", "pipeline"])
        deployment = Deployment(hosts, services, folder, client)
        if isinstance(hosts, NamespaceHosts):
            deployment.sniffer = Sniffer(hosts)
        try:
            for name in ROLES:
                count = SCALE.get(name, 1)
                level = "debug" if name == "router" else "info"  # it tells who joins
                deployment.containers[name] = [
                    deployment.launch(name, PENSTOCK_LOG_LEVEL=level) for _ in range(count)
                ]
                hosts.announce(name)
            until(deployment.is_up, START_SECONDS, told=deployment.output)
            yield deployment
        finally:
            for group in deployment.containers.values():
                for process in group:
                    process.kill()
            if deployment.sniffer is not None:
                deployment.sniffer.stop()


def completion(deployment: Deployment, address: str, prompt: str, stream: bool = False) -> str:
    body = {
        "model": "penstock-demo",
        "prompt": prompt,
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }
    status, text = request(deployment.client, address, "/v1/completions", body)
    assert status == 200, text
    deployment.completions += 1
    if stream:
        return streamed_text(text)
    return str(json.loads(text)["choices"][0]["text"])


def test_every_container_joins_whatever_the_order_of_their_start(deployment: Deployment) -> None:
    for name in ROLES:
        joined = deployment.router.said(f"{name} joined")
        assert len(joined) == SCALE.get(name, 1), deployment.router.output


def test_both_frontends_give_the_same_answers_streamed_or_not(deployment: Deployment) -> None:
    """One model behind them all: greedy text depends on neither frontend nor tokenizer."""
    first, second = deployment.frontends
    for number in range(6):
        prompt = f"The {MARKER} number {number}"
        answer = completion(deployment, first, prompt)
        assert answer
        assert completion(deployment, second, prompt, stream=True) == answer


def test_a_frontend_tells_of_the_whole_system(deployment: Deployment) -> None:
    def answered() -> float:
        text = request(deployment.client, deployment.frontends[1], "/metrics")[1]
        assert len(re.findall(r'outbox_bytes\{process="tokenizer-', text)) == 2
        assert len(re.findall(r'outbox_bytes\{process="frontend-', text)) == 2
        counts = re.findall(r"^penstock_requests_finished_total\{.*\} (\S+)", text, re.MULTILINE)
        return sum(map(float, counts))

    for address in deployment.frontends:
        completion(deployment, address, "one more")
    until(
        lambda: answered() == deployment.completions,
        60,
        told="beats bring what all counted",
    )


def test_a_frontend_passes_its_own_health_check(deployment: Deployment) -> None:
    check = deployment.services["frontend"].raw["healthcheck"]["test"]
    assert check[:2] == ["CMD", "python"]
    host = deployment.containers["frontend"][0].host
    own = "127.0.0.1" if deployment.hosts.isolated else host.address
    arguments = [sys.executable, *(part.replace("127.0.0.1", own) for part in check[2:])]
    assert subprocess.run(host.command(arguments), timeout=60).returncode == 0
    nobody = [part.replace("8000", "8001") for part in arguments]
    failed = subprocess.run(host.command(nobody), timeout=60, capture_output=True)
    assert failed.returncode != 0


def test_only_the_secret_opens_the_pipeline(deployment: Deployment) -> None:
    secret = (deployment.folder / "secrets" / "penstock").read_text().strip()
    insider = deployment.mailbox(secret)
    stranger = deployment.mailbox("another secret of good length")
    naked = deployment.mailbox("")
    try:
        for mailbox in (naked, stranger, insider):
            deployment.ask_router(mailbox)
        until(lambda: deployment.is_answered(insider))
        until(stranger.complaints)
        deployment.ask_router(insider)
        until(lambda: deployment.is_answered(insider))
        assert not deployment.is_answered(stranger)
        assert not deployment.is_answered(naked)
    finally:
        for mailbox in (insider, stranger, naked):
            with deployment.client.entered():
                mailbox.close(linger_ms=0)


def test_every_pipeline_socket_speaks_curve_and_nothing_else(deployment: Deployment) -> None:
    """The mechanism's name is in bytes 12 to 31 of ZMTP's greeting (rfc.zeromq.org/spec/23)."""
    with deployment.client.entered():
        target = (deployment.router.host.address, 5570)
        with socket.create_connection(target, timeout=60) as connection:
            greeting = b""
            connection.sendall(
                b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"CURVE".ljust(20, b"\0")
            )
            while len(greeting) < 32 and (data := connection.recv(64)):
                greeting += data
    assert greeting[12:32].rstrip(b"\0") == b"CURVE"


def test_no_prompt_passes_the_pipeline_in_the_clear(deployment: Deployment) -> None:
    if deployment.sniffer is None:
        pytest.skip(f"nothing to listen to: {why_no_namespaces()}")
    completion(deployment, deployment.frontends[0], f"say {MARKER} once more")
    until(
        lambda: MARKER.encode() in deployment.sniffer.payloads(8000),
        60,
        told="HTTP is not encrypted here: what is listened with must hear it",
    )
    pipeline = deployment.sniffer.payloads(5570, *range(20000, 20100))
    assert len(pipeline) > 10_000
    assert b"CURVE" in pipeline
    assert MARKER.encode() not in pipeline
    assert b"penstock-demo" not in pipeline


def test_a_process_with_another_secret_is_refused_with_one_line_on_each_side(
    deployment: Deployment,
) -> None:
    before = len(deployment.router.said("tokenizer joined"))
    other = deployment.launch("tokenizer", PENSTOCK_SECRET="some other secret, long enough")
    try:
        host = other.host.address
        until(lambda: bool(other.said("secret")), 60, told=lambda: other.output)
        if deployment.hosts.isolated:  # else all loopback connections come from 127.0.0.1
            until(
                lambda: deployment.router.said("refused", host),
                told=lambda: deployment.router.output,
            )
        assert other.end() == 0, other.output
    finally:
        other.kill()
    (line,) = other.said("refuses the connection")
    assert "tcp://" in line
    assert "secret" in line
    said = [line for line in other.lines if '"level": "info"' not in line]
    assert len(said) == 1, other.output
    assert len(deployment.router.said("tokenizer joined")) == before
    if deployment.hosts.isolated:
        assert len(deployment.router.said("refused", host)) == 1


def test_a_load_balancer_spreads_streams_over_all_frontends(deployment: Deployment) -> None:
    if shutil.which("haproxy") is None:
        pytest.skip("haproxy is not installed here")
    if not isinstance(deployment.hosts, NamespaceHosts):
        pytest.skip(f"its name service needs a host of its own: {why_no_namespaces()}")
    service = deployment.services["load-balancer"]
    host = deployment.hosts.add(service.name, service.networks)
    (mount,) = service.mounts
    command = [part.replace(mount.target, str(ROOT / mount.source)) for part in service.command]
    with NameService(deployment.hosts, host):
        balancer = HostProcess(service.name, host, command, dict(os.environ))
        try:
            address = host.addresses["edge"]
            until(lambda: is_ready(deployment.client, address), 60, told=lambda: balancer.output)
            direct = completion(deployment, deployment.frontends[0], "through the balancer")
            assert deployment.sniffer is not None
            for _ in range(6):
                text = completion(deployment, address, "through the balancer", stream=True)
                assert text == direct
            for frontend in deployment.frontends:
                assert deployment.sniffer.posts(address, frontend) > 0, "it got its share"
        finally:
            balancer.end()


def test_all_end_with_code_0_in_the_order_of_compose(deployment: Deployment) -> None:
    """The last test: nothing runs after it."""
    order = [name for name in stop_order(deployment.services) if name in deployment.containers]
    assert order == ["frontend", "tokenizer", "scheduler", "worker", "router"]
    for name in order:
        group = deployment.containers[name]
        for process in group:
            process.process.terminate()
        codes = [process.wait() for process in group]
        assert codes == [0] * len(group), "\n".join(process.output for process in group)
    assert "Traceback" not in deployment.output()
