"""/metrics and a client agree: tokens exactly, latencies within a bucket, under load and after one
process of each kind was killed."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from bisect import bisect_left

import pytest
from support.chaos.victims import find, whole_again
from support.pipeline.served import Served
from support.polling import until

from penstock.protocol.process.metric_declarations import METRICS

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

PROCESSES = 3 + 2 + 1 + 2 + 2
"""Frontends, tokenizers, router, schedulers, workers."""


class Counted:
    """What a client has counted of the requests that ended."""

    def __init__(self) -> None:
        self.prompt = self.completion = self.requests = 0
        self.seconds: list[float] = []
        self._lock = threading.Lock()

    def ask(self, server: Served, tokens: int) -> None:
        body = {
            "model": "penstock-demo",
            "prompt": "some words " * (tokens % 7 + 1),
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            server.url + "/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Connection": "close"},
        )
        began, ids = time.monotonic(), 0
        with urllib.request.urlopen(request, timeout=120) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    for choice in event.get("choices", ()):
                        ids += len(choice.get("token_ids") or ())
                    usage = event.get("usage") or {}
        seconds = time.monotonic() - began
        assert ids == usage["completion_tokens"] == tokens
        with self._lock:
            self.requests += 1
            self.prompt += usage["prompt_tokens"]
            self.completion += ids
            self.seconds.append(seconds)

    def load(self, server: Served, requests: int, clients: int = 12) -> list[threading.Thread]:
        """Begin so many requests of 20 to 80 tokens, from several clients."""

        def client(first: int) -> None:
            for number in range(first, requests, clients):
                self.ask(server, 20 + number * 7 % 61)

        threads = [threading.Thread(target=client, args=(first,)) for first in range(clients)]
        for thread in threads:
            thread.start()
        return threads


def ended(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()


def told(server: Served, kind: str) -> float:
    """Tokens of a kind, as /metrics says."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    begin = f'penstock_usage_tokens_total{{kind="{kind}",'
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(begin))


def agree(server: Served, counted: Counted) -> None:
    for kind, count in (("completion", counted.completion), ("prompt", counted.prompt)):
        until(lambda kind=kind, count=count: told(server, kind) >= count)
        assert told(server, kind) == count
    metrics = server.settled()
    assert metrics["penstock_e2e_request_latency_seconds_count"] == counted.requests
    bounds = METRICS["e2e_request_latency_seconds"].buckets
    mean = metrics["penstock_e2e_request_latency_seconds_sum"] / counted.requests
    clients = sum(counted.seconds) / counted.requests
    assert abs(bisect_left(bounds, mean) - bisect_left(bounds, clients)) <= 1


def test_metrics_agree_with_what_a_client_counted_also_after_one_of_each_was_killed() -> None:
    server = Served(
        *("--device", "null", "--null-step-ms", "10", "--frontends", "3", "--tokenizers", "2"),
        *("--data-parallel-size", "2"),
    )
    try:
        counted = Counted()
        ended(counted.load(server, 120))
        agree(server, counted)
        for role in ("tokenizer", "scheduler", "worker"):
            threads = counted.load(server, 120)
            begun = time.monotonic()
            while server.metrics()["penstock_requests_running"] < 4:
                assert time.monotonic() < begun + 60
                time.sleep(0.02)
            victim = find(server, role)
            victim.kill()
            ended(threads)
            whole_again(server, [victim], PROCESSES, time.monotonic())
            agree(server, counted)
        victim = find(server, "frontend")  # its open requests end with it: there are none
        victim.kill()
        whole_again(server, [victim], PROCESSES, time.monotonic())
        ended(counted.load(server, 60))
        agree(server, counted)
        lost = server.metrics()["penstock_processes_lost_total"]
        assert lost >= 4
        assert server.metrics()["penstock_continuations_total"] > 0
    finally:
        server.kill()
