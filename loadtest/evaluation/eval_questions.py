"""The questions of ``penstock eval`` over HTTP, many at once, and what came back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from penstock.demo.chat import messages
from penstock.demo.grading import is_right
from penstock.demo.mixture import Conversation
from penstock.loadtest.client.connection import ConnectFailed, ConnectionGone
from penstock.loadtest.client.http_response import BadResponse
from penstock.loadtest.client.target import Target

ENDPOINT = "/v1/chat/completions"
MAX_TOKENS = 400
"""The longest expected answer, thinking included, has about 250."""


class Outcome(msgspec.Struct, frozen=True):
    """One question and its answer."""

    skill: str
    question: str
    expected: str
    said: str
    right: bool
    tokens: int = 0
    error: str = ""
    """Why there is no answer; empty: there is one."""


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


class WholeAnswer:
    """Receives one response whole."""

    def __init__(self) -> None:
        self.status = 0
        self.data = b""

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.status = status

    def body(self, data: bytes) -> None:
        self.data += data


def _outcome(skill: str, made: Conversation, answer: WholeAnswer) -> Outcome:
    last = made.exchanges[-1]
    expected = last.answer.replace("\x1f", "")
    if answer.status != 200:
        error = f"{answer.status}: {answer.data[:200].decode(errors='replace')}"
        return Outcome(skill, last.question, expected, "", right=False, error=error)
    try:
        decoded = msgspec.json.decode(answer.data, type=_Completion)
        said = decoded.choices[0].message.content or ""
    except (msgspec.MsgspecError, UnicodeDecodeError, IndexError) as problem:
        error = f"no chat completion: {problem}"
        return Outcome(skill, last.question, expected, "", right=False, error=error)
    tokens = decoded.usage.completion_tokens if decoded.usage else 0
    return Outcome(skill, last.question, expected, said, is_right(said, last), tokens)


async def ask_all(
    target: Target,
    model: str,
    asked: Sequence[tuple[str, Conversation]],
    concurrency: int,
    progress: Callable[[int], None],
) -> list[Outcome]:
    """Every question, ``concurrency`` at a time, greedily; in the order given."""
    gate = asyncio.Semaphore(concurrency)
    done = 0

    async def one(skill: str, made: Conversation) -> Outcome:
        nonlocal done
        body = {
            "model": model,
            "messages": messages(made),
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
        }
        answer = WholeAnswer()
        async with gate:
            try:
                await target.pool.request(target.post(msgspec.json.encode(body)), answer)
            except (ConnectFailed, ConnectionGone, BadResponse) as problem:
                last = made.exchanges[-1]
                found = Outcome(skill, last.question, last.answer, "", False, error=str(problem))
            else:
                found = _outcome(skill, made, answer)
        done += 1
        progress(done)
        return found

    return list(await asyncio.gather(*(one(skill, made) for skill, made in asked)))
