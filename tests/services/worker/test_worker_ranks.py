"""What a rank other than the first says: only that it has failed, until it is heard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.protocol.config import ClusterConfig, Config, DeviceConfig
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.steps import (
    Attach,
    Chunk,
    NewSlot,
    SlotSampling,
    StepFailed,
    StepPlan,
)
from penstock.services.worker.null_engine import NullExecutor
from penstock.services.worker.service import WorkerService

EPOCH = 5


class Rank:
    """The worker of rank 1, and what it has told of its steps."""

    def __init__(self, router: str) -> None:
        cluster = ClusterConfig(router=router, rank=1, tensor_parallel_size=2)
        device = DeviceConfig(device="null")
        self.service = WorkerService(Config(cluster=cluster, device=device))
        self.service.executor = NullExecutor(EngineSizes(8, 16, 2, 32, 64, 100), [])
        self.failures: list[int] = []
        self._take(Attach(EPOCH, self.service.mailbox.address))
        self.service.mailbox.send = self._sent  # type: ignore[method-assign]

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
