"""/v1/rerank, /v1/score and /v1/classify of a whole server on the null device, whose logits follow
from the length of the prompt."""

from __future__ import annotations

import json
import math
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.pipeline.restarted_engine import LATE, all_wait
from support.pipeline.served import Served, served
from support.polling import until

DEMO = Path(__file__).resolve().parents[2] / "demo/model"
LABELS = {"ranker": ["relevant"], "labels": ["calm", "rising", "flood"]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A classifier with one label, which scores too, and one with several."""
    folders = []
    for name, labels in LABELS.items():
        folder = tmp_path_factory.mktemp("models") / name
        shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        config = json.loads((folder / "config.json").read_text())
        config["architectures"] = ["Qwen3ForSequenceClassification"]
        config["id2label"] = {str(number): label for number, label in enumerate(labels)}
        (folder / "config.json").write_text(json.dumps(config))
        folders.append(str(folder))
    flags = ["--device", "null", "--null-step-ms", "80", "--max-num-seqs", "32"]
    with served(*folders, *flags, *LATE) as found:
        yield found


def rerank(server: Served, documents: list[Any], **more: Any) -> tuple[int, Any]:
    body = {"model": "ranker", "query": "What is a weir?", "documents": documents}
    return server.post("/v1/rerank", {**body, **more})


def score_of(tokens: int) -> float:
    """Of a prompt with so many tokens: the null device's logit behind a sigmoid."""
    return 1 / (1 + math.exp(-math.cos(tokens)))


def test_documents_are_ranked_by_what_the_model_says_of_each_pair(server: Served) -> None:
    documents = ["a weir", {"text": "a penstock, a weir and a sluice"}, "water " * 7]
    tokens = [rerank(server, [one])[1]["usage"]["prompt_tokens"] for one in documents]
    assert len(set(tokens)) == 3
    status, answer = rerank(server, documents)
    assert status == 200, answer
    assert answer["usage"]["prompt_tokens"] == sum(tokens)
    results = answer["results"]
    assert [one["index"] for one in results] == sorted(range(3), key=lambda i: -score_of(tokens[i]))
    for one in results:
        assert one["relevance_score"] == pytest.approx(score_of(tokens[one["index"]]), abs=1e-6)
        given = documents[one["index"]]
        assert one["document"] == (given if isinstance(given, dict) else {"text": given})


def test_logits_come_where_no_activation_is_wanted(server: Served) -> None:
    _, answer = rerank(server, ["a weir"], use_activation=False)
    (one,), tokens = answer["results"], answer["usage"]["prompt_tokens"]
    assert one["relevance_score"] == pytest.approx(math.cos(tokens), abs=1e-6)


def test_documents_are_cut_alone_or_with_the_query(server: Served) -> None:
    def tokens(document: str, **more: Any) -> int:
        found: int = rerank(server, [document], **more)[1]["usage"]["prompt_tokens"]
        return found

    cut = [tokens("water " * 50, max_tokens_per_doc=number) for number in (3, 8, 900)]
    assert cut[1] - cut[0] == 5
    assert cut[1] < cut[2] == tokens("water " * 50)
    assert tokens("water " * 50, truncate_prompt_tokens=9) == 9
    long = "water " * 5000
    status, answer = rerank(server, ["water", long])
    assert status == 400 and answer["error"]["param"] == "documents"
    assert "documents[1]: the input is too long" in answer["error"]["message"]
    assert "truncate_prompt_tokens" in answer["error"]["message"]
    assert tokens(long, truncate_prompt_tokens=-1) == 2047


def test_pairs_are_scored_in_their_order(server: Served) -> None:
    for body, pairs in (
        ({"text_1": "a", "text_2": ["a", "a b c d"]}, 2),
        ({"queries": ["a", "b"], "documents": ["a b c d e", "a"]}, 2),
    ):
        status, answer = server.post("/v1/score", {"model": "ranker", **body})
        assert status == 200, answer
        assert [one["index"] for one in answer["data"]] == list(range(pairs))
        first, second = [one["score"] for one in answer["data"]]
        assert first != second


def test_texts_get_labels(server: Served) -> None:
    status, answer = server.post("/v1/classify", {"model": "labels", "input": [[5] * 6, [5, 7]]})
    assert status == 200, answer
    for one, tokens in zip(answer["data"], (6, 2), strict=True):
        powers = [math.exp(math.cos(tokens + number)) for number in range(3)]
        shares = [power / sum(powers) for power in powers]
        assert one["probs"] == pytest.approx(shares, abs=1e-6)
        assert one["label"] == LABELS["labels"][shares.index(max(shares))]
        assert one["num_classes"] == 3
    assert answer["usage"] == {"prompt_tokens": 8, "total_tokens": 8}


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (
            "/v1/rerank",
            {"model": "labels", "query": "a", "documents": ["b"]},
            "'labels' does not do the task 'score'; it does: classify (/v1/classify)",
        ),
        (
            "/v1/embeddings",
            {"model": "ranker", "input": "a"},
            "'embed'; it does: score (/v1/rerank, /v1/score), classify (/v1/classify)",
        ),
        (
            "/v1/completions",
            {"model": "ranker", "prompt": "a"},
            "generates no text; it does: score",
        ),
    ],
)
def test_a_model_that_does_something_else_says_what(
    server: Served, path: str, body: Any, said: str
) -> None:
    status, answer = server.post(path, body)
    assert (status, answer["error"]["param"]) == (400, "model")
    assert said in answer["error"]["message"]


def test_whatever_is_asked_while_the_engine_is_started_again_waits_for_it(server: Served) -> None:
    requests: list[tuple[str, dict[str, Any]]] = [
        ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/classify", {"input": "a"}),
    ]
    all_wait(server, requests, model="ranker")


def test_a_client_that_leaves_frees_everything(server: Served) -> None:
    body = {"model": "ranker", "query": "a", "documents": ["b " * 20] * 1000}
    sent = json.dumps(body).encode()
    host, _, port = server.url.removeprefix("http://").partition(":")
    head = f"POST /v1/rerank HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"{head}Content-Length: {len(sent)}\r\n\r\n".encode() + sent)
        wait_until_it_runs(server)
    metrics = server.settled()
    for name in ("requests_running", "requests_waiting", "kv_blocks_used"):
        assert metrics.get(f"penstock_{name}", 0.0) == 0.0


@pytest.mark.parametrize(
    "role",
    ["tokenizer", *(pytest.param(one, marks=pytest.mark.slow) for one in ("worker", "scheduler"))],
)
def test_a_ranking_is_the_same_though_processes_are_killed(server: Served, role: str) -> None:
    documents = ["b " * (1 + index % 7) for index in range(500)]
    answers: list[tuple[int, Any]] = []
    asking = threading.Thread(target=lambda: answers.append(rerank(server, documents)))
    asking.start()
    wait_until_it_runs(server)
    assert not answers
    for process in server.processes().values():
        if server.role_of(process) == role:
            process.kill()
    asking.join(60)
    ((status, answer),) = answers
    assert status == 200, answer
    assert sorted(one["index"] for one in answer["results"]) == list(range(500))
    scores = [one["relevance_score"] for one in answer["results"]]
    assert scores == sorted(scores, reverse=True) and len(set(scores)) == 7


def wait_until_it_runs(server: Served) -> None:
    until(lambda: server.metrics().get("penstock_requests_running", 0) >= 1, 30)
