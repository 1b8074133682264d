"""A process dies while clients connect: they wait for its successor, and nobody is turned away.

Only the clients of a frontend that dies lose their connections.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from support.chaos.streams import Crowd, Followed, requests, undisturbed
from support.chaos.victims import ROLES, children, find, nothing_held, whole_again
from support.pipeline.reference_models import VOCABULARY, write_model
from support.pipeline.served import Served, served

pytestmark = pytest.mark.timeout(400)

MOMENTS = (0.1, 0.5, 0.9)
"""When the process dies: parts of the time in which the clients connect."""
CASES = [("tokenizer", 16, MOMENTS[:1])] + [(role, 64, MOMENTS) for role in ROLES]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_model("qwen3", tmp_path_factory.mktemp("models") / "tiny")
    flags = ["--device", "cpu", "--dtype", "float32", "--threads", "1", "--max-num-seqs", "40"]
    with served(*flags, "--frontends", "2", str(folder)) as running:
        yield running


async def killed_meanwhile(
    server: Served, role: str, clients: int, moment: float, seed: int
) -> tuple[list[Followed], list[Followed]]:
    """What the clients saw of whom a process died, and what they would have seen."""
    asked = requests(
        clients, seed=seed, prompt_tokens=20, max_tokens=40, vocabulary=VOCABULARY, streamed=True
    )
    for body in asked[::4]:
        del body["stream_options"]
        body["stream"] = False
    seconds = clients / 32
    count, victim, began = len(children(server)), find(server, role), time.monotonic()
    async with Crowd(server.url, asked, seconds) as crowd:
        await asyncio.sleep(seconds * moment)
        victim.send_signal(signal.SIGKILL)
        followed = await crowd.ends()
    await asyncio.to_thread(whole_again, server, [victim], count, began)
    return followed, await undisturbed(server.url, asked)


@pytest.mark.parametrize(
    ("role", "clients", "moments"),
    [
        pytest.param(
            *case, marks=pytest.mark.chaos if case[1] > 16 else (), id=f"{case[0]}-{case[1]}"
        )
        for case in CASES
    ],
)
def test_who_connects_while_a_process_dies_gets_the_whole_answer(
    request: pytest.FixtureRequest,
    role: str,
    clients: int,
    moments: tuple[float, ...],
    report: Callable[..., None],
) -> None:
    server = request.getfixturevalue("server" if clients > 16 else "tiny_server")
    for moment in moments:
        seed = 1000 * ROLES.index(role) + round(100 * moment)
        followed, expected = asyncio.run(killed_meanwhile(server, role, clients, moment, seed))
        assert all(one.done for one in expected), expected
        pairs = list(zip(followed, expected, strict=True))
        wrong = [got.verdict() for got, wanted in pairs if got.verdict() != wanted.verdict()]
        cut = [got for got in followed if got.cut]
        report(moment=moment, cut=len(cut), wrong=len(wrong))
        if role == "frontend":
            wrong = [one for one in wrong if one not in [got.verdict() for got in cut]]
            assert len(cut) < clients, "the other frontend has clients as well"
        assert wrong == []
        nothing_held(server)
