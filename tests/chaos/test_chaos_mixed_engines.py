"""Two engines of one model, of which one generates and the other makes vectors."""

from __future__ import annotations

import concurrent.futures
import json
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.chaos.by_hand import PATIENCE, ByHand
from support.polling import until

pytestmark = pytest.mark.timeout(300)
BUILT_IN = Path(__file__).parents[2] / "demo/model"
VECTORS = ("--engine", "1", "--task", "embed")


@pytest.fixture(scope="module")
def cluster() -> Iterator[ByHand]:
    running = ByHand(device="null", model=str(BUILT_IN), served_model_name="both")
    try:
        running.start_all()
        for service in ("scheduler", "worker"):
            running.members[f"{service} 1"] = running.start(service, *VECTORS)
        until(lambda: embedded(running)[0] == 200, PATIENCE, told=lambda: running.output)
        yield running
    finally:
        running.close()


def post(cluster: ByHand, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    request = urllib.request.Request(
        f"{cluster.url}{path}",
        json.dumps({"model": "both", **body}).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def held_at_the_router(cluster: ByHand) -> float:
    with urllib.request.urlopen(f"{cluster.url}/metrics", timeout=PATIENCE) as answer:
        lines = answer.read().decode().splitlines()
    begin = 'penstock_queue_depth{hop="router"'
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(begin))


def embedded(cluster: ByHand) -> tuple[int, Any]:
    return post(cluster, "/v1/embeddings", {"input": [[5, 6, 7]], "normalize": False})


def completed(cluster: ByHand) -> tuple[int, Any]:
    return post(cluster, "/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 3})


def test_each_request_gets_to_the_engine_that_does_its_task(cluster: ByHand) -> None:
    for _ in range(6):  # neither by turns nor by load
        status, answer = embedded(cluster)
        assert status == 200 and answer["data"][0]["embedding"] == [3.0, 7.0], answer
        status, answer = completed(cluster)
        assert status == 200 and answer["usage"]["completion_tokens"] == 3, answer
    status, answer = post(cluster, "/v1/score", {"text_1": "a", "text_2": "b"})
    assert status == 400 and "generate, embed" in answer["error"]["message"], answer
    assert cluster.lost() == []
    assert not any("step failed" in line for one in cluster.processes for line in one.lines)


def test_vectors_wait_for_their_engine_and_tokens_do_not(cluster: ByHand) -> None:
    for name in ("scheduler 1", "worker 1"):
        cluster.members[name].send(signal.SIGKILL)
        cluster.members[name].process.wait(60)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(embedded, cluster)
        until(lambda: held_at_the_router(cluster) == 1)
        assert completed(cluster)[0] == 200
        assert not waiting.done(), waiting.result()
        for service in ("scheduler", "worker"):
            cluster.members[f"{service} 1"] = cluster.start(service, *VECTORS)
        status, answer = waiting.result(PATIENCE)
    assert status == 200 and answer["data"][0]["embedding"] == [3.0, 7.0], answer
