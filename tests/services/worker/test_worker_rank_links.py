"""Ranks on several hosts talk through encrypted connections, end together, admit nobody else."""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from penstock.protocol.config import ClusterConfig, Config, DeviceConfig
from penstock.protocol.process.participant import Ended
from penstock.protocol.wire.messages.steps import Attach
from penstock.protocol.wire.security import CurveKeys
from penstock.services.worker.executor import Executor
from penstock.services.worker.models.rank_shares import place_of
from penstock.services.worker.rank_group import HostRanks
from penstock.services.worker.rank_links import RankFailed, RankLinks
from penstock.services.worker.rendezvous import EpochMeeting, Rendezvous, rendezvous_of

SECRET, ANOTHER = "a secret of all ranks", "a secret of other ranks"
HERE = "127.0.0.1"


@contextlib.contextmanager
def ends(count: int, *secrets: str) -> Iterator[list[RankLinks]]:
    """secrets: of the first ranks, where they differ."""
    with contextlib.ExitStack() as stack:
        found = []
        for rank in range(count):
            secret = secrets[rank] if rank < len(secrets) else SECRET
            found.append(RankLinks(HERE, HERE, keys=CurveKeys(secret)))
            stack.callback(found[-1].close)
        yield found


def at_once(work: Callable[[int], Any], count: int) -> list[Any]:
    """What each rank returns, or the error that it raises."""

    def guarded(rank: int) -> Any:
        try:
            return work(rank)
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(guarded, range(count)))


def met(links: list[RankLinks], name: str = "group 1", limit_s: float = 20.0) -> list[Any]:
    def meet(rank: int) -> None:
        links[rank].meet(name, links[0].address, rank, len(links), limit_s)

    return at_once(meet, len(links))


def meeting(links: list[RankLinks], rank: int) -> EpochMeeting:
    rendezvous = Rendezvous(HERE, rank=rank, size=len(links), links=links[rank])
    return EpochMeeting("group 1", rendezvous, links[0].address)


def test_ranks_of_stages_compute_together_through_links() -> None:
    tensor, stages = 2, 2
    with ends(tensor * stages) as links:

        def work(rank: int) -> tuple[list[float], ...]:
            ranks = HostRanks(place_of(rank, tensor, stages), 4)
            ranks.meet(meeting(links, rank))
            own = torch.full((2, 2), float(rank))
            summed = ranks.sum(own)[0].tolist()
            columns = ranks.columns(torch.full((1, 2), float(rank)))[0].tolist()
            first = ranks.from_first(torch.full((2,), float(rank)))
            gathered = [
                *ranks.gather(torch.full((1,), float(rank)))[:, 0].tolist(),
                *first.tolist(),
            ]
            drawn = torch.tensor([7 if rank == 0 else 0, 8 if rank == 0 else 0])
            told = ranks.agree(drawn)
            passed = torch.full((1, 3), float(rank), dtype=torch.bfloat16)
            if ranks.place.is_last:
                ranks.take(passed)
            else:
                ranks.hand_on(passed)
            told()
            return summed, columns, drawn.tolist(), passed[0].tolist(), gathered

        got = at_once(work, len(links))
    sums = {rank: found[0] for rank, found in enumerate(got)}
    assert sums == {0: [1.0, 1.0], 1: [1.0, 1.0], 2: [5.0, 5.0], 3: [5.0, 5.0]}
    assert got[0][1] == [0.0, 0.0, 1.0, 1.0]
    assert got[2][1] == [2.0, 2.0, 3.0, 3.0]
    assert [found[2] for found in got] == [[7, 8]] * 4
    assert [found[3] for found in got] == [[2.0] * 3, [3.0] * 3, [2.0] * 3, [3.0] * 3]
    of_last, of_first = [0.0, 1.0, 0.0, 0.0], [2.0, 3.0, 2.0, 2.0]
    assert [found[4] for found in got] == [of_last, of_last, of_first, of_first]


def test_a_rank_with_another_secret_does_not_join_and_both_sides_say_so() -> None:
    with ends(2, SECRET, ANOTHER) as links:
        here, there = met(links, limit_s=3.0)
        assert isinstance(there, RankFailed) and "--secret" in str(there), there
        assert isinstance(here, RankFailed) and "rank 1 has sent nothing for 3 s" in str(here)
        said: list[str] = []
        deadline = time.monotonic() + 30
        while not said and time.monotonic() < deadline:
            time.sleep(0.1)
            said = links[0].complaints()
        (refusal,) = said
        assert (
            f"to tcp://{links[0].address} in the handshake: a process there has another" in refusal
        )


def test_whoever_waits_for_a_rank_that_ends_is_told_at_once() -> None:
    with ends(3) as links:
        assert met(links) == [None] * 3
        threading.Timer(0.3, links[2].close).start()
        began = time.monotonic()
        first, second = at_once(lambda rank: links[rank].receive(2, "all", 60.0), 2)
        assert time.monotonic() - began < 20
        for failure in (first, second):
            assert isinstance(failure, RankFailed) and "rank 2 is gone" in str(failure)
        with pytest.raises(RankFailed, match="rank 2 is gone"):
            links[0].send(1, "all", b"")
        links[2] = RankLinks(HERE, HERE, keys=CurveKeys(SECRET))
        with contextlib.closing(links[2]):
            assert met(links, "group 2") == [None] * 3
            links[2].send(0, "all", b"again")
            assert links[0].receive(2, "all", 20.0) == b"again"


def test_what_was_sent_in_a_former_meeting_does_not_come_in_the_next() -> None:
    with ends(2) as links:
        assert met(links) == [None, None]
        links[1].send(0, "all", b"old")
        assert met(links, "group 2") == [None, None]
        links[1].send(0, "all", b"new")
        assert links[0].receive(1, "all", 20.0) == b"new"


def test_a_value_that_one_rank_sets_comes_to_all_others() -> None:
    with ends(3) as links:

        def work(rank: int) -> bytes | None:
            store = meeting(links, rank).store(datetime.timedelta(seconds=20))
            meeting(links, rank).links()
            if rank == 1:
                store.set("id", "abc")
                return None
            found: bytes = store.get("id")
            return found

        assert at_once(work, 3) == [b"abc", None, b"abc"]


class Nobody:
    """An executor that must not be asked to meet anybody."""

    def meet(self, meeting: object) -> None:
        raise AssertionError("NCCL is not to be used here")


@pytest.mark.parametrize("first", ["10.0.0.5:9", HERE + ":9"])
def test_nccl_is_not_used_between_hosts_unless_their_network_is_said_to_be_closed(
    first: str,
) -> None:
    with ends(1) as links:
        rendezvous = Rendezvous(HERE, rank=1, size=2, links=links[0], on_gpus=True)
        executor: Executor = Nobody()  # type: ignore[assignment]
        attach = Attach(1, "", [], first)
        if first.startswith(HERE):
            with pytest.raises(Ended, match="NCCL is not to be used here"):
                rendezvous.meet(executor, attach)
        else:
            with pytest.raises(Ended, match=r"rank 0 .* 10\.0\.0\.5.*--rank-traffic plain"):
                rendezvous.meet(executor, attach)


@pytest.mark.parametrize(
    ("mailbox", "changed", "linked"),
    [
        ("tcp://127.0.0.1:5", {}, True),
        ("tcp://127.0.0.1:5", {"rank_traffic": "plain"}, False),
        ("tcp://127.0.0.1:5", {"secret": ""}, False),
        ("ipc:///tmp/x.sock", {}, False),
    ],
)
def test_ranks_use_links_over_tcp_with_a_secret(
    mailbox: str, changed: dict[str, Any], linked: bool
) -> None:
    settings: dict[str, Any] = {"tensor_parallel_size": 2, "secret": SECRET, **changed}
    config = Config(cluster=ClusterConfig(**settings), device=DeviceConfig(device="cpu"))
    rendezvous = rendezvous_of(config, mailbox)
    assert rendezvous is not None
    assert (rendezvous.links is not None) is linked
    assert rendezvous.address.startswith(HERE + ":")
    if rendezvous.links is not None:
        assert rendezvous.address == rendezvous.links.address
        rendezvous.links.close()


def test_the_inbox_of_ranks_stays_within_the_port_range() -> None:
    settings = {"tensor_parallel_size": 2, "secret": SECRET, "port_range": "23450-23489"}
    config = Config(cluster=ClusterConfig(**settings), device=DeviceConfig(device="cpu"))  # type: ignore[arg-type]
    rendezvous = rendezvous_of(config, "tcp://127.0.0.1:5")
    assert rendezvous is not None and rendezvous.links is not None
    assert 23450 <= int(rendezvous.address.rpartition(":")[2]) <= 23489
    rendezvous.links.close()
