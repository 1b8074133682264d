"""Many random mishaps in a row under load: nothing hangs, and no text is ever wrong.

CHAOS_ROUNDS and CHAOS_SEED choose how many and which.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from support.chaos.left_behind import orphans, own_place
from support.chaos.mishaps import Mishaps
from support.chaos.streams import PATIENCE, Crowd, Followed, requests, undisturbed
from support.chaos.victims import nothing_held
from support.pipeline.reference_models import VOCABULARY, write_model
from support.pipeline.served import Served, leftovers, served

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(18000)]

ROUNDS = int(os.environ.get("CHAOS_ROUNDS", "200"))
SEED = int(os.environ.get("CHAOS_SEED", "1"))
CLIENTS = 12
ANSWERS = 3
"""Right ones after each mishap, before the next."""
RETRY_SECONDS = 0.2
"""A client that was turned away comes back no sooner, as those of users do."""
CUT = "ended with its frontend"
SETTINGS = {
    "PENSTOCK_DEVICE": "cpu",
    "PENSTOCK_DTYPE": "float32",
    "PENSTOCK_THREADS": "1",
    "PENSTOCK_MAX_NUM_SEQS": "40",
}


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the sockets of every process that the test starts go."""
    with own_place() as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
        yield folder


class Load:
    """Clients that ask one of a few requests again and again, some hanging up in the midst."""

    def __init__(self, url: str, bodies: list[dict[str, Any]], texts: list[Followed]) -> None:
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._url = url
        self._bodies = bodies
        self._texts = texts
        self._rng = random.Random(SEED + 1)
        self._stop = asyncio.Event()
        self._tasks = [asyncio.create_task(self._client()) for _ in range(CLIENTS)]

    async def _client(self) -> None:
        while not self._stop.is_set():
            number = self._rng.randrange(len(self._bodies))
            async with Crowd(self._url, [self._bodies[number]]) as crowd:
                if self._rng.random() < 0.1:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(crowd.until(self._rng.randrange(1, 30)), 5.0)
                    self._count("hung up")
                    continue
                (followed,) = await crowd.ends()
            self._judge(followed, self._texts[number])
            if followed.error:
                await asyncio.sleep(RETRY_SECONDS)

    def _judge(self, followed: Followed, expected: Followed) -> None:
        """A request that hangs ends with an error of its client's, so it counts as wrong.

        A frontend that comes back late tells its clients so, if it still can."""
        ended = followed.cut or followed.error == "the server is shutting down; try again"
        if followed.verdict() == expected.verdict():
            self._count("right")
        elif followed.status == 503 and "try again" in followed.error:
            self._count("turned away")
        elif ended and not followed.done and expected.text.startswith(followed.text):
            self._count(CUT)
        else:
            self.wrong.append(f"{followed.verdict()} instead of {expected.verdict()}")

    def _count(self, outcome: str) -> None:
        self.outcomes[outcome] += 1

    async def goes_on(self) -> None:
        """Wait until a few more requests have ended well."""
        enough = self.outcomes["right"] + ANSWERS
        async with asyncio.timeout(PATIENCE):
            while self.outcomes["right"] < enough and not self.wrong:
                await asyncio.sleep(0.05)

    async def end(self) -> None:
        self._stop.set()
        await asyncio.gather(*self._tasks)


def listeners(port: int) -> list[Any]:
    connections = psutil.net_connections("tcp")
    return [c for c in connections if c.laddr and c.laddr.port == port and c.status == "LISTEN"]


def mixed(count: int) -> list[dict[str, Any]]:
    """Requests, every third of which does not stream."""
    bodies = requests(
        count, seed=SEED, prompt_tokens=20, max_tokens=250, vocabulary=VOCABULARY, streamed=True
    )
    for body in bodies[::3]:
        del body["stream_options"]
        body["stream"] = False
    return bodies


async def under_load(server: Served, mishaps: Mishaps, bodies: list[dict[str, Any]]) -> Load:
    texts = await undisturbed(server.url, bodies)
    assert all(one.done for one in texts), texts
    load = Load(server.url, bodies, texts)
    for number in range(ROUNDS):
        await asyncio.to_thread(mishaps.one)
        await load.goes_on()
        assert not load.wrong, f"after round {number}, {mishaps.happened}: {load.wrong[:3]}"
    await asyncio.to_thread(mishaps.end)
    await load.end()
    return load


def test_random_mishaps_under_load_cost_no_text(
    place: Path, tmp_path: Path, report: Callable[..., None]
) -> None:
    folder = write_model("qwen3", tmp_path / "tiny")
    flags = ["--tokenizers", "2", "--frontends", "2", "--data-parallel-size", "2", str(folder)]
    began = time.monotonic()
    with served(*flags, environment=SETTINGS) as server:
        mishaps = Mishaps(server, folder, SETTINGS, SEED)
        try:
            load = asyncio.run(under_load(server, mishaps, mixed(24)))
        finally:
            mishaps.close()
        nothing_held(server)
        port = urlsplit(server.url).port
        assert port and listeners(port)
    report(
        rounds=ROUNDS,
        seed=SEED,
        seconds=round(time.monotonic() - began),
        outcomes=load.outcomes,
        mishaps=mishaps.happened,
        whole_median={k: round(statistics.median(s), 1) for k, s in mishaps.seconds.items()},
        whole_worst={k: round(max(s), 1) for k, s in mishaps.seconds.items()},
    )
    assert load.wrong == []
    assert load.outcomes["right"] >= ANSWERS * ROUNDS
    assert load.outcomes[CUT] <= CLIENTS * mishaps.frontends_struck
    assert load.outcomes["turned away"] <= 0.05 * load.outcomes.total()
    assert leftovers(place) == []
    assert listeners(port) == []
    assert orphans(place) == []
