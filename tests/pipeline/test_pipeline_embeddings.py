"""/v1/embeddings of a whole server on the null device, whose vectors begin with the length of the
prompt and its last token."""

from __future__ import annotations

import base64
import json
import struct
import threading
import time
import urllib.request
from typing import Any

import openai
import pytest
from support.pipeline.served import VECTORS, Served, SharedServers, served

PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def server(shared_server: SharedServers) -> Served:
    return shared_server(*VECTORS)


def ask(server: Served, given: Any, **more: Any) -> tuple[int, Any]:
    return server.post(PATH, {"input": given, "normalize": False, **more})


def numbers(answer: Any) -> list[list[float]]:
    return [one["embedding"] for one in answer["data"]]


def test_texts_and_ids_become_vectors_in_their_order(server: Served) -> None:
    status, answer = ask(server, ["a", "a penstock and a weir"])
    assert status == 200, answer
    assert answer["object"] == "list" and answer["model"] == "vectors"
    assert [one["index"] for one in answer["data"]] == [0, 1]
    lengths = [vector[0] for vector in numbers(answer)]
    assert 0 < lengths[0] < lengths[1]
    assert answer["usage"] == dict.fromkeys(("prompt_tokens", "total_tokens"), sum(lengths))
    assert numbers(ask(server, [[5, 6, 7], [8]])[1]) == [[3, 7], [1, 8]]
    assert numbers(ask(server, [5, 6, 7])[1]) == [[3, 7]]


def test_inputs_of_all_lengths_in_one_request_are_answered_in_their_order(server: Served) -> None:
    lengths = [1, 2000, 3, *[7] * 70, 1500, 2, 1900, *range(1, 40)]
    status, answer = ask(server, [[5] * (length - 1) + [6] for length in lengths])
    assert status == 200, answer
    assert numbers(answer) == [[length, 6] for length in lengths]
    assert answer["usage"]["prompt_tokens"] == sum(lengths)


def test_the_input_that_is_too_long_is_named_among_many(server: Served) -> None:
    for at in (0, 31, 32, 77):
        inputs = ["a"] * 90
        inputs[at] = "water " * 3000
        status, answer = ask(server, inputs)
        assert status == 400, answer
        assert answer["error"]["message"].startswith(f"input[{at}]: the input is too long")
        assert answer["error"]["param"] == "input"


def test_base64_holds_the_same_float32(server: Served) -> None:
    _, answer = ask(server, [5, 6, 7], encoding_format="base64")
    (one,) = answer["data"]
    assert struct.unpack("<2f", base64.b64decode(one["embedding"])) == (3.0, 7.0)


def test_vectors_are_normalized_unless_the_request_says_no(server: Served) -> None:
    status, answer = server.post(PATH, {"input": [5, 6, 4]})
    assert status == 200
    assert numbers(answer) == [pytest.approx([0.6, 0.8])]


def test_inputs_are_truncated_at_their_end_where_that_is_asked_for(server: Served) -> None:
    assert numbers(ask(server, [5, 6, 7], truncate_prompt_tokens=2)[1]) == [[2, 6]]
    with urllib.request.urlopen(server.url + "/v1/models", timeout=10) as models:
        longest = json.load(models)["data"][0]["max_model_len"] - 1
    many = [5] * (longest + 10)
    status, answer = ask(server, many)
    assert (status, answer["error"]["param"]) == (400, "input")
    assert answer["error"]["message"].startswith("input is too long: it has")
    assert f"this model takes at most {longest} tokens: shorten" in answer["error"]["message"]
    assert numbers(ask(server, many, truncate_prompt_tokens=-1)[1]) == [[longest, 5]]


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"input": []}, "input", "input is empty"),
        ({"input": [""]}, "input", "input[0] is empty"),
        ({"input": [1, -1]}, "input", "-1"),
        ({"input": "a", "dimensions": 3}, "dimensions", "--allow-dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions", "0"),
        ({"input": "a", "prompt_name": "query"}, "prompt_name", "prompts are: none"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "hex"),
        ({"input": ["a"] * 2049}, "input", "2048"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "0"),
        ({"input": "a", "temperature": 1}, "temperature", "temperature"),
    ],
)
def test_what_is_wrong_is_named(server: Served, body: Any, param: str, said: str) -> None:
    status, answer = server.post(PATH, body)
    assert status == 400, answer
    assert answer["error"]["param"] == param
    assert said in answer["error"]["message"]


def test_a_model_that_generates_nothing_says_what_it_does(server: Served) -> None:
    status, answer = server.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}
    )
    assert status == 400
    assert "generates no text; it does: embed (/v1/embeddings)" in answer["error"]["message"]
    assert server.post("/v1/completions", {"prompt": "hi"})[0] == 400


def test_the_sdk_reads_as_many_inputs_as_a_request_may_have(server: Served) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    answer = client.embeddings.create(
        model="vectors", input=[[7] * (1 + index % 5) for index in range(2048)],
        extra_body={"normalize": False},
    )  # fmt: skip
    assert [one.embedding[0] for one in answer.data] == [1 + index % 5 for index in range(2048)]
    assert answer.usage.prompt_tokens == sum(1 + index % 5 for index in range(2048))


@pytest.mark.parametrize(
    "role",
    ["worker", *(pytest.param(one, marks=pytest.mark.slow) for one in ("tokenizer", "scheduler"))],
)
def test_a_batch_is_answered_though_a_process_is_killed(
    server: Served, shared_server: SharedServers, role: str
) -> None:
    inputs = [[9] * (1 + index % 7) for index in range(1000)]
    answers: list[tuple[int, Any]] = []
    asking = threading.Thread(target=lambda: answers.append(ask(server, inputs)))
    asking.start()
    while server.metrics().get("penstock_requests_running", 0) < 1 and asking.is_alive():
        time.sleep(0.01)
    (process,) = (p for p in server.processes().values() if server.role_of(p) == role)
    assert not answers
    process.kill()
    asking.join(60)
    shared_server.renewed(server)
    ((status, answer),) = answers
    assert status == 200, answer
    assert [vector[0] for vector in numbers(answer)] == [len(ids) for ids in inputs]


@pytest.mark.slow  # in the quick run one engine for vectors is lost, and two share tokens
def test_two_engines_share_the_inputs_of_a_request_and_one_goes_on_alone() -> None:
    inputs = [[9] * (1 + index % 7) for index in range(1000)]
    answers: list[tuple[int, Any]] = []
    slow = ["--device", "null", "--null-step-ms", "500", "--max-num-seqs", "64", "--task", "embed"]
    with served(*slow, "--data-parallel-size", "2") as server:
        asking = threading.Thread(target=lambda: answers.append(ask(server, inputs)))
        asking.start()
        loads = [0]
        while asking.is_alive() and not all(loads):
            with urllib.request.urlopen(server.url + "/playground/status", timeout=10) as answer:
                processes = json.load(answer)["processes"]  # as of beats, twice a second
            loads = [one["load"] for one in processes if one["service"] == "scheduler"]
        assert len(loads) == 2 and all(loads), "one engine had nothing to do"
        engines = [p for p in server.processes().values() if server.role_of(p) == "scheduler"]
        engines[0].kill()
        asking.join(60)
    ((status, answer),) = answers
    assert status == 200, answer
    assert [vector[0] for vector in numbers(answer)] == [len(ids) for ids in inputs]
