"""What a rank other than the first says: only that it has failed, until it is heard. And how it
meets the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import pytest
import torch

from penstock.protocol.config import ClusterConfig, Config, DeviceConfig
from penstock.protocol.process.participant import Ended
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.membership import Capacity, Identity, Peer, Phase
from penstock.protocol.wire.messages.steps import (
    Attach,
    Chunk,
    NewSlot,
    SlotSampling,
    StepFailed,
    StepPlan,
)
from penstock.services.worker.models.rank_shares import place_of
from penstock.services.worker.null_engine import NullExecutor
from penstock.services.worker.rank_group import HostRanks, Meeting
from penstock.services.worker.rendezvous import Rendezvous
from penstock.services.worker.service import WorkerService

EPOCH = 5


class Rank:
    """The worker of rank 1, and what it has told of its steps."""

    def __init__(self, router: str, device: Literal["null", "cpu"] = "null") -> None:
        """device: only on others than the null device ranks compute together."""
        cluster = ClusterConfig(router=router, rank=1, tensor_parallel_size=2)
        config = Config(cluster=cluster, device=DeviceConfig(device=device))
        self.service = WorkerService(config)
        self.service.executor = NullExecutor(EngineSizes(8, 16, 2, 32, 64, 100), [])
        self.failures: list[int] = []
        self.attach(Attach(EPOCH, self.service.mailbox.address))
        self.service.mailbox.send = self._sent  # type: ignore[method-assign]

    def attach(self, message: Attach) -> None:
        """Have it attached, when it has met the others."""
        self.service.on_message(1, message, 0.0)
        while self.service.epoch != message.epoch:
            self.service.work(0.0)
            time.sleep(0.001)

    def _sent(self, address: str, message: Message) -> bool:
        assert isinstance(message, StepFailed)
        assert message.missed, "nothing has raised: plans did not come"
        self.failures.append(message.step)
        return True

    def _take(self, message: Message) -> None:
        self.service.on_message(1, message, 0.0)

    def plan(self, step: int, full: bool = False) -> list[int]:
        """Steps that it says have failed when it gets this plan."""
        self.failures.clear()
        self._take(whole_plan(step) if full else StepPlan(EPOCH, step, False, [], [], [], []))
        return list(self.failures)


def whole_plan(step: int) -> StepPlan:
    sampling = SlotSampling(1.0, 0, 1.0, 1).packed()
    new = NewSlot(0, bytes(12), 3, 0, [], sampling)
    return StepPlan(EPOCH, step, True, [], [new], [], [Chunk(0, 0, 3, True, [1])])


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    rank = Rank(f"ipc://{tmp_path}/router.sock")
    yield rank
    rank.service.mailbox.close()


def test_a_rank_says_that_it_has_failed_at_every_plan_until_a_full_one_comes(rank: Rank) -> None:
    assert rank.plan(1, full=True) == rank.plan(2) == []
    assert rank.plan(4) == [4], "plan 3 was due"
    assert rank.plan(5) == [5], "nobody may have heard it"
    assert rank.plan(6) == [6]
    assert rank.plan(7, full=True) == rank.plan(8) == []


def test_a_rank_that_has_not_got_its_first_plan_says_so_at_the_next(rank: Rank) -> None:
    assert rank.plan(2) == [2]


def test_a_rank_whose_full_plan_is_lost_says_so_at_the_next(rank: Rank) -> None:
    assert rank.plan(1, full=True) == []
    assert rank.plan(3) == [3]
    assert rank.plan(5) == [5], "plan 4 was a full one: a failure of an older step says nothing"


def test_a_full_plan_that_comes_again_after_a_failure_is_not_executed_again(rank: Rank) -> None:
    assert rank.plan(1, full=True) == rank.plan(2) == []
    assert rank.plan(4) == [4], "plan 3 was due"
    assert rank.plan(1, full=True) == [1], "its blocks belong to others by now"
    assert rank.plan(5, full=True) == rank.plan(6) == []


@pytest.fixture
def computing(tmp_path: Path) -> Iterator[Rank]:
    rank = Rank(f"ipc://{tmp_path}/router.sock", "cpu")
    yield rank
    rank.service.mailbox.close()


@pytest.mark.parametrize("full", [False, True])
def test_a_rank_that_computes_with_others_ends_when_it_has_missed_a_plan(
    full: bool, computing: Rank
) -> None:
    assert computing.plan(1, full=True) == computing.plan(2) == []
    with pytest.raises(Ended, match="plan 4 came, plan 3 was due"):
        computing.plan(4, full=full)
    assert not computing.failures, "the others may wait for it in plan 3: nothing can be mended"


def test_ranks_meet_once_in_each_epoch_under_another_name(computing: Rank) -> None:
    met: list[str] = []
    service = computing.service
    assert service.executor is not None
    service.executor.meet = lambda meeting: met.append(meeting.name)  # type: ignore[method-assign]
    for epoch in (EPOCH, EPOCH + 1, EPOCH + 1, EPOCH + 2):
        service.mailbox.send = lambda address, message: True  # type: ignore[method-assign]
        computing.attach(Attach(epoch, service.mailbox.address, [], "127.0.0.1:9"))
    assert len(met) == len(set(met)) == 2


def test_ranks_that_do_not_meet_begin_anew(computing: Rank) -> None:
    def nobody(meeting: Meeting) -> None:
        raise RuntimeError("timed out")

    service = computing.service
    assert service.executor is not None
    service.executor.meet = nobody  # type: ignore[method-assign]
    with pytest.raises(Ended, match=r"have not met at 127.0.0.1:9: RuntimeError: timed out"):
        computing.attach(Attach(EPOCH + 1, "ipc:///s", [], "127.0.0.1:9"))


def other_rank(incarnation: int) -> Peer:
    identity = Identity(incarnation, "h", "0", 0)
    address = f"ipc:///{incarnation}"
    return Peer("worker", address, incarnation, identity, Phase.READY, "", Capacity(), 0)


OTHER = other_rank(7)


@pytest.fixture
def waiting(computing: Rank) -> Iterator[Rank]:
    """It waits for rank 0, which does not come."""
    came = threading.Event()

    def waits(meeting: Meeting) -> None:
        came.wait(60)

    service = computing.service
    assert service.executor is not None
    service.executor.meet = waits  # type: ignore[method-assign]
    service.on_message(1, its_group(computing), 0.0)
    service.work(0.0)
    assert service.epoch == 0, "it has not met the other one"
    yield computing
    came.set()


def its_group(rank: Rank, epoch: int = EPOCH + 1) -> Attach:
    service = rank.service
    group = [OTHER.incarnation, service.mailbox.incarnation]
    return Attach(epoch, service.mailbox.address, group, "127.0.0.1:9")


def test_a_rank_does_not_wait_on_for_one_that_is_gone(waiting: Rank) -> None:
    waiting.service.on_gone({8: other_rank(8)}, 0.0)
    with pytest.raises(Ended, match="rank 0 of its engine is gone"):
        waiting.service.on_gone({OTHER.incarnation: OTHER}, 0.0)


def test_a_rank_does_not_wait_on_in_a_group_that_is_given_up(waiting: Rank) -> None:
    waiting.service.on_message(1, its_group(waiting), 0.0)
    with pytest.raises(Ended, match="a rank of its engine was lost"):
        waiting.service.on_message(1, Attach(EPOCH + 1, "ipc:///s", [0]), 0.0)


def test_a_rank_does_not_wait_on_for_a_scheduler_that_another_has_replaced(waiting: Rank) -> None:
    with pytest.raises(Ended, match="another scheduler asks for it while it waits"):
        waiting.service.on_message(1, its_group(waiting, EPOCH + 2), 0.0)


def test_a_rank_does_not_begin_to_wait_for_one_that_was_gone_before(computing: Rank) -> None:
    service = computing.service
    service.mailbox.send = lambda address, message: True  # type: ignore[method-assign]
    service.on_gone({OTHER.incarnation: OTHER}, 0.0)
    service.participant.peers[OTHER.incarnation] = OTHER
    computing.attach(its_group(computing))  # under a new router it was gone for a moment
    del service.participant.peers[OTHER.incarnation]
    with pytest.raises(Ended, match="rank 0 of its engine is gone"):
        computing.attach(its_group(computing, EPOCH + 2))


@pytest.mark.parametrize("other", ["127.0.0.1", "127.0.0.2"])
def test_ranks_find_each_other_at_the_address_of_the_first_in_every_epoch(other: str) -> None:
    """other: the address of the second one, as of another host."""
    ends = [Rendezvous(host, rank=rank, size=2) for rank, host in enumerate(("127.0.0.1", other))]
    ranks = [HostRanks(place_of(rank, 2, 1), 100) for rank in range(2)]
    assert ends[0].address.startswith("127.0.0.1:") and not ends[1].address

    def attached(rank: int, epoch: int) -> list[float]:
        executor = NullExecutor(EngineSizes(8, 16, 2, 32, 64, 100), [])
        executor.meet = ranks[rank].meet  # type: ignore[method-assign]
        ends[rank].meet(executor, Attach(epoch, "ipc:///s", [7, 9], ends[0].address))
        return ranks[rank].sum(torch.full((2,), rank + 1.0)).tolist()

    with ThreadPoolExecutor(2) as threads:
        for epoch in (3, 4, 9):
            assert list(threads.map(attached, range(2), [epoch] * 2)) == [[3.0, 3.0]] * 2
