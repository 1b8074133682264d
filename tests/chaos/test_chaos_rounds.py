"""Many random mishaps in a row under load: nothing hangs, and no text is ever wrong."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from reference_models import VOCABULARY, write_model
from served import Served, leftovers, served, start_service
from streams import Crowd, Followed, requests, undisturbed
from victims import children, find, nothing_held, whole_again

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(18000)]

ROUNDS = int(os.environ.get("CHAOS_ROUNDS", "200"))
SEED = int(os.environ.get("CHAOS_SEED", "1"))
ROLES = ("router", "tokenizer", "scheduler", "worker", "frontend")
CLIENTS = 12


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Where the servers' sockets go."""
    folder = Path("/tmp") / f"chaos{os.getpid()}"
    folder.mkdir(mode=0o700)
    yield folder
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()


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
                    self.outcomes["hung up"] += 1
                    continue
                (followed,) = await crowd.ends()
            self._judge(followed, self._texts[number])
            if followed.error:
                await asyncio.sleep(0.2)

    def _judge(self, followed: Followed, expected: Followed) -> None:
        if followed.verdict() == expected.verdict():
            self.outcomes["right"] += 1
        elif followed.status == 503 and "try again" in followed.error:
            self.outcomes["turned away"] += 1
        elif followed.cut:
            self.outcomes["cut off with its frontend"] += 1
            if not expected.text.startswith(followed.text):
                self.wrong.append(f"{followed.text[-80:]} is no beginning of the text")
        else:
            self.wrong.append(f"{followed.verdict()} instead of {expected.verdict()}")

    async def end(self) -> None:
        self._stop.set()
        await asyncio.gather(*self._tasks)


class Mishaps:
    """What may happen in a round."""

    def __init__(self, server: Served, model: Path) -> None:
        self.happened: Counter[str] = Counter()
        self._server = server
        self._model = str(model)
        self._rng = random.Random(SEED)
        self._port = str(urlsplit(server.url).port)
        self._added: list[subprocess.Popen[str]] = []
        self._count = len(children(server))

    def one(self) -> float:
        """Something happens; returns the seconds until the server is whole again."""
        began = time.monotonic()
        kind = self._rng.choice(("kill", "kill", "stop", "two", "add", "remove", "crash"))
        self.happened[kind] += 1
        victims = []
        if kind in ("kill", "stop", "two"):
            roles = self._rng.sample(ROLES, 2 if kind == "two" else 1)
            number = signal.SIGSTOP if kind == "stop" else signal.SIGKILL
            victims = [find(self._server, role) for role in roles]
            for victim in victims:
                victim.send_signal(number)
                time.sleep(self._rng.random() * 0.2)
        elif kind == "add" and len(self._added) < 4:
            service = self._rng.choice(("tokenizer", "frontend"))
            flags = ["--port", self._port] if service == "frontend" else [self._model]
            self._added.append(start_service(self._server, service, *flags))
        elif self._added:
            process = self._added.pop(self._rng.randrange(len(self._added)))
            process.send_signal(signal.SIGTERM if kind == "remove" else signal.SIGKILL)
            process.communicate(timeout=60)
        return whole_again(self._server, victims, self._count, began)

    def end(self) -> None:
        for process in self._added:
            process.terminate()
            process.communicate(timeout=60)


def orphans(known: set[int]) -> list[str]:
    """Processes of Penstock that belong to nobody any more."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(process.cmdline())
            if process.pid not in known and process.ppid() == 1 and "penstock" in command:
                found.append(command)
    return found


async def under_load(
    server: Served, model: Path, bodies: list[dict[str, Any]]
) -> tuple[Load, Mishaps, list[float]]:
    texts = await undisturbed(server.url, bodies)
    assert all(one.done for one in texts), texts
    load = Load(server.url, bodies, texts)
    mishaps = Mishaps(server, model)
    recoveries = []
    for number in range(ROUNDS):
        recoveries.append(await asyncio.to_thread(mishaps.one))
        assert not load.wrong, f"after round {number}: {load.wrong[:3]}"
    await load.end()
    await asyncio.to_thread(mishaps.end)
    return load, mishaps, recoveries


def test_random_mishaps_under_load_cost_no_text(
    place: Path, tmp_path: Path, report: Callable[..., None]
) -> None:
    folder = write_model("qwen3", tmp_path / "tiny")
    flags = ["--device", "cpu", "--dtype", "float32", "--threads", "1", "--max-num-seqs", "40"]
    flags += ["--tokenizers", "2", "--frontends", "2", "--data-parallel-size", "2"]
    bodies = requests(
        24, seed=SEED, prompt_tokens=20, max_tokens=250, vocabulary=VOCABULARY, streamed=True
    )
    settings = {"XDG_RUNTIME_DIR": str(place)}
    with served(*flags, str(folder), environment=settings) as server:
        everyone = {process.pid for process in psutil.process_iter()}
        load, mishaps, recoveries = asyncio.run(under_load(server, folder, bodies))
        nothing_held(server)
        port = urlsplit(server.url).port
    assert load.wrong == []
    assert load.outcomes["right"] > ROUNDS
    assert leftovers(place) == []
    connections = psutil.net_connections("tcp")
    assert not [c for c in connections if c.laddr and c.laddr.port == port and c.status == "LISTEN"]
    assert orphans(everyone) == []
    recoveries.sort()
    report(
        outcomes=load.outcomes,
        mishaps=mishaps.happened,
        recovery_median=recoveries[len(recoveries) // 2],
        recovery_worst=recoveries[-1],
    )
