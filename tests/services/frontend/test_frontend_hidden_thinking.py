"""Thinking that a client does not want is counted, and leaves no trace in what it gets."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from support.frontend.frontend_scripted import Client, run
from support.frontend.tokenized_script import writes

OUTPUT = "<think>\nWhy < not?\n</think>\n\nIt is 42."
CHAT = [{"role": "user", "content": "x"}]
Event = dict[str, Any]


def _chat(event: Event) -> str | None:
    for choice in event["choices"]:
        assert set(choice["delta"]) <= {"role", "content"}
        content: str | None = choice["delta"].get("content")
        is_first, is_last = "role" in choice["delta"], choice["finish_reason"] is not None
        if content or not (is_first or is_last):
            return content
    return None


def _anthropic(event: Event) -> str | None:
    if event["type"] == "content_block_start":
        assert event["content_block"]["type"] == "text" and event["index"] == 0
    return event["delta"]["text"] if event["type"] == "content_block_delta" else None


def _ollama(event: Event) -> str | None:
    assert not event["message"].get("thinking")
    return None if event["done"] else event["message"]["content"]


def _ollama_text(event: Event) -> str | None:
    assert not event.get("thinking")
    return None if event["done"] else event["response"]


ROUTES: dict[str, tuple[str, Event, Callable[[Event], str | None]]] = {
    "chat": ("/v1/chat/completions", {"messages": CHAT, "include_reasoning": False}, _chat),
    "anthropic": ("/v1/messages", {"messages": CHAT, "max_tokens": 99}, _anthropic),
    "ollama": ("/api/chat", {"model": "org/model", "messages": CHAT, "think": False}, _ollama),
    "ollama text": (
        "/api/generate",
        {"model": "org/model", "prompt": "x", "think": False},
        _ollama_text,
    ),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("row", [1, 2, 1000])
def test_no_event_of_a_stream_tells_of_thinking_that_is_hidden(route: str, row: int) -> None:
    path, body, words_of = ROUTES[route]

    async def use(client: Client) -> None:
        async with client.session.post(client.url + path, json={**body, "stream": True}) as answer:
            assert answer.status == 200
            raw = (await answer.text()).splitlines()
        lines = [line.removeprefix("data: ") for line in raw]
        events = [json.loads(line) for line in lines if line.startswith("{")]
        words = [found for event in events if (found := words_of(event)) is not None]
        assert words and "" not in words
        assert "".join(words).strip() == "It is 42."

    run(use, writes(OUTPUT, row=row))


def test_a_stream_counts_thinking_that_it_hides_as_a_whole_answer_does() -> None:
    path, body, _ = ROUTES["chat"]
    counts = []

    async def use(client: Client) -> None:
        for options in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
            async with client.session.post(client.url + path, json={**body, **options}) as answer:
                raw = (await answer.text()).replace("data: [DONE]", "").strip()
            usage = json.loads(raw.splitlines()[-1].removeprefix("data: "))["usage"]
            counts.append(usage["completion_tokens_details"]["reasoning_tokens"])

    for row in (1, 3, 1000):
        run(use, writes(OUTPUT, row=row))
    assert counts[0] > 3
    assert len(set(counts)) == 1
