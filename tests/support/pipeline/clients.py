"""Small HTTP clients for the tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from penstock.services.frontend.bodies import responses


@dataclass
class Answer:
    """One request as its client saw it."""

    status: int
    text: dict[int, str] = field(default_factory=dict)
    finish: dict[int, str | None] = field(default_factory=dict)
    logprobs: dict[int, dict[str, list[Any]]] = field(default_factory=dict)
    """The columns of each choice's logprobs, those of a chat under ``content``."""
    prompt_logprobs: dict[int, list[Any]] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    done: bool = False
    request_id: str = ""


WHOLE = {"chat.completion": responses.ChatCompletion, "text_completion": responses.Completion}
CHUNKS = {
    "chat.completion.chunk": responses.ChatChunk,
    "text_completion": responses.CompletionChunk,
}


def strict(raw: bytes, declared: Mapping[str, type[responses.Given]]) -> dict[str, Any]:
    """An answer or an event, which must be as it is declared, or a declared error."""
    data: dict[str, Any] = json.loads(raw)
    msgspec.json.decode(raw, type=declared.get(data.get("object", ""), responses.ErrorBody))
    return data


async def ask(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], path: str = "/v1/completions"
) -> Answer:
    """POST and read the whole answer, streamed or not."""
    async with session.post(url + path, json=body) as response:
        answer = Answer(response.status, request_id=response.headers.get("x-request-id", ""))
        if not body.get("stream") or response.status != 200:
            data = strict(await response.read(), WHOLE)
            answer.error = data.get("error")
            answer.usage = data.get("usage")
            for choice in data.get("choices", []):
                text = choice.get("text")
                if text is None:
                    text = choice["message"]["content"]
                answer.text[choice["index"]] = text
                answer.finish[choice["index"]] = choice["finish_reason"]
                take_logprobs(answer, choice)
                if "prompt_logprobs" in choice:
                    answer.prompt_logprobs[choice["index"]] = choice["prompt_logprobs"]
            answer.done = response.status == 200
            return answer
        async for line in response.content:
            take_event(answer, line)
        return answer


def ask_together(url: str, *bodies: dict[str, Any], path: str = "/v1/completions") -> list[Answer]:
    """All at once; the answers in the order of the bodies."""

    async def run() -> list[Answer]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=90)) as session:
            return await asyncio.gather(*(ask(session, url, one, path) for one in bodies))

    return asyncio.run(run())


def take_event(answer: Answer, line: bytes) -> None:
    """Add one line of an SSE stream."""
    if not line.startswith(b"data: "):
        return
    data = line[6:].strip()
    if data == b"[DONE]":
        answer.done = True
        return
    event = strict(data, CHUNKS)
    if "error" in event:
        answer.error = event["error"]
        return
    if event.get("usage"):
        answer.usage = event["usage"]
    for choice in event["choices"]:
        index = choice["index"]
        text = choice.get("text")
        if text is None:
            text = choice["delta"].get("content") or ""
        answer.text[index] = answer.text.get(index, "") + text
        take_logprobs(answer, choice)
        if choice["finish_reason"] is not None:
            answer.finish[index] = choice["finish_reason"]


def take_logprobs(answer: Answer, choice: dict[str, Any]) -> None:
    """Add the logprobs of one choice of an answer or of an event."""
    found = choice.get("logprobs") or {}
    columns = answer.logprobs.setdefault(choice["index"], {}) if found else {}
    for name, values in found.items():
        if values is not None:
            columns.setdefault(name, []).extend(values)
