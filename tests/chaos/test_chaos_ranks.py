"""A rank of a divided engine is killed or stops, or its links break, under 32 streams: every text
is the one that one worker gives, and nothing is left behind.

With CHAOS_REPORT=FILE each case adds a line of JSON to the file: the longest pause that a client
saw and the time until all ranks were back.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from support.chaos.broken_links import break_all, links_of
from support.chaos.left_behind import named_memory, orphans, own_place
from support.chaos.streams import Crowd, Followed, requests, undisturbed
from support.chaos.victims import children, find, nothing_held, whole_again
from support.pipeline.served import Served, leftovers, served

from penstock.loadtest.models.make_model import make_model

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

FLAGS = (
    *("--device", "cpu", "--dtype", "float32", "--threads", "1", "--max-num-seqs", "40"),
    *("--num-kv-blocks", "500", "--max-model-len", "512"),
)
LAYOUTS = [
    # Tensor, pipeline, data
    (2, 1, 1),
    (4, 1, 1),
    (1, 2, 1),
    (1, 3, 1),
    (2, 2, 1),
    (2, 1, 2),
]
BROKEN = "links"
FAULTS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, BROKEN: None}
STREAMS = requests(32, seed=26, prompt_tokens=20, max_tokens=120, vocabulary=256, streamed=True)


class Divided(NamedTuple):
    server: Served
    ranks: int
    """Of each engine."""
    engines: int

    def engine(self, worker: int) -> list[psutil.Process]:
        """The ranks of the engine that has a worker."""
        first = worker // self.ranks * self.ranks
        return [find(self.server, "worker", first + rank) for rank in range(self.ranks)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, of which three stages have 2, 1 and 1; four ranks share two KV heads."""
    path = tmp_path_factory.mktemp("models") / "divided"
    made: Path = make_model(path, hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=2)
    return made


@pytest.fixture(scope="module")
def of_one(folder: Path) -> list[Followed]:
    """What one worker answers."""
    with served(*FLAGS, str(folder)) as server:
        found = asyncio.run(undisturbed(server.url, STREAMS))
    assert all(one.done and one.completion_tokens == 120 for one in found)
    return found


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda sizes: "tp{}-pp{}-dp{}".format(*sizes))
def divided(
    request: pytest.FixtureRequest, folder: Path, of_one: list[Followed]
) -> Iterator[Divided]:
    """When it ends, no process, socket or folder of the server's is left."""
    tensor, pipeline, data = request.param
    flags = [f"--tensor-parallel-size={tensor}", f"--pipeline-parallel-size={pipeline}"]
    flags += [f"--data-parallel-size={data}", str(folder)]
    with own_place() as place:
        environment = {"XDG_RUNTIME_DIR": str(place)}
        with served(*FLAGS, *flags, environment=environment) as running:
            yield Divided(running, tensor * pipeline, data)
        assert leftovers(place) == []
        assert orphans(place) == []


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("rank", ["first", "middle", "last"])
def test_a_lost_rank_or_link_changes_no_stream_and_leaves_nothing(
    divided: Divided, rank: str, fault: str, of_one: list[Followed], report: Callable[..., None]
) -> None:
    """first: rank 0, which answers for its engine; middle: of three stages the one between, of two
    with two ranks each the first; last: of the last engine."""
    server = divided.server
    if rank == "middle" and divided.ranks < 3:
        pytest.skip("two ranks are the first and the last")
    last = divided.ranks * divided.engines - 1
    number = {"first": 0, "middle": divided.ranks // 2, "last": last}[rank]
    count, struck = len(children(server)), 0.0
    engine, victim = divided.engine(number), find(server, "worker", number)

    async def with_a_fault() -> list[Followed]:
        nonlocal struck
        with links_to_break(victim, engine, fault) as links:
            async with Crowd(server.url, STREAMS) as crowd:
                await crowd.until(5)
                assert not any(one.done for one in crowd.followed), "too late"
                struck = time.monotonic()
                strike(victim, fault, links)
                return await crowd.ends()

    followed = asyncio.run(with_a_fault())
    pause = max(one.longest_pause(struck) for one in followed)
    recovery = whole_again(server, engine, count, struck, within=180)
    print(f"longest pause {pause:.2f} s, all ranks back after {recovery:.1f} s")
    report(pause=round(pause, 2), recovery=round(recovery, 1))
    assert [one.verdict() for one in followed] == [one.verdict() for one in of_one]
    nothing_held(server)
    assert named_memory(server.processes()) == []


@contextlib.contextmanager
def links_to_break(
    victim: psutil.Process, engine: list[psutil.Process], fault: str
) -> Iterator[list[socket.socket]]:
    """Copies of the victim's sockets, where its links are to be broken. Of a process that is to be
    killed there must be none: they would keep its connections open, and the other ranks wait."""
    if fault != BROKEN:
        yield []
        return
    with links_of(victim, [one for one in engine if one != victim]) as links:
        assert links, "the ranks have no connection"
        yield links


def strike(victim: psutil.Process, fault: str, links: list[socket.socket]) -> None:
    number = FAULTS[fault]
    if number is None:
        break_all(links)
    else:
        os.kill(victim.pid, number)
