"""Two engines of one model: requests with several choices, and engines of different sizes."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from support.pipeline.served import START_SECONDS, Served, served, start_service
from support.polling import until

SECONDS = 10.0


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    flags = ["--device", "null", "--null-step-ms", "50", "--data-parallel-size", "2"]
    with served(*flags) as one:
        engines_are_ready(one, 2)
        yield one


def engines_are_ready(server: Served, count: int) -> None:
    """Wait for so many: a server is ready with its first, and the others come later."""
    until(lambda: len(schedulers(server)) >= count, START_SECONDS, told=lambda: server.output)


@contextlib.contextmanager
def streams(server: Served, *choices: int) -> Iterator[None]:
    """Requests that run, one after the other, each with so many choices, until the block ends."""
    target = urlsplit(server.url)
    connections = []
    headers = {"Content-Type": "application/json"}
    try:
        for number, n in enumerate(choices):
            body = {"prompt": f"request {number}", "n": n, "max_tokens": 2000, "stream": True}
            connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=30)
            connections.append(connection)
            request = json.dumps({**body, "ignore_eos": True})
            connection.request("POST", "/v1/completions", request, headers)
            answer = connection.getresponse()
            assert answer.status == 200
            assert answer.readline().startswith(b"data: ")
        yield
    finally:
        for connection in connections:
            connection.close()


def loads(server: Served, total: int) -> list[int]:
    """Sequences in each engine, once they have told of so many."""
    deadline = time.monotonic() + SECONDS
    while True:
        with urllib.request.urlopen(server.url + "/playground/status", timeout=10) as answer:
            processes = json.load(answer)["processes"]
        found = [one["load"] for one in processes if one["service"] == "scheduler"]
        if sum(found) == total or time.monotonic() > deadline:
            return sorted(found)
        time.sleep(0.1)


def test_engines_share_sequences_not_requests(server: Served) -> None:
    with streams(server, 8, *[1] * 8):
        assert loads(server, 16) == [8, 8]


def schedulers(server: Served) -> dict[str, psutil.Process]:
    """Those of the server that are ready, by the engine's name."""
    with urllib.request.urlopen(server.url + "/playground/status", timeout=10) as answer:
        processes = json.load(answer)["processes"]
    return {
        one["engine"]: psutil.Process(one["pid"])
        for one in processes
        if one["service"] == "scheduler" and one["phase"] == "ready"
    }


def until_while_it_runs(is_so: Callable[[], bool], asked: threading.Thread) -> None:
    until(lambda: is_so() or not asked.is_alive())
    assert asked.is_alive(), "the answer came too soon"


@pytest.mark.slow
def test_an_answer_that_a_smaller_engine_cannot_hold_goes_on_in_one_that_can() -> None:
    flags = ("--device", "null", "--null-step-ms", "10")
    body = {"prompt": "Once", "max_tokens": 1800, "ignore_eos": True, "seed": 3}
    found: list[tuple[int, dict[str, Any]]] = []
    with served(*flags) as server:
        asked = threading.Thread(target=lambda: found.append(server.post("/v1/completions", body)))
        asked.start()
        (first,) = schedulers(server)
        until_while_it_runs(lambda: server.metrics()["penstock_generation_tokens_total"] > 0, asked)
        small = ("--engine", "small")
        added = [
            start_service(server, "scheduler", *small),
            start_service(server, "worker", *small, *flags, "--max-model-len", "64"),
        ]
        try:
            until_while_it_runs(lambda: "small" in schedulers(server), asked)
            until_while_it_runs(
                lambda: server.metrics()["penstock_generation_tokens_total"] > 100, asked
            )
            schedulers(server)[first].kill()
            asked.join(60)
        finally:
            for process in added:
                process.kill()
    ((status, answer),) = found
    assert (status, answer["usage"]["completion_tokens"]) == (200, 1800), answer
