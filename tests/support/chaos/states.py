"""What the requests are doing when something happens to the server."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Callable
from typing import Any

from support.chaos.streams import Crowd, Followed, requests
from support.pipeline.reference_models import VOCABULARY

STATES = ("idle", "prefill", "decode", "streaming")
_SHAPES = {
    "idle": (4, 20, 40, True),
    "prefill": (12, 900, 40, True),
    "decode": (4, 20, 400, False),
    "streaming": (32, 20, 400, True),
}
"""Requests, prompt tokens, output tokens, streamed."""
BUDGET = 64
"""Tokens of a step, so that the prompts of ``prefill`` take many."""
FLAGS = (
    *("--device", "cpu", "--dtype", "float32", "--threads", "1"),
    *("--max-num-batched-tokens", str(BUDGET), "--max-num-seqs", "40"),
)
"""Of a server with one of everything."""


def bodies(state: str, seed: int) -> list[dict[str, Any]]:
    """Requests for a state. Another ``seed`` gives other prompts, which no cache has seen."""
    count, prompt_tokens, max_tokens, streamed = _SHAPES[state]
    return requests(
        count,
        seed=seed,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        vocabulary=VOCABULARY,
        streamed=streamed,
    )


async def act_in(
    url: str, state: str, asked: list[dict[str, Any]], act: Callable[[], None]
) -> list[Followed]:
    """Call ``act`` when the requests are in the state; returns what their clients saw.

    Idle: there are none."""
    if state == "idle":
        act()
        return []
    if state == "decode":
        await _until_running(url, False)  # what is told of earlier requests must be over
    async with Crowd(url, asked) as crowd:
        if state == "prefill":
            await crowd.until_accepted()
            assert not all(followed.arrivals for followed in crowd.followed), "too late"
        elif state == "streaming":
            await crowd.until(5)
        else:
            await _until_running(url, True)
        act()
        return await crowd.ends()


async def _until_running(url: str, running: bool) -> None:
    """Wait until the engine has told that it runs requests, as those that stream nothing cannot;
    or that it runs none: it tells twice a second."""
    async with asyncio.timeout(60):
        while bool(await asyncio.to_thread(_running, url)) != running:
            await asyncio.sleep(0.01)


def _running(url: str) -> int:
    with urllib.request.urlopen(url + "/playground/status", timeout=10) as answer:
        return int(json.load(answer)["running"])
