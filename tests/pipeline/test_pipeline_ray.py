"""`--executor ray` on Ray's own test cluster: workers are placed, survive a lost node, and what is
missing is named."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.pipeline.served import Served, served
from support.polling import until

from penstock.loadtest.models.make_model import make_model

cluster_utils = pytest.importorskip("ray.cluster_utils")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CPU = ("--device", "cpu", "--dtype", "float32", "--num-kv-blocks", "200")
TENSOR_2 = ("--executor", "ray", "--tensor-parallel-size", "2")
BODY: dict[str, Any] = {
    "prompt": [7, 8, 9], "max_tokens": 40, "temperature": 0.8, "seed": 3, "ignore_eos": True
}  # fmt: skip
START_SECONDS = 300.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "divided"
    made: Path = make_model(path, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2)
    return made


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head without a CPU for workers, and nothing else yet."""
    from ray._private import services

    known = services.get_node

    def patient(*arguments: Any) -> Any:
        """Ray itself gives a node 30 s to start, which a busy machine exceeds."""
        found: list[Any] = []

        def ask() -> bool:
            with contextlib.suppress(RuntimeError):
                found.append(known(*arguments))
            return bool(found)

        until(ask, START_SECONDS, told="a node of Ray did not start")
        return found[0]

    monkeypatch.setattr(services, "get_node", patient)
    monkeypatch.setenv("RAY_agent_register_timeout_ms", f"{START_SECONDS * 1000:.0f}")
    head = {"num_cpus": 0, "include_dashboard": False, **agent_ports()}
    found = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    try:
        yield found
    finally:
        found.shutdown()


def agent_ports() -> dict[str, int]:
    """Of a node's agents: where they are given, it does not wait 30 s for the agents to say them,
    and end when a busy machine starts these too slowly."""
    names = (
        *("metrics_agent_port", "metrics_export_port"),
        *("runtime_env_agent_port", "dashboard_agent_listen_port"),
    )
    with contextlib.ExitStack() as stack:
        free = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in names]
        return {name: one.getsockname()[1] for name, one in zip(names, free, strict=True)}


def nodes_for_workers(cluster: Any) -> list[Any]:
    """Added once the server has connected, so to the head: all nodes have one address here, and
    with the node that it is connected to it would lose its workers."""
    logs = Path(cluster.head_node.get_logs_dir_path())
    until(lambda: any(logs.glob("python-core-driver-*")), START_SECONDS)
    return [cluster.add_node(num_cpus=1, **agent_ports()) for _ in range(2)]


def text_by(server: Served) -> str:
    status, answer = server.post("/v1/completions", BODY)
    assert status == 200, answer
    text: str = answer["choices"][0]["text"]
    return text


def test_ray_places_the_ranks_on_two_nodes_and_again_when_one_is_lost(
    folder: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(str(folder), *CPU) as one:
        expected = text_by(one)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    monkeypatch.setattr("support.pipeline.served.START_SECONDS", START_SECONDS)
    with ThreadPoolExecutor(1) as thread, contextlib.ExitStack() as stack:
        serving = thread.submit(stack.enter_context, served(str(folder), *CPU, *TENSOR_2))
        nodes = nodes_for_workers(cluster)
        server = serving.result()
        assert text_by(server) == expected
        cluster.add_node(num_cpus=1, **agent_ports())
        cluster.remove_node(nodes[0], allow_graceful=False)

        def answers_again() -> bool:
            try:
                return text_by(server) == expected
            except (AssertionError, urllib.error.URLError, json.JSONDecodeError, OSError):
                return False

        until(
            lambda: "takes the part of host" in server.output,
            START_SECONDS,
            told=lambda: server.output,
        )
        until(answers_again, START_SECONDS, told=lambda: server.output)


def test_what_the_cluster_lacks_is_named_when_there_is_no_place_in_time(
    folder: Path, cluster: Any
) -> None:
    cluster.add_node(num_cpus=1, **agent_ports())
    command = [sys.executable, "-m", "penstock.services", "serve", str(folder), "--port", "0"]
    done = subprocess.run(
        [*command, *CPU, *TENSOR_2, "--join-timeout-s", "10"],
        env={**os.environ, "RAY_ADDRESS": cluster.address},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 6, done.stdout + done.stderr
    assert "Ray has not placed the workers within 10 s (--join-timeout-s)" in done.stderr
    assert "2 workers need 2 CPU (1 each), and the cluster has 1" in done.stderr


def test_without_a_cluster_ray_says_how_to_start_one(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "penstock.services", "serve", str(folder), *CPU, *TENSOR_2],
        env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "this host is in no Ray cluster" in done.stderr
    assert "ray start --head" in done.stderr
