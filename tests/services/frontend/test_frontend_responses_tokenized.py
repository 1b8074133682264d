"""Responses over rows that the tokenizer's own code has made."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.frontend.frontend_scripted import Client, run
from support.frontend.tokenized_script import writes

PATH = "/v1/responses"
LOGPROBS = ["message.output_text.logprobs"]
THOUGHT = "17: 7 1\n25: 5 2\n2 4: 42"
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


async def answered(client: Client, streams: bool, **body: Any) -> list[dict[str, Any]]:
    """The output of a response, which a stream has told as it ends with it."""
    body |= {"input": "x", "include": LOGPROBS}
    if not streams:
        status, response, _ = await client.post(PATH, body)
        assert status == 200, response
        return list(response["output"])
    added, told = [], []
    async with client.session.post(client.url + PATH, json={**body, "stream": True}) as answer:
        async for line in answer.content:
            event = json.loads(line.removeprefix(b"data: ")) if line.startswith(b"data: ") else {}
            if event.get("type") == "response.output_item.added":
                added.append(event["item"]["id"])
            if event.get("type") == "response.output_text.delta":
                told += event["logprobs"]
            if event.get("type") == "response.completed":
                output: list[dict[str, Any]] = event["response"]["output"]
    assert added == [item["id"] for item in output]
    assert told == [one for item in output for one in logprobs_of(item)]
    return output


def logprobs_of(item: dict[str, Any]) -> list[Any]:
    """Of the text of an item."""
    if item["type"] != "message":
        return []
    (part,) = item["content"]
    return list(part["logprobs"])


def tokens_of(item: dict[str, Any]) -> str:
    return b"".join(bytes(one["bytes"]) for one in logprobs_of(item)).decode()


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("row", [1, 2, 3, 1000])
def test_the_text_has_the_logprobs_of_its_own_tokens(row: int, streams: bool) -> None:
    async def think(client: Client) -> None:
        thought, said = await answered(client, streams)
        assert thought["content"][0]["text"].strip() == THOUGHT
        assert said["content"][0]["text"] == "It is < 43 😀."
        assert tokens_of(said).removesuffix("<|im_end|>").strip() == "It is < 43 😀."

    async def call(client: Client) -> None:
        said, called = await answered(client, streams, tools=[TOOL])
        assert tokens_of(said).strip() == said["content"][0]["text"].strip() == "I look <there."
        assert json.loads(called["arguments"]) == {"city": "Oslo"}

    run(think, writes(f"<think>\n{THOUGHT}\n</think>\n\nIt is < 43 😀.", row=row))
    run(call, writes(f"I look <there.\n{CALL}", row=row))


def test_an_answer_that_is_cancelled_says_how_many_tokens_were_thinking() -> None:
    async def use(client: Client) -> None:
        body = {"input": "x", "stream": True}
        async with client.session.post(client.url + PATH, json=body) as answer:
            raw = b""
            while b"!" not in raw:
                raw += await answer.content.readany()
            name = json.loads(raw.splitlines()[1].removeprefix(b"data: "))["response"]["id"]
            await client.post(f"{PATH}/{name}/cancel", {})
            raw += await answer.read()
        usage = json.loads(raw.strip().splitlines()[-1].removeprefix(b"data: "))["response"][
            "usage"
        ]
        thought = usage["output_tokens_details"]["reasoning_tokens"]
        assert 0 < thought < usage["output_tokens"] <= thought + 2  # <think> and a line break

    run(use, writes(f"<think>\n{THOUGHT}!", ends=False))


def test_thinking_is_counted_once_whether_an_answer_ends_by_itself_or_not() -> None:
    found = []

    async def use(client: Client) -> None:
        _, response, _ = await client.post(PATH, {"input": "x"})
        found.append(response["usage"]["output_tokens_details"]["reasoning_tokens"])

    for row in (1, 3, 1000):
        run(use, writes(f"<think>\n{THOUGHT}\n</think>\n\n42", row=row))
    assert found[0] > 10
    assert len(set(found)) == 1
