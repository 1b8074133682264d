"""Any process dies or hangs at any moment: every stream ends with the text that it would have had.

A few of the cases run with every test run; `make chaos` runs all of them. With CHAOS_REPORT=FILE
each case adds a line of JSON to the file: the longest pause that a client saw and the time until
the server was whole again.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from reference_models import VOCABULARY, write_model
from served import Served, served
from streams import Crowd, Followed, requests, undisturbed
from victims import children, find, nothing_held, whole_again

VICTIMS = {
    "router": ("router",),
    "tokenizer": ("tokenizer",),
    "scheduler": ("scheduler",),
    "worker": ("worker",),
    "router and engine": ("router", "scheduler", "worker"),
}
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
STATES = ("idle", "prefill", "decode", "streaming")
FAST = {
    ("router", "streaming"),
    ("tokenizer", "streaming"),
    ("scheduler", "prefill"),
    ("worker", "streaming"),
    ("router and engine", "decode"),
}


@pytest.fixture(scope="module", params=["tiny", pytest.param("demo", marks=pytest.mark.chaos)])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    flags = ["--device", "cpu", "--dtype", "float32", "--threads", "1"]
    flags += ["--max-num-batched-tokens", "64", "--max-num-seqs", "40"]
    if request.param == "tiny":
        flags.append(str(write_model("qwen3", tmp_path_factory.mktemp("models") / "tiny")))
    with served(*flags) as running:
        yield running


def bodies(state: str, seed: int) -> list[dict[str, Any]]:
    shape = {
        "idle": (4, 20, 40, True),
        "prefill": (8, 600, 40, True),
        "decode": (4, 20, 400, False),
        "streaming": (32, 20, 400, True),
    }
    count, prompt_tokens, max_tokens, streamed = shape[state]
    return requests(
        count,
        seed=seed,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        vocabulary=VOCABULARY,
        streamed=streamed,
    )


async def strike(
    server: Served, victims: list[psutil.Process], number: int, state: str, asked: list[Any]
) -> tuple[list[Followed], float]:
    """Send the signal when the requests are in the state; returns what came of them, and when."""
    if state == "idle":
        signal_all(victims, number)
        return [], time.monotonic()
    async with Crowd(server.url, asked) as crowd:
        if state == "prefill":
            await crowd.until_accepted()
            assert not all(followed.arrivals for followed in crowd.followed), "too late"
        elif state == "streaming":
            await crowd.until(5)
        else:
            await until_running(server)
        signal_all(victims, number)
        struck = time.monotonic()
        return await crowd.ends(), struck


async def until_running(server: Served) -> None:
    """Wait until the engine has told that it runs requests, as those that stream nothing cannot."""
    async with asyncio.timeout(60):
        while True:
            metrics = await asyncio.to_thread(server.metrics)
            if metrics.get("penstock:num_requests_running", 0.0) > 0:
                return
            await asyncio.sleep(0.01)


def signal_all(victims: list[psutil.Process], number: int) -> None:
    for victim in victims:
        victim.send_signal(number)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: signal.Signals(number).name)
@pytest.mark.parametrize(
    ("roles", "state"),
    [
        pytest.param(roles, state, marks=() if (roles, state) in FAST else pytest.mark.chaos)
        for roles in VICTIMS
        for state in STATES
    ],
)
def test_every_stream_ends_as_if_nothing_had_happened(
    server: Served, roles: str, state: str, number: int, report: Callable[..., None]
) -> None:
    asked = bodies(state, seed=hash_of(roles, state, number))
    count = len(children(server))
    victims = [find(server, role) for role in VICTIMS[roles]]
    followed, struck = asyncio.run(strike(server, victims, number, state, asked))
    recovery = whole_again(server, victims, count, struck)
    report(
        pause=max((one.longest_pause(struck) for one in followed), default=0.0), recovery=recovery
    )
    expected = asyncio.run(undisturbed(server.url, asked))
    assert all(one.done and one.completion_tokens for one in expected), expected
    if state != "idle":
        assert [one.verdict() for one in followed] == [one.verdict() for one in expected]
    nothing_held(server)


def hash_of(roles: str, state: str, number: int) -> int:
    """A seed of its own for each case: no prompt of one is in the cache of another."""
    return 100 * list(VICTIMS).index(roles) + 10 * STATES.index(state) + SIGNALS.index(number)
