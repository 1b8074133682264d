"""Clients that follow streams while something happens to the server, and what they see."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

PATIENCE = 300.0
"""Seconds for one answer, whatever happens meanwhile."""


@dataclass
class Followed:
    """One request as its client saw it, with the times of what arrived."""

    status: int = 0
    text: str = ""
    finish: str | None = None
    completion_tokens: int | None = None
    error: str = ""
    cut: bool = False
    """The connection broke."""
    done: bool = False
    arrivals: list[float] = field(default_factory=list)

    def verdict(self) -> tuple[int, str, str | None, int | None, str, bool]:
        """All but the times: equal in a disturbed and an undisturbed run."""
        done = (self.finish, self.completion_tokens, self.error, self.done)
        return (self.status, self.text, *done)

    def longest_pause(self, since: float) -> float:
        """The longest time without news, from ``since`` on."""
        times = [since, *(t for t in self.arrivals if t > since)]
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)


def requests(
    count: int, *, seed: int, prompt_tokens: int, max_tokens: int, vocabulary: int, streamed: bool
) -> list[dict[str, Any]]:
    """Bodies for /v1/completions: greedy and seeded ones in turn, no two prompts alike."""
    rng = random.Random(seed)
    return [
        {
            "prompt": [rng.randrange(3, vocabulary) for _ in range(prompt_tokens)],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": streamed,
            **({"stream_options": {"include_usage": True}} if streamed else {}),
            **({"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0}),
        }
        for number in range(count)
    ]


class Crowd:
    """Many requests under way at once."""

    def __init__(
        self,
        url: str,
        bodies: list[dict[str, Any]],
        spread_s: float = 0.0,
        headers: dict[str, str] | None = None,
    ) -> None:
        """``spread_s``: seconds from the first connection to the last one. headers: of each."""
        self.followed = [Followed() for _ in bodies]
        self._spread = spread_s
        self._headers = headers or {}
        self._url = url + "/v1/completions"
        self._bodies = bodies
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Crowd:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=PATIENCE),
            connector=aiohttp.TCPConnector(limit=0),
        )
        gap = self._spread / max(1, len(self._bodies))
        self._tasks = [
            asyncio.create_task(self._follow(followed, body, number * gap))
            for number, (followed, body) in enumerate(zip(self.followed, self._bodies, strict=True))
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    async def until(self, arrivals: int) -> None:
        """Wait until every stream has had so many pieces, or has ended."""
        async with asyncio.timeout(PATIENCE):
            while any(
                len(followed.arrivals) < arrivals and not task.done()
                for followed, task in zip(self.followed, self._tasks, strict=True)
            ):
                await asyncio.sleep(0.005)

    async def until_some(self, count: int) -> None:
        """Wait until so many streams have had a piece."""
        async with asyncio.timeout(PATIENCE):
            while sum(bool(followed.arrivals) for followed in self.followed) < count:
                await asyncio.sleep(0.005)

    async def until_accepted(self) -> None:
        """Wait until every request has its status line."""
        async with asyncio.timeout(PATIENCE):
            while not all(followed.status for followed in self.followed):
                await asyncio.sleep(0.002)

    async def ends(self) -> list[Followed]:
        """What all clients saw, once every request has ended."""
        await asyncio.gather(*self._tasks)
        return self.followed

    async def _follow(self, followed: Followed, body: dict[str, Any], delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        try:
            async with self._session.post(self._url, json=body, headers=self._headers) as response:
                followed.status = response.status
                if response.status != 200 or not body["stream"]:
                    _take_whole(followed, await response.json())
                    return
                async for line in response.content:
                    if line.startswith(b"data: "):
                        _take_event(followed, line[6:].strip())
        except aiohttp.ClientError as error:
            followed.error, followed.cut = repr(error), True
        except TimeoutError:
            followed.error = f"no end within {PATIENCE:.0f} s"


def _take_whole(followed: Followed, data: dict[str, Any]) -> None:
    followed.arrivals.append(time.monotonic())
    if "error" in data:
        followed.error = data["error"]["message"]
        return
    (choice,) = data["choices"]
    followed.text, followed.finish = choice["text"], choice["finish_reason"]
    followed.completion_tokens = data["usage"]["completion_tokens"]
    followed.done = True


def _take_event(followed: Followed, data: bytes) -> None:
    if followed.done:
        followed.error = f"{data!r} after the end"
    if data == b"[DONE]":
        followed.done = True
        return
    event = json.loads(data)
    if "error" in event:
        followed.error = event["error"]["message"]
        return
    followed.arrivals.append(time.monotonic())
    if event.get("usage"):
        followed.completion_tokens = event["usage"]["completion_tokens"]
    for choice in event["choices"]:
        if followed.finish and (choice["text"] or choice["finish_reason"]):
            followed.error = f"{choice} after the end"
        followed.text += choice["text"]
        followed.finish = choice["finish_reason"] or followed.finish


async def undisturbed(url: str, bodies: list[dict[str, Any]]) -> list[Followed]:
    """The same requests with nothing happening to the server."""
    async with Crowd(url, bodies) as crowd:
        return await crowd.ends()
