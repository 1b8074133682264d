"""/tokenize and /detokenize over HTTP."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.frontend.frontend_scripted import Client, ScriptedGateway, forever, of_any_task, run

from penstock.protocol.tasks import DETOKENIZE, TOKENIZE
from penstock.protocol.wire.messages.requests import Chat, PromptText, Tokens

MESSAGES = [{"role": "user", "content": "hi"}]


def test_a_text_becomes_ids_with_or_without_special_tokens() -> None:
    async def use(client: Client) -> None:
        for asked in ({}, {"add_special_tokens": False}):
            status, answer, _ = await client.post("/tokenize", {"prompt": "hi", **asked})
            assert status == 200
            assert answer == {
                "count": 3,
                "max_model_len": 64,
                "tokens": [1, 2, 3],
                "token_strs": None,
            }

    works = run(use, of_any_task(forever)).works
    assert [work.head.task for work in works] == [TOKENIZE] * 2
    assert [work.prompt for work in works] == [PromptText("hi"), PromptText("hi", False)]


def test_a_chat_becomes_ids_by_its_template() -> None:
    tool = {"type": "function", "function": {"name": "f"}}

    async def use(client: Client) -> None:
        body = {"messages": MESSAGES, "tools": [tool], "add_generation_prompt": False}
        status, answer, _ = await client.post("/tokenize", body)
        assert (status, answer["count"]) == (200, 3)

    (work,) = run(use, of_any_task(forever)).works
    assert isinstance(work.prompt, Chat)
    assert json.loads(work.prompt.messages) == MESSAGES
    assert json.loads(work.prompt.template_kwargs) == {"add_generation_prompt": False}
    assert work.output is not None and work.output.tools


def test_ids_become_text() -> None:
    async def use(client: Client) -> None:
        status, answer, _ = await client.post("/detokenize", {"tokens": [1, 999]})
        assert (status, answer) == (200, {"prompt": "one two three"})

    (work,) = run(use, of_any_task(forever)).works
    assert work.head.task == DETOKENIZE
    assert work.prompt == Tokens(b"\x01\0\0\0\xe7\x03\0\0")


@pytest.mark.parametrize(
    ("path", "asked", "words"),
    [
        ("/tokenize", {}, "neither prompt nor messages"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "both prompt and messages"),
        ("/tokenize", {"prompt": "x", "tools": []}, "tools is allowed only together with messages"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "send false"),
        ("/tokenize", {"prompt": "x", "return_token_strs": True}, "not supported yet"),
        ("/detokenize", {"tokens": []}, "tokens is empty"),
        ("/detokenize", {"tokens": [1000]}, "1000"),
    ],
)
def test_what_is_wrong_is_refused_by_name(path: str, asked: dict[str, Any], words: str) -> None:
    async def use(client: Client) -> None:
        status, answer, _ = await client.post(path, asked)
        assert status == 400
        assert words in answer["error"]["message"]
        assert path == "/tokenize" or answer["error"]["param"] == "tokens"

    assert run(use).works == []


def test_tokens_are_usage_only_where_an_engine_computes_them() -> None:
    async def use(client: Client) -> None:
        for path, body in (
            ("/tokenize", {"prompt": "hi"}),
            ("/v1/messages/count_tokens", {"messages": MESSAGES}),
            ("/v1/embeddings", {"input": "hi"}),
        ):
            status, answer, _ = await client.post(path, body)
            assert status == 200, answer

    registry = run(use, of_any_task(forever)).registry
    model = ScriptedGateway(forever).models()[0].name
    assert registry.counter("usage_tokens_total", model, "prompt").value == 3
    assert registry.counter("key_tokens_total", "", "prompt").value == 3
    assert registry.counter("key_requests_total", "").value == 1
    assert registry.histogram("request_prompt_tokens").total == 3
    assert sum(registry.histogram("e2e_request_latency_seconds").counts) == 1
    assert sum(registry.histogram("request_generation_tokens").counts) == 0
    assert registry.counter("requests_finished_total", "stop").value == 3
