"""Whatever process dies, answers with thinking and tool calls arrive as if nothing had happened."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import pytest
from served import Served, served
from victims import children, find, nothing_held, whole_again

pytestmark = [pytest.mark.timeout(400), pytest.mark.chaos]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": what,
            "parameters": {
                "type": "object",
                "properties": {field: {"type": "string"}},
                "required": [field],
            },
        },
    }
    for name, what, field in (
        ("get_weather", "Get the weather of a city", "city"),
        ("write_note", "Write a note", "text"),
    )
]
QUESTIONS = [
    *(f"What is {123 * n} + {457 + n}?" for n in range(1, 9)),
    *(f"What is the weather in {city}?" for city in ("Oslo", "Rome", "Paris", "Lima")),
]
VICTIMS = ("tokenizer", "worker", "scheduler", "router")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served("--device", "cpu", "--dtype", "float32", "--threads", "1") as running:
        yield running


class Told:
    """An answer as its client puts it together, and what it must never see."""

    def __init__(self) -> None:
        self.content = self.reasoning = ""
        self.calls: list[dict[str, str]] = []
        self.finish: list[str] = []
        self.usage: dict[str, Any] = {}
        self.done = False
        self.pieces = 0

    def add(self, event: dict[str, Any]) -> None:
        self.pieces += 1
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            delta = choice["delta"]
            self.content += delta.get("content") or ""
            self.reasoning += delta.get("reasoning") or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(self.calls)
                    self.calls.append({"name": call["function"]["name"], "arguments": ""})
                self.calls[call["index"]]["arguments"] += call["function"]["arguments"]
            self.finish += [choice["finish_reason"]] if choice["finish_reason"] else []

    def verdict(self) -> tuple[Any, ...]:
        counted = {k: v for k, v in self.usage.items() if k != "prompt_tokens_details"}
        return self.content, self.reasoning, self.calls, self.finish, counted, self.done


async def tell(session: aiohttp.ClientSession, url: str, question: str, told: Told) -> None:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if "weather" in question:  # where it is offered tools it does not think
        body["tools"] = TOOLS
    async with session.post(url + "/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: [DONE]"):
                told.done = True
            elif line.startswith(b"data: "):
                event = json.loads(line[6:])
                assert "error" not in event, event
                told.add(event)


async def tell_all(url: str, strike: Callable[[], None] | None) -> list[Told]:
    """All answers at once; ``strike`` once some of them are under way."""
    told = [Told() for _ in QUESTIONS]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        pairs = zip(QUESTIONS, told, strict=True)
        tasks = [asyncio.create_task(tell(session, url, *pair)) for pair in pairs]
        if strike is not None:
            while sum(one.pieces > 3 for one in told) < 3:
                await asyncio.sleep(0.002)
            strike()
        await asyncio.gather(*tasks)
    return told


@pytest.mark.parametrize("role", VICTIMS)
def test_thinking_and_calls_are_those_of_an_undisturbed_run(server: Served, role: str) -> None:
    expected = asyncio.run(tell_all(server.url, None))
    assert all(one.done and one.finish for one in expected)
    assert any(one.reasoning for one in expected)
    assert any(one.calls for one in expected)
    count, victim = len(children(server)), find(server, role)
    struck = 0.0

    def strike() -> None:
        nonlocal struck
        struck = time.monotonic()
        victim.send_signal(signal.SIGKILL)

    told = asyncio.run(tell_all(server.url, strike))
    whole_again(server, [victim], count, struck)
    assert [one.verdict() for one in told] == [one.verdict() for one in expected]
    nothing_held(server)
