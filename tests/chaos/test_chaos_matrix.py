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

import pytest
from support.chaos.states import FLAGS, STATES, act_in, bodies
from support.chaos.streams import undisturbed
from support.chaos.victims import children, find, nothing_held, whole_again
from support.pipeline.served import Served, served

pytestmark = pytest.mark.timeout(400)

VICTIMS = {
    "router": ("router",),
    "tokenizer": ("tokenizer",),
    "scheduler": ("scheduler",),
    "worker": ("worker",),
    "router and engine": ("router", "scheduler", "worker"),
}
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
FAST = {
    ("scheduler", "prefill", signal.SIGSTOP),
}


@pytest.fixture(scope="module", params=["tiny", pytest.param("demo", marks=pytest.mark.chaos)])
def server(request: pytest.FixtureRequest) -> Iterator[Served]:
    if request.param == "tiny":
        yield request.getfixturevalue("tiny_server")
        return
    with served(*FLAGS) as running:
        yield running


@pytest.mark.parametrize(
    ("roles", "state", "number"),
    [
        pytest.param(
            roles,
            state,
            number,
            marks=() if (roles, state, number) in FAST else pytest.mark.chaos,
            id=f"{roles}-{state}-{number.name}",
        )
        for roles in VICTIMS
        for state in STATES
        for number in SIGNALS
    ],
)
def test_every_stream_ends_as_if_nothing_had_happened(
    server: Served, roles: str, state: str, number: int, report: Callable[..., None]
) -> None:
    asked = bodies(state, seed=hash_of(roles, state, number))
    count = len(children(server))
    victims = [find(server, role) for role in VICTIMS[roles]]
    struck = 0.0

    def strike() -> None:
        nonlocal struck
        struck = time.monotonic()
        for victim in victims:
            victim.send_signal(number)

    followed = asyncio.run(act_in(server.url, state, asked, strike))
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
