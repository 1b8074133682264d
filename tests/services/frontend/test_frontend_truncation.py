"""``truncation: "auto"`` of the Responses API: what a conversation that is too long loses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.frontend.frontend_scripted import MAX_MODEL_LEN, STOP, Client, Script, run, say

from penstock.client.sink import RowExtras, Sink
from penstock.protocol.tasks import TOKENIZE
from penstock.protocol.wire.messages.requests import Chat, Work
from penstock.protocol.wire.messages.tokens import TokenIds
from penstock.services.frontend.dialects.responses.items import read_items
from penstock.services.frontend.dialects.responses.truncation import droppable, without

PATH = "/v1/responses"


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def called(name: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"}


def result(name: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": name, "output": name}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}


SYSTEM, USER, ASSISTANT = said("system", "S"), said("user", "U"), said("assistant", "A")
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[list[int]]]] = {
    "a question alone": ([USER], []),
    "exchanges go whole, the oldest first": (
        [SYSTEM, USER, ASSISTANT, USER, ASSISTANT, USER],
        [[1, 2], [3, 4]],
    ),
    "instructions in the middle stay": (
        [USER, ASSISTANT, said("developer", "D"), USER, ASSISTANT, USER],
        [[0, 1], [3, 4]],
    ),
    "several messages of a user are one": ([USER, USER, ASSISTANT, USER], [[0, 1, 2]]),
    "an assistant that speaks first goes first": (
        [ASSISTANT, USER, ASSISTANT, USER],
        [[0], [1, 2]],
    ),
    "calls go with their results": (
        [USER, thought("x"), called("a"), called("b"), result("b"), result("a"), ASSISTANT, USER],
        [[0, 1, 2, 3, 4, 5, 6]],
    ),
    "steps behind the last question go but for the last one": (
        [USER, ASSISTANT, USER, called("a"), result("a"), thought("x"), called("b"), result("b"),
         called("c"), result("c")],
        [[0, 1], [3, 4], [5, 6, 7]],
    ),
    "a result that comes late holds all between together": (
        [USER, called("a"), USER, ASSISTANT, result("a"), USER],
        [[0, 1, 2, 3, 4]],
    ),
    "a call whose result comes behind the last question stays": (
        [USER, ASSISTANT, USER, called("a"), USER, result("a")],
        [[0, 1]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CONVERSATIONS)
def test_what_may_go_never_parts_a_call_from_its_result(case: str) -> None:
    items, expected = CONVERSATIONS[case]
    read: list[Any] = list(read_items(items))
    parts = droppable(read)
    assert parts == expected
    for count in range(len(parts) + 1):
        left = without(read, parts[:count])
        assert read[-1] in left
        calls = [one.call_id for one in left if one.type == "function_call"]
        results = [one.call_id for one in left if one.type == "function_call_output"]
        assert sorted(calls) == sorted(results)


def contents(work: Work) -> list[str]:
    assert isinstance(work.prompt, Chat)
    return [one["content"] for one in json.loads(work.prompt.messages)]


def counting(answer: Script) -> Script:
    """A prompt has a token for each character of its messages."""

    async def script(work: Work, sink: Sink) -> None:
        length = sum(map(len, contents(work)))
        if work.head.task != TOKENIZE:
            assert length < MAX_MODEL_LEN
            return await answer(work, sink)
        sink.on_accepted(length)
        return sink.on_row(0, "", 0, RowExtras(end=STOP, events=[TokenIds(b"")]))

    return script


LONG = [said("system", "s"), *(said(role, f"{n}{role[0]}" * 4) for n in range(4) for role in
        ("user", "assistant")), said("user", "and now?")]  # fmt: skip


def test_the_oldest_exchanges_go_until_the_rest_fits() -> None:
    async def use(client: Client) -> None:
        body = {"input": LONG, "truncation": "auto", "instructions": "i"}
        status, answer, _ = await client.post(PATH, body)
        assert (status, answer["truncation"]) == (200, "auto")
        _, listed, _ = await client.get(f"{PATH}/{answer['id']}/input_items?limit=100")
        assert len(listed["data"]) == len(LONG), "what is kept is the whole input"
        body = {"input": "and more?", "truncation": "auto", "previous_response_id": answer["id"]}
        assert (await client.post(PATH, body))[0] == 200
        body = {"input": LONG, "truncation": "auto", "max_output_tokens": 8}
        assert (await client.post(PATH, body))[0] == 200
        _, counted, _ = await client.post(
            f"{PATH}/input_tokens", {"input": LONG, "truncation": "auto"}
        )
        assert counted["input_tokens"] <= MAX_MODEL_LEN * 3 / 4

    works = [one for one in run(use, counting(say("ok"))).works if one.head.task != TOKENIZE]
    first, continued, short = map(contents, works)
    assert first == ["i\n\ns", "2u" * 4, "2a" * 4, "3u" * 4, "3a" * 4, "and now?"]
    assert continued == ["s", "3u" * 4, "3a" * 4, "and now?", "ok", "and more?"]
    assert short == ["s", *first[1:]]


def test_what_fits_is_left_alone_and_counted_once() -> None:
    async def use(client: Client) -> None:
        status, _, _ = await client.post(PATH, {"input": "x" * 60, "truncation": "auto"})
        assert status == 200

    works = run(use, counting(say("ok"))).works
    assert [work.head.task for work in works] == [TOKENIZE, "generate"]
    assert contents(works[1]) == ["x" * 60]


def test_what_must_stay_and_does_not_fit_is_a_400_that_says_so() -> None:
    async def use(client: Client) -> None:
        items = [said("user", "u"), said("assistant", "a"), said("user", "x" * 60)]
        body = {"input": items, "truncation": "auto", "max_output_tokens": 8}
        status, error, _ = await client.post(PATH, body)
        assert (status, error["error"]["code"]) == (400, "context_length_exceeded")
        assert "has 60 tokens, and 56 are allowed" in error["error"]["message"]

    run(use, counting(say("ok")))
