"""Questions to be answered by likelihood, over HTTP, and the perplexity of a text.

Each end of a sentence is scored by the logprobs of its tokens behind the sentence. The likeliest
end is the answer. ``/v1/completions`` gives them with ``max_tokens: 0``, ``echo`` and ``logprobs``.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

import msgspec

from penstock.loadtest.client.connection import ConnectFailed, ConnectionGone
from penstock.loadtest.client.http_response import BadResponse
from penstock.loadtest.client.target import Target
from penstock.loadtest.evaluation.eval_facts import Question
from penstock.loadtest.evaluation.eval_questions import Outcome, WholeAnswer

COMPLETIONS = "/v1/completions"


class NoScore(ValueError):
    """The server gives no logprobs of a prompt. The message says why."""


class Scored(msgspec.Struct, frozen=True):
    """Tokens of a text, with the logprob of each behind those before it."""

    offsets: list[int]
    """Characters of the text before each token."""
    logprobs: list[float | None]
    """``None``: the first token has nothing before it."""

    def behind(self, characters: int) -> float:
        """Logprobs of the tokens that begin there or later, together."""
        pairs = zip(self.offsets, self.logprobs, strict=True)
        return sum(logprob or 0.0 for offset, logprob in pairs if offset >= characters)

    @property
    def perplexity(self) -> float:
        """Of all tokens but the first."""
        known = [each for each in self.logprobs if each is not None]
        return math.exp(-sum(known) / len(known)) if known else math.nan


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None]
    text_offset: list[int]


class _Choice(msgspec.Struct):
    logprobs: _Logprobs | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


async def score(target: Target, model: str, text: str) -> Scored:
    """Raises ``NoScore``."""
    body = {"model": model, "prompt": text, "max_tokens": 0, "echo": True, "logprobs": 0}
    answer = WholeAnswer()
    try:
        await target.pool.request(target.post(msgspec.json.encode(body)), answer)
    except (ConnectFailed, ConnectionGone, BadResponse) as problem:
        raise NoScore(str(problem)) from None
    if answer.status != 200:
        raise NoScore(f"{answer.status}: {answer.data[:200].decode(errors='replace')}")
    try:
        found = msgspec.json.decode(answer.data, type=_Completion).choices[0].logprobs
    except (msgspec.MsgspecError, UnicodeDecodeError, IndexError) as problem:
        raise NoScore(f"no completion: {problem}") from None
    if found is None:
        raise NoScore("the completion has no logprobs")
    return Scored(found.text_offset, found.token_logprobs)


async def ask_all(
    target: Target,
    model: str,
    asked: Sequence[Question],
    concurrency: int,
    progress: Callable[[int], None],
) -> list[Outcome]:
    """Every question, ``concurrency`` texts at a time; in the order given."""
    gate = asyncio.Semaphore(concurrency)
    done = 0

    async def one(text: str) -> Scored:
        async with gate:
            return await score(target, model, text)

    async def answered(question: Question) -> Outcome:
        nonlocal done
        texts = [question.stem + option for option in question.options]
        expected = question.options[question.right].strip()
        try:
            scores = [
                each.behind(len(question.stem)) for each in await asyncio.gather(*map(one, texts))
            ]
        except NoScore as problem:
            found = Outcome(question.table, question.stem, expected, "", False, error=str(problem))
        else:
            best = scores.index(max(scores))
            said = question.options[best].strip()
            found = Outcome(question.table, question.stem, expected, said, best == question.right)
        done += 1
        progress(done)
        return found

    return list(await asyncio.gather(*map(answered, asked)))
