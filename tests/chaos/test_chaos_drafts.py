"""With ``--speculative`` the built-in model streams what it streams without, whatever is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from support.chaos.victims import children, find, nothing_held, whole_again
from support.pipeline.adapter_folders import write_soft_prompt
from support.pipeline.served import Served, served

import penstock.demo

pytestmark = pytest.mark.timeout(900)
FLAGS = ("--device", "cpu", "--dtype", "float32", "--threads", "1")
DEMO = Path(penstock.demo.__file__).parent
SOURCES = {
    "suffix": ("--speculative", "suffix"),
    "eagle3": ("--speculative", "eagle3", "--speculative-model", str(DEMO / "heads" / "eagle3")),
    "draft-model": ("--speculative", "draft-model", "--speculative-model", str(DEMO / "model")),
}
REPEATED = "The red fox runs. The blue fox sleeps. The red fox runs. The blue fox sleeps. The red"
SCHEMA = {
    "type": "object",
    "properties": {"capital_of_the_country": {"type": "string", "maxLength": 12}},
    "required": ["capital_of_the_country"],
    "additionalProperties": False,
}
CASES: list[dict[str, Any]] = [
    {"prompt": REPEATED, "temperature": 0, "logprobs": 2, "ignore_eos": True},
    {"prompt": REPEATED, "temperature": 0.8, "seed": 3, "n": 2, "logprobs": 1, "ignore_eos": True},
    {"prompt": REPEATED, "temperature": 0, "stop": [" sleeps. The red", "zebra"]},
    {"prompt": REPEATED, "temperature": 0.7, "seed": 4, "stop": ["s. ", "x r"], "n": 2},
    {"prompt": "Paris:", "temperature": 0, "structured_outputs": {"json": SCHEMA}},
    {
        "prompt": "A list:", "temperature": 1, "seed": 5, "n": 2, "logprobs": 0,
        "structured_outputs": {"regex": "(item one and item two, ){4}(done|finished)"},
    },
    {"prompt": REPEATED, "temperature": 1, "seed": 6, "frequency_penalty": 0.4, "min_tokens": 60},
]  # fmt: skip


ADAPTED: list[dict[str, Any]] = [
    {"model": "words", "prompt": REPEATED, "temperature": 0, "logprobs": 2, "ignore_eos": True},
    {"model": "words", "prompt": "17 and 4", "temperature": 0.8, "seed": 7, "n": 2, "logprobs": 1},
    {"model": "soft", "prompt": REPEATED, "temperature": 0, "logprobs": 1, "ignore_eos": True},
    {"model": "soft", "prompt": REPEATED, "temperature": 0.8, "seed": 8, "ignore_eos": True},
    *CASES[:5],
]
"""Rows of an adapter and of a soft prompt beside those of the model alone."""


class Stream:
    """What a client of ``/v1/completions`` has of one request."""

    def __init__(self) -> None:
        self.choices: dict[int, dict[str, Any]] = {}
        self.usage: dict[str, int] = {}
        self.pieces = 0
        self.ends = 0

    def take(self, event: dict[str, Any]) -> None:
        assert "error" not in event, event
        if usage := event.get("usage"):
            self.usage = {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
        for piece in event["choices"]:
            self.pieces += 1
            choice = self.choices.setdefault(piece["index"], {"text": "", "ids": [], "finish": []})
            choice["text"] += piece["text"]
            choice["ids"] += piece.get("token_ids") or []
            if piece["finish_reason"]:
                choice["finish"].append((piece["finish_reason"], piece.get("stop_reason")))
            for name, values in (piece.get("logprobs") or {}).items():
                choice.setdefault(name, []).extend(values or [])

    @property
    def seen(self) -> tuple[dict[int, dict[str, Any]], dict[str, int], int]:
        return self.choices, self.usage, self.ends


class Followers:
    """Clients that stream all cases at once."""

    def __init__(self, url: str, max_tokens: int, cases: list[dict[str, Any]]) -> None:
        self.streams = [Stream() for _ in cases]
        more = {
            "max_tokens": max_tokens, "stream": True, "return_token_ids": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        self._url, self._bodies = url + "/v1/completions", [{**case, **more} for case in cases]

    async def __aenter__(self) -> Followers:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300))
        self._tasks = [
            asyncio.create_task(self._follow(*one))
            for one in zip(self.streams, self._bodies, strict=True)
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    async def until(self, pieces: int) -> None:
        async with asyncio.timeout(300):
            while any(
                one.pieces < pieces and not task.done()
                for one, task in zip(self.streams, self._tasks, strict=True)
            ):
                await asyncio.sleep(0.002)

    async def ends(self) -> list[Any]:
        await asyncio.gather(*self._tasks)
        return [one.seen for one in self.streams]

    async def _follow(self, stream: Stream, body: dict[str, Any]) -> None:
        async with self._session.post(self._url, json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if not line.startswith(b"data: "):  # in a long pause come comments
                    continue
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    stream.ends += 1
                else:
                    stream.take(json.loads(data))


def streamed(server: Served, max_tokens: int, cases: list[dict[str, Any]] = CASES) -> list[Any]:
    async def follow() -> list[Any]:
        async with Followers(server.url, max_tokens, cases) as followers:
            return await followers.ends()

    return asyncio.run(follow())


@contextlib.contextmanager
def drafting(source: str, *flags: str) -> Iterator[Served]:
    with served(*FLAGS, *SOURCES[source], *flags) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_streams_are_the_same_with_drafts_and_without(source: str) -> None:
    with served(*FLAGS) as plain:
        expected = streamed(plain, 100)
    with drafting(source) as server:
        for _ in range(3):  # drafts of the later ones come from the outputs of the first
            for case, got, wanted in zip(CASES, streamed(server, 100), expected, strict=True):
                assert got == wanted, case
        counts = server.settled()
        least = 100 if source == "suffix" else 0  # in batches a head drafts now and then
        assert counts["penstock_spec_decode_accepted_tokens_total"] > least
        nothing_held(server)


async def struck(server: Served, role: str, cases: list[dict[str, Any]]) -> list[Any]:
    """The streams of all cases, while the process ``role`` is killed."""
    victim, count = find(server, role), len(children(server))
    async with Followers(server.url, 150, cases) as followers:
        await followers.until(3)
        began = time.monotonic()
        victim.kill()
        found = await followers.ends()
    whole_again(server, [victim], count, began)
    return found


@pytest.mark.chaos
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("adapted", [False, True], ids=["model alone", "adapters"])
def test_killed_processes_change_no_stream_with_drafts(
    source: str, adapted: bool, tmp_path: Path
) -> None:
    cases, adapters = CASES, list[str]()
    if adapted:
        cases, soft = ADAPTED, write_soft_prompt(tmp_path / "soft", 23, 256)
        words = DEMO / "adapters" / "number_words"
        adapters = ["--lora", f"words={words}", "--lora", f"soft={soft}"]
    slow = ("--fault", "worker:sleep=0.02@step", "--restart-wait-s", "120")
    with drafting(source, *slow, *adapters) as server:
        expected = streamed(server, 150, cases)
        for role in ("worker", "scheduler", "worker"):
            found = asyncio.run(struck(server, role, cases))
            for case, got, wanted in zip(cases, found, expected, strict=True):
                assert got == wanted, (role, case)
        assert server.settled()["penstock_spec_decode_draft_tokens_total"] > 0
        nothing_held(server)


def texts(streams: list[Any]) -> list[list[Any]]:
    """Tokens and ends: the last bits of logprobs depend on what else a GPU computes."""
    return [
        [(one["ids"], one["text"], one["finish"]) for _, one in sorted(choices.items())]
        for choices, _, _ in streams
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_texts_of_a_gpu_are_the_same_with_drafts_also_when_its_worker_is_killed() -> None:
    """How many drafts there are depends on what steps cost; a worker that is new has had few."""
    flags = ("--device", "cuda", "--dtype", "float32", "--kv-cache-memory-bytes", "500000000")
    cases = [*CASES, {"prompt": REPEATED, "temperature": 0, "ignore_eos": True}]
    with served(*flags) as plain:
        expected = texts(streamed(plain, 150, cases))
    slow = ("--fault", "worker:sleep=0.002@step", "--restart-wait-s", "120")
    with served(*flags, *SOURCES["suffix"], *slow) as server:
        for _ in range(2):
            assert texts(streamed(server, 150, cases)) == expected
        assert texts(asyncio.run(struck(server, "worker", cases))) == expected
        nothing_held(server)
