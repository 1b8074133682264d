"""The chart, run without a cluster: the command of each container with its variables and files, as
a process on the host of its pod, with the packages that its image has and no others."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helm_chart import kept_manifests, named, of_kind
from support.deploy.local_cluster import Cluster, send
from support.pipeline.simulated_hosts import simulated_hosts
from support.polling import until

WIRE = {"wire": {"secret": "a secret of some length, for all of them"}}
KEY = "key-of-a-client"


@contextlib.contextmanager
def started(case: str, secrets: dict[str, dict[str, str]], folder: Path) -> Iterator[Cluster]:
    with simulated_hosts() as hosts:
        cluster = Cluster(hosts, kept_manifests(case), secrets, folder)
        try:
            cluster.start()
            cluster.wait_until_up()
            yield cluster
        finally:
            cluster.kill()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    secrets = {**WIRE, "clients": {"api-keys": f"{KEY}\n"}}
    with started("plain", secrets, tmp_path_factory.mktemp("plain")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with started("groups", WIRE, tmp_path_factory.mktemp("groups")) as cluster:
        yield cluster


def addresses(cluster: Cluster) -> list[str]:
    """Of the frontends."""
    return [one.process.host.address for one in cluster.of("frontend")]


def completion(tokens: int, stream: bool = False) -> dict[str, object]:
    return {
        "prompt": "Penstock is",
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }


def test_all_containers_pass_all_their_probes(plain: Cluster) -> None:
    roles = [one.container.role for one in plain.started]
    assert sorted(set(roles)) == ["frontend", "router", "scheduler", "tokenizer", "worker"]
    assert roles.count("frontend") == 2
    for one in plain.started:
        for probe in ("startup", "readiness", "liveness"):
            if f"{probe}Probe" in one.container.raw:
                assert plain.passes(one, probe), (one.container.name, probe)


def test_every_frontend_answers_who_has_the_key(plain: Cluster) -> None:
    texts = set()
    for address in addresses(plain):
        status, body = plain.ask(address, "/v1/completions", completion(8), KEY)
        assert status == 200, body
        texts.add(json.loads(body)["choices"][0]["text"])
        assert json.loads(body)["model"] == "penstock-demo"
    assert len(texts) == 1
    assert "" not in texts


def test_nobody_else_is_answered(plain: Cluster) -> None:
    for key in ("", "another"):
        assert plain.ask(addresses(plain)[0], "/v1/completions", completion(8), key)[0] == 401
        assert plain.ask(addresses(plain)[0], "/metrics", key=key)[0] == 401


def test_a_router_that_hangs_fails_the_probe_by_which_it_is_started_again(plain: Cluster) -> None:
    (router,) = plain.of("router")
    state = router.folder / "penstock-state"
    os.kill(router.process.process.pid, signal.SIGSTOP)
    try:
        time.sleep(0.1)
        os.utime(state, (time.time() - 9.0,) * 2)
        assert plain.passes(router, "liveness")
        os.utime(state, (time.time() - 11.0,) * 2)
        assert not plain.passes(router, "liveness")
        assert not plain.passes(router, "readiness")
    finally:
        os.kill(router.process.process.pid, signal.SIGCONT)
    until(lambda: plain.passes(router, "liveness"), 5)


def test_an_engine_is_not_ready_before_its_weights_are_there(plain: Cluster) -> None:
    """So a rolling update takes no further engine before the last one serves."""
    (scheduler,), (worker,) = plain.of("scheduler"), plain.of("worker")
    (router,) = plain.of("router")
    assert any(router.name in ready and worker.name not in ready for ready in plain.ready_seen)
    for ready in plain.ready_seen:
        assert scheduler.name not in ready or worker.name in ready


def test_a_stream_ends_well_while_all_pods_are_deleted(plain: Cluster) -> None:
    """The last test of this cluster."""
    connection = plain.connect(addresses(plain)[0])
    send(connection, "/v1/completions", completion(100, stream=True), KEY)
    answer = connection.getresponse()
    lines = [answer.readline().decode()]
    ended = plain.delete_all()
    lines += [line.decode() for line in answer]
    codes = ended()
    assert set(codes.values()) == {0}, (codes, plain.output())
    data = [line.removeprefix("data: ").strip() for line in lines if line.startswith("data")]
    assert data[-1] == "[DONE]"
    choices = [choice for event in data[:-1] for choice in json.loads(event)["choices"]]
    assert [one["finish_reason"] for one in choices if one["finish_reason"]] == ["length"]
    assert "Traceback" not in plain.output()


def test_an_engine_of_two_ranks_in_two_pods_answers(groups: Cluster) -> None:
    workers = [one.container for one in groups.of("worker")]
    assert len({one.pod.name for one in workers}) == 2
    assert {one.environment()["PENSTOCK_RANK"] for one in workers} == {"0", "1"}
    (address,) = addresses(groups)
    status, body = groups.ask(address, "/v1/completions", completion(8))
    assert status == 200, body
    assert json.loads(body)["usage"]["completion_tokens"] == 8


def test_what_pods_are_scaled_by_is_served(groups: Cluster) -> None:
    (address,) = addresses(groups)
    for manifest in of_kind(groups.manifests, "ScaledObject"):
        query = manifest["spec"]["triggers"][0]["metadata"]["query"]
        (series,) = re.findall(r"max\((.*)\)", query)
        age = groups.metric(address, series)
        assert 0 <= age < 5


def test_requests_that_wait_for_an_engine_make_its_queue_old(groups: Cluster) -> None:
    """More than an engine runs at once: the last ones wait until the first ones have ended."""
    (address,) = addresses(groups)
    scaled = named(groups.manifests, "ScaledObject", "demo-penstock-null-engine")
    (series,) = re.findall(r"max\((.*)\)", scaled["spec"]["triggers"][0]["metadata"]["query"])
    connections = []
    try:
        for _ in range(3):
            connection = groups.connect(address)
            connections.append(connection)
            send(connection, "/v1/completions", completion(150))
        until(lambda: groups.metric(address, series) > 1, 20)
        for connection in connections:
            assert connection.getresponse().status == 200
        until(lambda: groups.metric(address, series) == 0, 10)
    finally:
        for connection in connections:
            connection.close()


def test_all_pods_of_groups_end_with_code_0(groups: Cluster) -> None:
    """The last test of this cluster."""
    codes = groups.delete_all()()
    assert set(codes.values()) == {0}, (codes, groups.output())
