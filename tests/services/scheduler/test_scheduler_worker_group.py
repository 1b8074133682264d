"""The ranks of an engine, as the scheduler sees them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from penstock.protocol.process.plain_structlog import Logger
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.membership import Capacity, Identity, Peer, Phase
from penstock.protocol.wire.messages.steps import Attach, Attached, StepPlan
from penstock.services.scheduler.worker_group import WorkerGroup

SIZES = EngineSizes(100, 16, 4, 64, 256, 1000)


def worker(rank: int, incarnation: int, phase: str = Phase.READY, fingerprint: str = "a") -> Peer:
    identity = Identity(incarnation, "h", "0", rank, "model", fingerprint=fingerprint)
    address = f"ipc:///{incarnation}"
    return Peer("worker", address, incarnation, identity, phase, "", Capacity(), 0)


class World:
    """A group and what it sends."""

    def __init__(self, size: int) -> None:
        self.sent: list[tuple[str, Message]] = []
        self.refusing: set[str] = set()
        self.complaints: list[str] = []
        log = Complaints(self.complaints.append)
        self.group = WorkerGroup(size, "ipc:///s", self.send, 7, log)
        self.now = 0.0

    def send(self, to: str, message: Message) -> bool:
        self.sent.append((to, message))
        return to not in self.refusing

    def look(self, *workers: Peer) -> dict[str, Attach]:
        """What a look a second later sends, by address."""
        self.now += 1.0
        self.sent.clear()
        self.group.look(workers, self.now)
        return {to: message for to, message in self.sent if isinstance(message, Attach)}

    def attach(self, peer: Peer, **changes: object) -> Attached | None:
        sizes = msgspec.structs.replace(SIZES, **changes)
        answer = Attached(self.group.epoch, peer.identity.rank, sizes)
        return self.group.take(peer.incarnation, answer)


class Complaints(Logger):
    """A log that keeps its errors."""

    def __init__(self, take: Callable[[str], None]) -> None:
        self._take = take

    def error(self, event: str, **_: object) -> None:
        self._take(event)


RANKS = [worker(0, 10), worker(1, 11), worker(2, 12)]


def formed(size: int = 3) -> World:
    world = World(size)
    world.look(*RANKS[:size])
    for peer in RANKS[:size]:
        world.attach(peer)
    assert world.group.attached
    return world


def test_nobody_is_attached_before_all_ranks_are_there_and_loaded() -> None:
    world = World(3)
    assert world.look(RANKS[0], RANKS[2]) == {}
    assert world.group.note == "waiting for rank 1 of 3 workers"
    assert world.look(*RANKS[:2], worker(2, 12, Phase.LOADING)) == {}
    assert "rank 2 loading" in world.group.note
    asked = world.look(*RANKS)
    assert list(asked) == [peer.address for peer in RANKS]
    assert {tuple(attach.group) for attach in asked.values()} == {(10, 11, 12)}


def test_all_ranks_answer_for_the_epoch_before_the_group_is_attached() -> None:
    world = World(3)
    world.look(*RANKS)
    epoch = world.group.epoch
    assert world.attach(RANKS[0]) is None
    assert world.group.take(11, Attached(epoch - 1, 1, SIZES)) is None
    assert world.group.take(99, Attached(epoch, 1, SIZES)) is None
    assert list(world.look(*RANKS)) == [RANKS[1].address, RANKS[2].address]
    assert world.attach(RANKS[2], num_blocks=90) is None
    whole = world.attach(RANKS[1], num_blocks=95, max_model_len=200)
    assert whole is not None
    assert whole.sizes == msgspec.structs.replace(SIZES, num_blocks=90, max_model_len=200)
    assert world.look(*RANKS) == {}


@pytest.mark.parametrize(
    ("changes", "words"), [({"block_size": 32}, "block_size of rank 0 is 16, of rank 1 32")]
)
def test_ranks_of_other_sizes_are_refused_by_name(changes: dict[str, int], words: str) -> None:
    world = World(2)
    for _ in range(3):
        world.look(*RANKS[:2])
        world.attach(RANKS[0])
        assert world.attach(RANKS[1], **changes) is None
    assert not world.group.attached
    (complaint,) = world.complaints
    assert words in complaint


def test_ranks_of_another_model_are_refused_by_name() -> None:
    world = World(2)
    other = worker(1, 11, fingerprint="b")
    world.look(RANKS[0], other)
    world.attach(RANKS[0])
    assert world.attach(other) is None
    assert "fingerprint) of rank 0 is a, of rank 1 b" in world.complaints[0]


def test_ranks_that_do_other_tasks_are_refused_by_name() -> None:
    world = World(2)
    world.look(*RANKS[:2])
    epoch = world.group.epoch
    assert world.group.take(10, Attached(epoch, 0, SIZES, tasks=["embed", "score"])) is None
    assert world.group.take(11, Attached(epoch, 1, SIZES, tasks=["embed"])) is None
    assert not world.group.attached
    assert "tasks of rank 0 is embed, score, of rank 1 embed" in world.complaints[0]


def test_the_tasks_of_a_group_are_those_of_all_its_ranks_in_any_order() -> None:
    world = World(2)
    world.look(*RANKS[:2])
    epoch = world.group.epoch
    assert world.group.take(11, Attached(epoch, 1, SIZES, tasks=["score", "embed"])) is None
    whole = world.group.take(10, Attached(epoch, 0, SIZES, tasks=["embed", "score"]))
    assert whole is not None
    assert whole.tasks == ["embed", "score"]


def test_a_worker_whose_rank_is_none_of_the_engines_is_refused_by_name() -> None:
    world = World(1)
    assert world.look(RANKS[0], worker(1, 11)) == {}
    assert world.complaints == [
        "there is a worker of rank 1, but the engine has 1 by --tensor-parallel-size and "
        "--pipeline-parallel-size"
    ]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_one_lost_rank_ends_the_group_and_the_others_are_told(rank: int) -> None:
    world = formed()
    epoch = world.group.epoch
    assert world.group.lost([99]) == ""
    assert world.group.lost([RANKS[rank].incarnation]) == f"worker of rank {rank}"
    assert not world.group.attached
    assert not world.group.send(StepPlan(epoch, 1, True, [], [], [], []))
    left = [peer for peer in RANKS if peer.identity.rank != rank]
    for _ in range(2):
        told = world.look(*left, worker(rank, 20))
        assert list(told) == [peer.address for peer in left]
        assert not any(peer.incarnation in told[peer.address].group for peer in left)
    fresh = [worker(0, 30), worker(1, 31), worker(2, 32)]
    assert {tuple(attach.group) for attach in world.look(*fresh).values()} == {(30, 31, 32)}
    assert world.group.epoch == epoch + 1
    assert world.attach(fresh[0]) is world.attach(fresh[1]) is None
    assert world.group.take(12, Attached(epoch, 2, SIZES)) is None
    assert world.attach(fresh[2]) is not None


def test_a_rank_of_a_former_group_that_was_gone_for_a_moment_joins_no_other() -> None:
    """A new router names its members one by one."""
    world = formed()
    assert world.group.lost([RANKS[1].incarnation]) == "worker of rank 1"
    fresh = [worker(0, 30), worker(2, 32)]
    assert list(world.look(RANKS[0], RANKS[2])) == [RANKS[0].address, RANKS[2].address]
    assert list(world.look(*RANKS, *fresh)) == [peer.address for peer in RANKS]


def test_a_worker_alone_that_was_gone_for_a_moment_is_attached_anew() -> None:
    world = formed(1)
    assert world.group.lost([RANKS[0].incarnation]) == "worker"
    assert world.look() == {}
    assert world.look(RANKS[0])[RANKS[0].address].group == [RANKS[0].incarnation]
    assert world.attach(RANKS[0]) is not None


def test_every_rank_gets_every_plan_and_one_that_cannot_fails_it() -> None:
    world = formed()
    plan = StepPlan(world.group.epoch, 1, True, [], [], [], [])
    world.sent.clear()
    assert world.group.send(plan)
    assert world.sent == [(peer.address, plan) for peer in RANKS]
    world.refusing = {RANKS[1].address}
    world.sent.clear()
    assert not world.group.send(plan)
    assert len(world.sent) == 3


def test_rank_0_speaks_for_all_and_strangers_for_nobody() -> None:
    group = formed().group
    assert [group.is_first(one) for one in (10, 11, 12, 99)] == [True, False, False, False]
    assert [group.has(one) for one in (10, 11, 12, 99)] == [True, True, True, False]
