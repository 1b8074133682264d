"""/v1/rerank, /v1/score and /v1/classify of one frontend: what goes to the pipeline for a body, and
what the client gets for what comes back."""

from __future__ import annotations

import asyncio
import json
import math
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from support.frontend.frontend_scripted import STOP, Client, Script, rejected, run, waiting
from support.polling import async_until

from penstock.client import batches
from penstock.client.gateway_interface import Overloaded, ServedModel
from penstock.client.sink import RowExtras, Sink
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.wire.messages.requests import (
    Pair,
    PoolingParams,
    PromptText,
    Rejected,
    Tokens,
    Work,
)
from penstock.protocol.wire.messages.tokens import Scores
from penstock.services.frontend import generation


@pytest.fixture(autouse=True)
def batches_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each text is a request of its own on its way; for several together see
    test_frontend_batches."""
    for module in (batches, generation):
        monkeypatch.setattr(module, "BATCH_INPUTS", 1)


ASKED = {"query": "q", "documents": ["a", "bb", {"text": "ccc"}]}


def scoring(*scores: float | Sequence[float]) -> Script:
    """Each request gets the numbers of its turn, for a prompt of 3 tokens."""
    left = list(scores)

    async def script(work: Work, sink: Sink) -> None:
        given = left.pop(0)
        numbers = array("f", [given] if isinstance(given, int | float) else given)
        sink.on_accepted(3)
        sink.on_row(0, "", 0, RowExtras(end=STOP, events=[Scores(numbers.tobytes())]))

    return script


def asked(path: str, body: Any, script: Script, status: int = 200) -> tuple[Any, list[Work]]:
    """The answer, and what went to the pipeline."""
    answers: list[Any] = []

    async def use(client: Client) -> None:
        client.gateway.served = [
            ServedModel(
                "org/model", ["alias"], 64, 1000, ["score", "classify"], labels=["no", "yes"]
            )
        ]
        found, answer, _ = await client.post(path, body)
        assert found == status, answer
        answers.append(answer)

    gateway = run(use, script)
    return answers[0], gateway.works


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_come_sorted_by_their_scores_with_their_places(path: str) -> None:
    answer, works = asked(path, {**ASKED, "model": "alias"}, scoring(0.25, -1.5, 0.75))
    assert answer.pop("id").startswith("rerank-")
    assert answer == {
        "object": "list",
        "model": "alias",
        "results": [
            {"index": 2, "relevance_score": 0.75, "document": {"text": "ccc"}},
            {"index": 0, "relevance_score": 0.25, "document": {"text": "a"}},
            {"index": 1, "relevance_score": -1.5, "document": {"text": "bb"}},
        ],
        "usage": {"prompt_tokens": 9, "total_tokens": 9},
    }
    assert [work.prompt for work in works] == [Pair("q", "a"), Pair("q", "bb"), Pair("q", "ccc")]
    assert {work.head.task for work in works} == {"score"}


def test_the_best_alone_come_without_their_texts_where_that_is_asked_for() -> None:
    more = {"top_n": 1, "return_documents": False}
    answer, _ = asked("/v1/rerank", {**ASKED, **more}, scoring(1, 3, 2))
    assert answer["results"] == [{"index": 1, "relevance_score": 3.0}]
    for everything in ({"top_n": 0}, {"top_n": 9}, {"top_n": None}):
        answer, _ = asked("/v1/rerank", {**ASKED, **everything}, scoring(1, 3, 2))
        assert [one["index"] for one in answer["results"]] == [1, 2, 0]


def test_equal_scores_keep_the_order_of_the_documents_and_no_number_is_the_last() -> None:
    answer, _ = asked("/v1/rerank", ASKED, scoring(math.nan, 1, 1))
    assert [one["index"] for one in answer["results"]] == [1, 2, 0]


def test_what_is_asked_of_the_tokenizer_goes_to_it() -> None:
    more = {
        "truncate_prompt_tokens": 7,
        "max_tokens_per_doc": 5,
        "use_activation": False,
        "prompt_name": "web",
        "user": "ann",
        "priority": 2,
    }
    _, works = asked("/v1/rerank", {**ASKED, **more}, scoring(1, 2, 3))
    for work in works:
        assert work.params == SamplingParams(truncate_prompt_tokens=7)
        assert work.pooling == PoolingParams(activation=False, prompt_name="web", document_tokens=5)
        assert (work.head.priority, work.head.siblings) == (2, 3)
    _, works = asked("/v1/rerank", {**ASKED, "max_tokens_per_doc": 0}, scoring(1, 2, 3))
    assert works[0].pooling == PoolingParams()


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_one_text_is_scored_beside_many_or_each_beside_its_own(
    names: tuple[str, str], path: str
) -> None:
    first, second = names
    for given, other, pairs in (
        ("a", "x", [Pair("a", "x")]),
        ("a", ["x", "y"], [Pair("a", "x"), Pair("a", "y")]),
        (["a"], ["x", "y"], [Pair("a", "x"), Pair("a", "y")]),
        (["a", "b"], ["x", "y"], [Pair("a", "x"), Pair("b", "y")]),
    ):
        scores = [0.5, -0.25][: len(pairs)]
        answer, works = asked(path, {first: given, second: other}, scoring(*scores))
        assert [work.prompt for work in works] == pairs
        assert answer["data"] == [
            {"index": index, "object": "score", "score": score}
            for index, score in enumerate(scores)
        ]
        assert answer["object"] == "list" and answer["model"] == "org/model"
        assert answer["id"].startswith("score-") and answer["created"] > 1e9
        assert answer["usage"] == dict.fromkeys(("prompt_tokens", "total_tokens"), 3 * len(pairs))


def test_texts_are_ranked_as_text_embeddings_inference_has_it() -> None:
    given = {"query": "q", "texts": ["a", "bb", "ccc"]}
    answer, works = asked("/rerank", given, scoring(0.25, -1.5, 0.75))
    assert answer == [
        {"index": 2, "score": 0.75}, {"index": 0, "score": 0.25}, {"index": 1, "score": -1.5},
    ]  # fmt: skip
    assert [work.prompt for work in works] == [Pair("q", "a"), Pair("q", "bb"), Pair("q", "ccc")]
    more = {"raw_scores": True, "return_text": True, "truncate": True}
    answer, works = asked("/rerank", {**given, **more}, scoring(1, 3, 2))
    assert answer[0] == {"index": 1, "score": 3.0, "text": "bb"}
    assert works[0].pooling == PoolingParams(activation=False)
    assert works[0].params.truncate_prompt_tokens == 2**31
    harmless = {"raw_scores": False, "return_text": False, "truncation_direction": "Right"}
    _, works = asked("/rerank", {**given, **harmless}, scoring(1, 3, 2))
    assert works[0].pooling == PoolingParams(activation=True)


@pytest.mark.parametrize("path", ["/v1/classify", "/classify"])
def test_each_text_gets_its_likeliest_label_and_the_shares_of_all(path: str) -> None:
    answer, works = asked(path, {"input": ["a", "b"]}, scoring([0.25, 0.75], [0.5, 0.125]))
    assert answer.pop("id").startswith("classify-") and answer.pop("created") > 1e9
    assert answer == {
        "object": "list",
        "model": "org/model",
        "data": [
            {"index": 0, "label": "yes", "probs": [0.25, 0.75], "num_classes": 2},
            {"index": 1, "label": "no", "probs": [0.5, 0.125], "num_classes": 2},
        ],
        "usage": {"prompt_tokens": 6, "total_tokens": 6},
    }
    assert [work.prompt for work in works] == [PromptText("a"), PromptText("b")]
    assert {work.head.task for work in works} == {"classify"}


def test_token_ids_are_classified_as_they_are_and_labels_without_a_name_have_a_number() -> None:
    body = {"input": [[1, 2], [3]], "use_activation": False}
    answer, works = asked("/v1/classify", body, scoring([0, 1, 2], [1, 0, 0]))
    assert [work.prompt for work in works] == [
        Tokens(array("i", ids).tobytes()) for ids in body["input"]
    ]
    assert [one["label"] for one in answer["data"]] == ["LABEL_2", "no"]
    assert works[0].pooling == PoolingParams(activation=False)


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        ("/v1/rerank", {"query": "q"}, "documents", "documents is missing"),
        ("/v1/rerank", {"documents": ["a"]}, "query", "query is missing"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query", "query"),
        ("/v1/rerank", {"query": "q", "documents": []}, "documents", "documents"),
        ("/v1/rerank", {"query": "q", "documents": ["a", ""]}, "documents", "documents[1]"),
        ("/v1/rerank", {"query": "q", "documents": ["a", 5]}, "documents", "documents[1] is 5"),
        ("/v1/rerank", {"query": "q", "documents": [{"title": "a"}]}, "documents", "title"),
        ("/v1/rerank", {"query": "q", "documents": ["a"] * 2049}, "documents", "2048"),
        ("/v1/rerank", {**ASKED, "top_n": -1}, "top_n", "top_n is -1"),
        ("/v1/rerank", {**ASKED, "top_k": 3}, "top_k", "use top_n"),
        ("/v1/rerank", {"query": "q", "texts": ["a"]}, "texts", "use documents"),
        ("/v1/rerank", {**ASKED, "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1"),
        ("/v1/rerank", {**ASKED, "max_tokens_per_doc": -1}, "max_tokens_per_doc", "-1"),
        ("/rerank", {"query": "q"}, "documents", "documents is missing; it is needed, or texts"),
        ("/rerank", {**ASKED, "texts": ["a"]}, "texts", "documents and texts do not go together"),
        ("/rerank", {**ASKED, "raw_scores": True}, "raw_scores", "do not go together"),
        ("/rerank", {"query": "q", "texts": ["a"], "top_n": 1}, "top_n", "texts and top_n"),
        ("/rerank", {"query": "q", "texts": ["a", ""]}, "texts", "texts[1]"),
        ("/v1/score", {}, "text_1", "text_1 is missing; text_1 and text_2, or queries"),
        ("/v1/score", {"text_1": "a"}, "text_2", "text_2 is missing"),
        ("/v1/score", {"documents": "a"}, "queries", "queries is missing"),
        ("/v1/score", {"queries": "a"}, "documents", "documents is missing"),
        ("/v1/score", {"text_1": "a", "documents": "b"}, "documents", "do not go together"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": "c"}, "text_1", "2 texts and text_2 1"),
        ("/v1/score", {"text_1": "a", "text_2": ["b", ""]}, "text_2", "text_2[1]"),
        ("/v1/score", {"data_1": "a", "data_2": "b"}, "data_1", "text_1"),
        ("/v1/classify", {"input": []}, "input", "input is empty"),
        ("/v1/classify", {"input": ["a"] * 2049}, "input", "holds 2049 inputs; at most 2048"),
        ("/v1/classify", {"input": ["a", 5]}, "input", "input[1] is 5 among inputs"),
        ("/v1/classify", {"input": "a", "softmax": True}, "softmax", "use_activation"),
        ("/v1/classify", {"input": "a", "model": "other"}, "model", "'other' does not exist"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_asked(
    path: str, body: Any, param: str, said: str
) -> None:
    status = 404 if param == "model" else 400
    answer, works = asked(path, body, waiting, status)
    assert works == []
    assert answer["error"]["param"] == param
    assert said in answer["error"]["message"]


def test_a_long_query_goes_beside_few_documents_alone() -> None:
    """It is sent with each of those that are open at once."""
    query = "q" * 200_000
    answer, works = asked("/v1/rerank", {"query": query, "documents": ["a"] * 200}, waiting, 400)
    assert works == [] and answer["error"]["param"] == "query"
    assert (
        "query has 200000 characters; beside 200 texts at most 131072"
        in (answer["error"]["message"])
    )
    answer, _ = asked("/v1/rerank", {"query": query, "documents": ["a"] * 2}, scoring(1, 2))
    assert [one["index"] for one in answer["results"]] == [1, 0]


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        ("/v1/rerank", ASKED, "documents", "documents[1]: the input is too long"),
        ("/v1/score", {"text_1": "a", "text_2": ["b"] * 3}, "text_2", "text_2[1]: the input"),
        ("/v1/classify", {"input": ["a", "b", "c"]}, "input", "input[1]: the input is too long"),
        ("/v1/embeddings", {"input": ["a", "b", "c"]}, "input", "input[1]: the input is too long"),
        ("/v1/classify", {"input": "a"}, "input", "the input is too long"),
    ],
)
def test_the_text_that_a_tokenizer_refuses_is_named(
    path: str, body: Any, param: str, said: str
) -> None:
    turns: list[int] = []

    async def script(work: Work, sink: Sink) -> None:
        turns.append(len(turns))
        if turns[-1] == 1 or work.head.siblings == 1:
            sink.on_rejected(rejected(400, "the input is too long", param="input"))

    answer, _ = asked(path, body, script, 400)
    assert answer["error"]["message"].startswith(said)
    assert answer["error"]["param"] == param


def test_a_client_that_leaves_frees_all_of_its_pairs() -> None:
    async def use(client: Client) -> None:
        body = json.dumps({"query": "q", "documents": ["a"] * 300})
        reading = asyncio.ensure_future(client.session.post(client.url + "/v1/rerank", data=body))
        await async_until(lambda: len(client.gateway.works) >= 32)
        for _ in range(3):  # in whose turns no more than it may are opened
            await client.get("/live")
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await client.gateway.cancel_seen.wait()
        opened = len(client.gateway.works)
        assert 32 <= opened <= 128
        assert sorted(client.gateway.cancelled) == list(range(1, opened + 1))

    run(use, waiting)


def test_a_deadline_ends_all_of_a_request() -> None:
    answer, _ = asked("/v1/rerank", {**ASKED, "deadline_s": 0.1}, waiting, 504)
    assert "0.1 s; its deadline_s" in answer["error"]["message"]


@pytest.mark.parametrize("refused_at", [0, 2])
def test_a_batch_that_was_let_in_waits_for_room_for_the_rest(refused_at: int) -> None:
    full = Rejected(0, 0, 503, "overloaded_error", "the queue is full", retry_after=0.01)
    refusals: list[int] = []

    async def use(client: Client) -> None:
        client.gateway.served = [ServedModel("org/model", [], 64, 1000, ["score"])]
        opened = client.gateway.open

        def open_or_refuse(work: Work, sink: Sink) -> int:
            if len(client.gateway.works) == refused_at and len(refusals) < 3:
                refusals.append(refused_at)
                raise Overloaded(full)
            return opened(work, sink)

        client.gateway.open = open_or_refuse  # type: ignore[method-assign]
        status, answer, _ = await client.post("/v1/rerank", ASKED)
        assert status == (200 if refused_at else 503), answer
        if refused_at:
            assert [one["index"] for one in answer["results"]] == [2, 0, 1]

    registry = run(use, scoring(0.25, -1.5, 0.75)).registry
    assert len(refusals) == (3 if refused_at else 1)
    shed = registry.counter("requests_shed_total", "pipeline").value
    assert shed == (0 if refused_at else 1), "what is tried again was not refused"


@pytest.mark.parametrize("refused", ["a", "ccc"])
def test_a_pair_that_finds_no_room_at_an_engine_is_asked_for_again_once_others_were_taken(
    refused: str,
) -> None:
    full = Rejected(0, 0, 503, "overloaded_error", "the queue is full", retry_after=0.01)
    tries: list[str] = []
    scores = {"a": 0.25, "bb": -1.5, "ccc": 0.75}

    async def script(work: Work, sink: Sink) -> None:
        assert isinstance(work.prompt, Pair)
        tries.append(work.prompt.other)
        if work.prompt.other == refused:
            await asyncio.sleep(0.05)
            if tries.count(refused) < 4:
                sink.on_rejected(full)
                return
        sink.on_accepted(3)
        numbers = array("f", [scores[work.prompt.other]])
        sink.on_row(0, "", 0, RowExtras(end=STOP, events=[Scores(numbers.tobytes())]))

    answer, _ = asked("/v1/rerank", ASKED, script)
    assert [one["index"] for one in answer["results"]] == [2, 0, 1]
    assert answer["usage"]["prompt_tokens"] == 9
    assert sorted(tries) == sorted(["a", "bb", "ccc"] + [refused] * 3)


def test_a_batch_of_which_no_engine_took_anything_is_refused_at_once() -> None:
    full = Rejected(0, 0, 503, "overloaded_error", "the queue is full", retry_after=7.0)
    tries: list[Work] = []

    async def script(work: Work, sink: Sink) -> None:
        tries.append(work)
        if len(tries) == 3:
            sink.on_rejected(full)
        await asyncio.sleep(60)

    async def use(client: Client) -> None:
        client.gateway.served = [ServedModel("org/model", [], 64, 1000, ["score"])]
        status, answer, response = await client.post("/v1/rerank", ASKED)
        assert (status, answer["error"]["message"]) == (503, "the queue is full")
        assert response.headers["Retry-After"] == "7"
        assert len(client.gateway.cancelled) == 3

    run(use, script)
    assert len(tries) == 3


def test_a_batch_ends_with_a_frontend_that_goes_down() -> None:
    down = Rejected(0, 0, 503, "overloaded_error", "the server is shutting down", retry_after=1.0)

    async def use(client: Client) -> None:
        client.gateway.served = [ServedModel("org/model", [], 64, 1000, ["score"])]

        async def script(work: Work, sink: Sink) -> None:
            if len(client.gateway.works) == 1:
                sink.on_accepted(3)
                return
            client.gateway.is_closed = True
            sink.on_rejected(down)

        client.gateway.script = script
        status, answer, _ = await client.post("/v1/rerank", ASKED)
        assert (status, answer["error"]["message"]) == (503, "the server is shutting down")

    run(use, waiting)
