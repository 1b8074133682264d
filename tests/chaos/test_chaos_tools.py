"""Whatever process dies, answers with thinking and tool calls arrive as if nothing had happened."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import msgspec
import pytest
from support.chaos.victims import children, find, nothing_held, whole_again
from support.pipeline.served import Served, served

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
        self.ids: list[int] = []
        self.usage: dict[str, Any] = {}
        self.done = False
        self.pieces = 0

    def add(self, event: dict[str, Any]) -> None:
        self.pieces += 1
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            delta = choice["delta"]
            self.ids += choice["token_ids"]
            self.content += delta.get("content") or ""
            self.reasoning += delta.get("reasoning") or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(self.calls)
                    self.calls.append({"name": call["function"]["name"], "arguments": ""})
                self.calls[call["index"]]["arguments"] += call["function"]["arguments"]
            self.finish += [choice["finish_reason"]] if choice["finish_reason"] else []

    def add_frame(self, frame: dict[str, Any]) -> None:
        """The same of a frame of /v1/stream."""
        assert not self.done, frame
        self.pieces += 1
        self.ids += frame.get("token_ids", ())
        match frame["type"]:
            case "text":
                self.content += frame["text"]
            case "reasoning":
                self.reasoning += frame["text"]
            case "tool_call":
                assert frame["index"] == len(self.calls)
                self.calls.append({"name": frame["name"], "arguments": ""})
            case "arguments":
                self.calls[frame["index"]]["arguments"] += frame["text"]
            case "end":
                self.finish = [choice["finish_reason"] for choice in frame["choices"]]
                self.usage, self.done = frame["usage"], True
            case _:
                raise AssertionError(frame)

    def verdict(self) -> tuple[Any, ...]:
        counted = {k: v for k, v in self.usage.items() if k != "prompt_tokens_details"}
        said = self.content, self.reasoning, self.calls, self.finish
        return *said, self.ids, counted, self.done


def body_of(question: str) -> dict[str, Any]:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    if "weather" in question:  # where it is offered tools it does not think
        body["tools"] = TOOLS
    return body


async def tell(session: aiohttp.ClientSession, url: str, question: str, told: Told) -> None:
    body = body_of(question)
    async with session.post(url + "/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: [DONE]"):
                told.done = True
            elif line.startswith(b"data: "):
                event = json.loads(line[6:])
                assert "error" not in event, event
                told.add(event)


async def tell_multiplexed(session: aiohttp.ClientSession, url: str, told: list[Told]) -> None:
    """All questions on one WebSocket, as JSON and as msgpack in turns."""
    async with session.ws_connect(url + "/v1/stream") as socket:
        for number, question in enumerate(QUESTIONS):
            frame = {"id": str(number), "type": "chat", "body": body_of(question)}
            if number % 2:
                await socket.send_bytes(msgspec.msgpack.encode(frame))
            else:
                await socket.send_str(json.dumps(frame))
        while not all(one.done for one in told):
            message = await socket.receive()
            is_text = message.type is aiohttp.WSMsgType.TEXT
            assert is_text or message.type is aiohttp.WSMsgType.BINARY, message
            frame = json.loads(message.data) if is_text else msgspec.msgpack.decode(message.data)
            assert is_text == (int(frame["id"]) % 2 == 0)
            told[int(frame["id"])].add_frame(frame)


async def tell_all(url: str, strike: Callable[[], None] | None, way: str = "sse") -> list[Told]:
    """All answers at once; ``strike`` once some of them are under way."""
    told = [Told() for _ in QUESTIONS]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        pairs = zip(QUESTIONS, told, strict=True)
        if way == "sse":
            tasks = [asyncio.create_task(tell(session, url, *pair)) for pair in pairs]
        else:
            tasks = [asyncio.create_task(tell_multiplexed(session, url, told))]
        if strike is not None:
            while sum(one.pieces > 3 for one in told) < 3:
                await asyncio.sleep(0.002)
            strike()
        await asyncio.gather(*tasks)
    return told


@pytest.mark.parametrize("way", ["sse", "websocket"])
@pytest.mark.parametrize("role", VICTIMS)
def test_thinking_and_calls_are_those_of_an_undisturbed_run(
    server: Served, role: str, way: str
) -> None:
    expected = asyncio.run(tell_all(server.url, None))
    assert all(one.done and one.finish for one in expected)
    assert any(one.reasoning for one in expected)
    assert any(one.calls for one in expected)
    assert all(len(one.ids) == one.usage["completion_tokens"] for one in expected)
    count, victim = len(children(server)), find(server, role)
    struck = 0.0

    def strike() -> None:
        nonlocal struck
        struck = time.monotonic()
        victim.send_signal(signal.SIGKILL)

    told = asyncio.run(tell_all(server.url, strike, way))
    whole_again(server, [victim], count, struck)
    assert [one.verdict() for one in told] == [one.verdict() for one in expected]
    nothing_held(server)
