"""The inputs of a request travel in batches: what of a request is one on its way through the
pipeline, and what its client hears of it."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import pytest
from support.frontend.frontend_scripted import STOP, Client, Script, rejected, run

from penstock.client.batches import BATCH_INPUTS, BATCH_TOKENS
from penstock.client.gateway_interface import Overloaded, ServedModel
from penstock.client.sink import RowExtras, Sink
from penstock.protocol.wire.messages.requests import (
    Inputs,
    Pair,
    PromptText,
    Rejected,
    Tokens,
    Work,
    prompts_of,
)
from penstock.protocol.wire.messages.tokens import RowStart, Scores, Vector
from penstock.services.frontend.pooling_request import OPEN_INPUTS

PATH = "/v1/embeddings"
FULL = Rejected(0, 0, 503, "overloaded_error", "the queue is full", retry_after=0.01)


def length_of(prompt: Any) -> int:
    if isinstance(prompt, Tokens):
        return len(prompt.ids) // 4
    return len(prompt.text if isinstance(prompt, PromptText) else prompt.other)


def bring(work: Work, sink: Sink, *choices: int) -> None:
    """What the model makes of these choices: the length of their prompts."""
    for choice in choices:
        values = array("f", [length_of(prompts_of(work)[choice])]).tobytes()
        event = Scores(values) if work.head.task == "score" else Vector(values)
        sink.on_row(choice, "", 0, RowExtras(RowStart(0, 1, 0.5), STOP, events=[event]))


async def measure(work: Work, sink: Sink) -> None:
    sink.on_accepted(2 * len(work.choices))
    bring(work, sink, *reversed(range(len(work.choices))))


def asked(body: Any, script: Script = measure, status: int = 200, path: str = PATH) -> Any:
    """The answer, and what went to the pipeline."""
    found: list[Any] = []

    async def use(client: Client) -> None:
        client.gateway.served = [ServedModel("org/model", [], 64, 1000, ["embed", "score"])]
        code, answer, _ = await client.post(path, body)
        assert code == status, answer
        found.extend([answer, client.gateway.works])

    run(use, script)
    return found


def sizes(works: list[Work]) -> list[int]:
    return [len(prompts_of(work)) for work in works]


def test_a_request_of_many_texts_is_a_few_batches_and_one_answer() -> None:
    texts = ["a" * (1 + number % 9) for number in range(2 * BATCH_INPUTS + 6)]
    answer, works = asked({"input": texts})
    assert [one["embedding"] for one in answer["data"]] == [[len(text)] for text in texts]
    assert answer["usage"]["prompt_tokens"] == 2 * len(texts)
    assert sizes(works) == [BATCH_INPUTS, BATCH_INPUTS, 6]
    for work in works:
        assert isinstance(work.prompt, Inputs)
        assert [one.choice for one in work.choices] == list(range(len(work.prompt.prompts)))
        assert (work.head.siblings, work.head.prompt_kind) == (len(texts), "text")


def test_one_input_is_no_batch() -> None:
    _, works = asked({"input": ["a"]})
    assert [work.prompt for work in works] == [PromptText("a")]


def test_pairs_and_ids_are_batched_as_texts_are() -> None:
    answer, works = asked({"input": [[5, 6], [7]]})
    assert [one["embedding"] for one in answer["data"]] == [[2], [1]]
    assert works[0].prompt == Inputs([Tokens(array("i", ids).tobytes()) for ids in ([5, 6], [7])])
    answer, works = asked({"query": "q", "documents": ["a", "bb"]}, path="/v1/rerank")
    assert [one["index"] for one in answer["results"]] == [1, 0]
    assert [work.prompt for work in works] == [Inputs([Pair("q", "a"), Pair("q", "bb")])]


def test_long_inputs_go_alone_so_that_engines_share_them() -> None:
    long = "a" * 4 * BATCH_TOKENS
    answer, works = asked({"input": ["b", "c", long, long, "d", "e"]})
    assert len(answer["data"]) == 6
    assert sizes(works) == [2, 1, 1, 2]
    half = "a" * 2 * BATCH_TOKENS
    _, works = asked({"input": [half, half, half]})
    assert sizes(works) == [1, 1, 1]


def test_the_input_that_is_refused_is_named_by_its_place_in_the_body() -> None:
    async def script(work: Work, sink: Sink) -> None:
        if len(work.choices) < BATCH_INPUTS:
            sink.on_rejected(rejected(400, "the input is too long", param="input", choice=5))

    answer, _ = asked({"input": ["a"] * (BATCH_INPUTS + 9)}, script, 400)
    assert answer["error"]["message"] == f"input[{BATCH_INPUTS + 5}]: the input is too long"
    assert answer["error"]["param"] == "input"


def test_the_next_batch_goes_when_the_window_has_room_for_a_whole_one() -> None:
    sinks: list[tuple[Work, Sink]] = []

    async def hold(work: Work, sink: Sink) -> None:
        sink.on_accepted(1)
        sinks.append((work, sink))

    async def use(client: Client) -> None:
        client.gateway.served = [ServedModel("org/model", [], 64, 1000, ["embed"])]
        count = OPEN_INPUTS + BATCH_INPUTS + 1
        asking = asyncio.create_task(client.post(PATH, {"input": ["a"] * count}))

        async def opened(batches: int) -> list[int]:
            deadline = asyncio.get_running_loop().time() + 30
            while len(sinks) < batches and asyncio.get_running_loop().time() < deadline:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            return sizes([work for work, _ in sinks])

        full = [BATCH_INPUTS] * (OPEN_INPUTS // BATCH_INPUTS)
        assert await opened(len(full)) == full
        bring(*sinks[0], *range(BATCH_INPUTS - 1))
        assert await opened(len(full)) == full
        bring(*sinks[0], BATCH_INPUTS - 1)
        assert await opened(len(full) + 1) == [*full, BATCH_INPUTS]
        bring(*sinks[1], 0)  # the last input is no whole batch, and waits for no more
        assert await opened(len(full) + 2) == [*full, BATCH_INPUTS, 1]
        bring(*sinks[1], *range(1, BATCH_INPUTS))
        for work, sink in sinks[2:]:
            bring(work, sink, *range(len(work.choices)))
        status, answer, _ = await asking
        assert (status, len(answer["data"])) == (200, count)

    run(use, hold)


@pytest.mark.parametrize("by", ["frontend", "engine"])
def test_a_batch_that_finds_no_room_is_asked_for_again_whole_once_others_were_taken(
    by: str,
) -> None:
    refused: list[Work] = []
    kept: list[Work] = []

    async def script(work: Work, sink: Sink) -> None:
        if by == "engine" and len(work.choices) < BATCH_INPUTS and len(refused) < 3:
            await asyncio.sleep(0.05)
            refused.append(work)
            sink.on_rejected(FULL)
            return
        kept.append(work)
        await measure(work, sink)

    async def use(client: Client) -> None:
        client.gateway.served = [ServedModel("org/model", [], 64, 1000, ["embed"])]
        opened = client.gateway.open

        def open_or_refuse(work: Work, sink: Sink) -> int:
            if by == "frontend" and len(work.choices) < BATCH_INPUTS and len(refused) < 3:
                refused.append(work)
                raise Overloaded(FULL)
            return opened(work, sink)

        client.gateway.open = open_or_refuse  # type: ignore[method-assign]
        texts = ["a" * (1 + number % 9) for number in range(BATCH_INPUTS + 4)]
        status, answer, _ = await client.post(PATH, {"input": texts})
        assert status == 200, answer
        assert [one["embedding"] for one in answer["data"]] == [[len(text)] for text in texts]

    run(use, script)
    assert sizes(refused) == [4] * 3
    assert sizes(kept) == [BATCH_INPUTS, 4]
