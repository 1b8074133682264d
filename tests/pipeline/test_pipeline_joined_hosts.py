"""`penstock serve --nodes` on one host and `--join` on another: what each starts, says and ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from support.pipeline.host_process import HostProcess, is_ready, request, streamed_text
from support.pipeline.served import served
from support.pipeline.simulated_hosts import (
    Host,
    NamespaceHosts,
    simulated_hosts,
    why_no_namespaces,
)
from support.polling import until

from penstock.loadtest.models.make_model import make_model

SECRET = "a secret that all hosts share"
NULL = ("--device", "null", "--null-step-ms", "10")
CPU = (
    *("--device", "cpu", "--dtype", "float32", "--threads", "1", "--num-kv-blocks", "200"),
    *("--quantization", "int8", "--tensor-parallel-size", "2"),
)
SAMPLED = {
    "prompt": [7, 8, 9], "max_tokens": 200, "temperature": 0.9, "seed": 5, "ignore_eos": True,
    "mirostat_mode": 2, "mirostat_tau": 4, "mirostat_eta": 0.4, "dry_multiplier": 0.8,
    "xtc_probability": 0.3, "xtc_threshold": 0.01, "logprobs": 1,
}  # fmt: skip
START_SECONDS = 90.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = make_model(tmp_path_factory.mktemp("models") / "joined")
    return made


class Hosts:
    """Hosts with names and addresses of their own, and what was started on them."""

    def __init__(self, hosts: NamespaceHosts) -> None:
        self._hosts = hosts
        self.client = hosts.add("client", ["net"])
        self.first, self.second, self.third = (
            hosts.add(name, ["net"]) for name in ("first", "second", "third")
        )
        self.router = f"tcp://{self.first.address}:5570"
        self.processes: list[HostProcess] = []

    def start(self, host: Host, *words: str, secret: str = SECRET) -> HostProcess:
        """``penstock serve`` there, with these words."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host.name]
        command = [*named, sys.executable, "-m", "penstock.services", "serve", *words]
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": os.environ.get("HOME", "/"),
            "PENSTOCK_LOG_FORMAT": "json",
            "PENSTOCK_SECRET": secret,
        }
        self.processes.append(HostProcess(f"serve on {host.name}", host, command, environment))
        return self.processes[-1]

    def serve(self, model: Path, *words: str) -> HostProcess:
        server = ("--router", self.router, "--host", "0.0.0.0", "--insecure", "--nodes", "2")
        return self.start(self.first, str(model), *server, *NULL, *words)

    def join(self, *words: str, host: Host | None = None, secret: str = SECRET) -> HostProcess:
        return self.start(host or self.second, "--join", self.router, *words, secret=secret)

    def ready(self) -> bool:
        return is_ready(self.client, self.first.address)

    def asked(self) -> int:
        """Tokens that come of a request."""
        body = {"prompt": [1, 2, 3], "max_tokens": 8, "ignore_eos": True}
        status, text = request(self.client, self.first.address, "/v1/completions", body)
        assert status == 200, f"{text}\n{self.output()}"
        return int(json.loads(text)["usage"]["completion_tokens"])

    def output(self) -> str:
        return "\n".join(process.output for process in self.processes)


def children(process: HostProcess) -> dict[str, int]:
    """Pids of what a ``serve`` has started, by service and number."""
    found = {}
    for child in psutil.Process(process.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            told = re.match(
                r"penstock: (\w+) (\d+)|.*penstock\.services (\w+) --number (\d+)",
                " ".join(child.cmdline()),
            )
            if told is not None:
                service, number = told.group(1, 2) if told[1] else told.group(3, 4)
                found[f"{service} {number}"] = child.pid
    return found


def tokens_came(hosts: Hosts) -> float:
    _, text = request(hosts.client, hosts.first.address, "/metrics")
    lines = (line for line in text.splitlines() if line[0] != "#")
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith("penstock_generation_tokens_total")
    )


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if reason := why_no_namespaces():
        pytest.skip(f"needs hosts that are apart: {reason}")
    with simulated_hosts() as simulated:
        assert isinstance(simulated, NamespaceHosts)
        running = Hosts(simulated)
        try:
            yield running
        finally:
            for process in running.processes:
                process.kill()


@pytest.mark.timeout(400)
def test_a_host_that_joins_starts_its_workers_keeps_them_alive_and_ends_with_the_first(
    hosts: Hosts, folder: Path
) -> None:
    first = hosts.serve(folder, "--tensor-parallel-size", "2", "--data-parallel-size", "2")
    command = f"penstock serve --join {hosts.router} --secret file:PATH"
    until(lambda: bool(first.said("1 of 2 hosts has not joined", command)), START_SECONDS)
    until(lambda: "router 0" in children(first), START_SECONDS)
    assert not any(name.startswith("worker") for name in children(first))
    stranger = hosts.join("--join-timeout-s", "8", host=hosts.third, secret="another secret of all")
    assert stranger.wait(60) == 6, stranger.output
    assert stranger.said(f"{hosts.router} refuses the connection in the handshake", "--secret")
    assert stranger.said("has not answered for 8 s (--join-timeout-s)", "same --secret")
    joined = hosts.join()
    until(hosts.ready, START_SECONDS, told=hosts.output)
    assert hosts.asked() == 8
    assert {"worker 0", "worker 1", "scheduler 0"} <= children(first).keys()
    theirs = {"worker 2", "worker 3", "scheduler 1"}
    until(lambda: children(joined).keys() == theirs, START_SECONDS, told=lambda: joined.output)
    before = children(joined)
    late = hosts.join(host=hosts.third)
    assert late.wait(60) == 5, late.output
    assert late.said("the server has its 2 hosts", "--nodes")
    os.kill(before["worker 3"], signal.SIGKILL)
    until(
        lambda: children(joined).get("worker 3", 0) not in (0, before["worker 3"]),
        START_SECONDS,
        told=lambda: joined.output,
    )
    assert until(hosts.ready, START_SECONDS) and hosts.asked() == 8
    assert first.end(seconds=60) == 0, first.output
    assert joined.wait(60) == 0, joined.output
    assert joined.said("the first host has ended")


@pytest.mark.slow  # the quick run has the lost ranks of a worker group and a host that joins
@pytest.mark.timeout(400)
def test_a_lost_host_leaves_its_part_to_the_next_and_a_lost_first_host_is_awaited(
    hosts: Hosts, folder: Path
) -> None:
    words = ("--tensor-parallel-size", "2")
    first = hosts.serve(folder, *words)
    joined = hosts.join()
    until(hosts.ready, START_SECONDS, told=hosts.output)
    joined.end(signal.SIGKILL)
    until(lambda: bool(first.said("host second is gone")), START_SECONDS, told=lambda: first.output)
    successor = hosts.join("--join-timeout-s", "60", host=hosts.third)
    until(lambda: bool(first.said("host third takes the part of host second")), 60)
    until(hosts.ready, START_SECONDS, told=hosts.output)
    assert hosts.asked() == 8
    first.end(signal.SIGKILL)
    again = hosts.serve(folder, *words)
    until(lambda: bool(successor.said("the first host is gone", "60 s")), START_SECONDS)
    until(hosts.ready, START_SECONDS, told=hosts.output)
    assert hosts.asked() == 8
    assert children(successor).keys() == {"worker 1"}
    assert again.end(seconds=60) == 0, again.output
    assert successor.wait(60) == 0, successor.output


@pytest.mark.timeout(400)
def test_a_model_folder_that_is_missing_or_differs_is_named_with_the_remedy(
    hosts: Hosts, folder: Path, tmp_path: Path
) -> None:
    hosts.serve(folder, "--data-parallel-size", "2")
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rope_theta": 5.0}))
    for path, words in (
        (tmp_path / "nowhere", (str(tmp_path / "nowhere"),)),
        (other, (str(other), "has other files (fingerprint", "than the first host's")),
    ):
        joined = hosts.join(str(path))
        assert joined.wait(START_SECONDS) == 3, joined.output
        assert joined.said(*words), joined.output
        assert joined.said(f"the first host serves the model in {folder}", "--join ADDRESS FOLDER")
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    hosts.join(str(copy))
    until(hosts.ready, START_SECONDS, told=hosts.output)


@pytest.mark.timeout(400)
@pytest.mark.slow  # tests of workers have such ranks in the quick run, the test above has hosts
def test_quantized_weights_and_samplers_on_two_hosts_answer_as_on_one_also_when_a_rank_dies(
    hosts: Hosts, tmp_path: Path
) -> None:
    divided = make_model(tmp_path / "divided", hidden_size=128, num_heads=4, num_kv_heads=2)
    with served(str(divided), *CPU) as one:
        status, of_one = one.post("/v1/completions", SAMPLED)
    assert status == 200, of_one
    expected = of_one["choices"][0]
    server = ("--router", hosts.router, "--host", "0.0.0.0", "--insecure", "--nodes", "2")
    hosts.start(hosts.first, str(divided), *server, *CPU)
    joined = hosts.join()
    until(hosts.ready, START_SECONDS, told=hosts.output)
    assert joined.said("quantized (int8, quantized while it is read)"), joined.output
    before = children(joined)
    with ThreadPoolExecutor() as threads:
        body = {**SAMPLED, "stream": True}
        address = hosts.first.address
        plain = threads.submit(request, hosts.client, address, "/v1/completions", SAMPLED)
        streamed = threads.submit(request, hosts.client, address, "/v1/completions", body)
        until(lambda: tokens_came(hosts) > 20, 60, told=hosts.output)
        assert not streamed.done(), "too late"
        os.kill(before["worker 1"], signal.SIGKILL)
        status, text = plain.result(120)
        assert status == 200, f"{text}\n{hosts.output()}"
        assert json.loads(text)["choices"][0] == expected, hosts.output()
        status, events = streamed.result(120)
    assert status == 200 and streamed_text(events) == expected["text"], hosts.output()
    assert children(joined)["worker 1"] != before["worker 1"]
