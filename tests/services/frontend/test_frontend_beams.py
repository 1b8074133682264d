"""A beam search between its client and the pipeline: refused steps, and clients that go."""

from __future__ import annotations

import asyncio
import socket
import struct
import tracemalloc
from array import array
from typing import Any

import pytest
from support.frontend.frontend_scripted import LENGTH, STOP, Client, rejected, run

from penstock.client.beam_search import Beam, BeamSearchParams
from penstock.client.sink import RowExtras, Sink
from penstock.protocol.logprobs import NamedLogprobs
from penstock.protocol.tasks import DETOKENIZE
from penstock.protocol.wire.messages.requests import Tokens, Work
from penstock.protocol.wire.messages.tokens import RowDetails, RowStart, Text
from penstock.services.frontend.beam_answers import PromptSearch

PATH = "/v1/completions"
BODY = {"prompt": "x", "use_beam_search": True, "n": 2, "max_tokens": 3, "return_token_ids": True}
PROMPT = array("i", [7, 8]).tobytes()


async def step(work: Work, sink: Sink) -> None:
    """The likeliest tokens are 1, 2, 3, 4 wherever they are asked for; a text is its tokens."""
    sink.on_accepted(2)
    if work.head.task == DETOKENIZE:
        assert isinstance(work.prompt, Tokens)
        text = " ".join(map(str, array("i", work.prompt.ids)))
        sink.on_row(0, "", 0, RowExtras(end=STOP, events=[Text(text)]))
        return
    most = work.params.logprobs or 0
    tops = [*range(1, most + 1)], [-float(place) for place in range(1, most + 1)]
    entry = struct.pack(f"<iif{most}i{most}f", 1, 1, -1.0, *tops[0], *tops[1])
    details = RowDetails(0, NamedLogprobs(most, entry, [b"x"] * (1 + most), [0]))
    sink.on_row(0, "x", 1, RowExtras(RowStart(0, 1, 0.01), LENGTH, details, prompt=PROMPT))


def choices(answer: dict[str, Any]) -> list[tuple[str, list[int], str]]:
    return [(one["text"], one["token_ids"], one["finish_reason"]) for one in answer["choices"]]


def test_answers_are_ranked_and_counted_and_end_tokens_are_no_text() -> None:
    async def use(client: Client) -> None:
        client.gateway.served[0].ends.append(2)
        status, answer, _ = await client.post(PATH, BODY)
        assert status == 200, answer
        assert choices(answer) == [("1 1 1", [1, 1, 1], "length"), ("1 1", [1, 1, 2], "stop")]
        usage = answer["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2, 1 + 2 + 2)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 1
        _, text, _ = await client.get("/metrics")
        assert b'requests_finished_total{reason="stop"} 1.0\n' in text
        assert client.gateway.cancelled == []

    run(use, step)


@pytest.mark.parametrize("refused", [429, 503])
def test_a_step_that_finds_the_server_full_asks_again_and_the_first_one_does_not(
    refused: int,
) -> None:
    asked = 0

    async def script(work: Work, sink: Sink) -> None:
        nonlocal asked
        asked += 1
        if asked == 2:
            sink.on_rejected(rejected(refused, retry_after=0.01))
            return
        await step(work, sink)

    async def use(client: Client) -> None:
        status, answer, _ = await client.post(PATH, BODY)
        assert status == 200 and len(choices(answer)) == 2
        client.gateway.overloaded = rejected(refused, "full")
        status, answer, _ = await client.post(PATH, BODY)
        assert (status, answer["error"]["message"]) == (refused, "full")

    run(use, script)


def test_another_error_of_a_step_ends_the_search() -> None:
    async def script(work: Work, sink: Sink) -> None:
        if isinstance(work.prompt, Tokens):
            sink.on_rejected(rejected(400, "no such token"))
            return
        await step(work, sink)

    async def use(client: Client) -> None:
        status, answer, _ = await client.post(PATH, BODY)
        assert (status, answer["error"]["message"]) == (400, "no such token")

    run(use, script)


def test_a_client_that_leaves_ends_the_steps_that_are_under_way() -> None:
    async def script(work: Work, sink: Sink) -> None:
        if isinstance(work.prompt, Tokens):
            sink.on_accepted(3)
            await asyncio.sleep(60)
        await step(work, sink)

    async def use(client: Client) -> None:
        loop = asyncio.get_running_loop()
        sock = socket.create_connection(("127.0.0.1", client.port))
        sock.setblocking(False)
        body = b'{"prompt": "x", "use_beam_search": true, "n": 2, "max_tokens": 3}'
        head = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        await loop.sock_sendall(sock, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        while len(client.gateway.works) < 3:
            await asyncio.sleep(0.01)
        sock.close()
        while len(client.gateway.cancelled) < 2:
            await asyncio.sleep(0.01)
        assert sorted(client.gateway.cancelled) == [2, 3]

    run(use, script)


def test_a_prompt_behind_which_the_answers_do_not_fit_is_refused() -> None:
    async def use(client: Client) -> None:
        status, answer, _ = await client.post(PATH, {**BODY, "max_tokens": 63})
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded"

    run(use, step)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"include_reasoning": False}, "include_reasoning"),
        ({"thinking_token_budget": 0}, "thinking_token_budget"),
        ({"thinking_token_budget": 8}, "thinking_token_budget"),
    ],
)
def test_a_chat_whose_thinking_a_search_would_show_or_not_end_is_refused(
    more: dict[str, Any], named: str
) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}

    async def use(client: Client) -> None:
        body = {**chat, "use_beam_search": True, **more}
        status, answer, _ = await client.post("/v1/chat/completions", body)
        assert (status, answer["error"]["param"]) == (400, named)
        assert "use_beam_search" in answer["error"]["message"]
        assert client.gateway.works == []

    run(use, step)


def test_a_long_prompt_is_copied_for_a_step_and_never_listed() -> None:
    prompt, beams = array("i", range(100_000)).tobytes(), 4
    params = BeamSearchParams(beam_width=beams)
    search = PromptSearch(prompt, params, frozenset())
    search.running = [Beam((token,)) for token in range(beams)]
    tracemalloc.start()
    try:
        asked = search.prompts()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [one.ids for one in asked if isinstance(one, Tokens)] == [
        prompt + array("i", [token]).tobytes() for token in range(beams)
    ]
    assert peak < (beams + 1) * len(prompt)
