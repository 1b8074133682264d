"""A head of the queue that has no room costs next to nothing while it waits, and misses nothing."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from support.scheduler.scheduler_harness import Engine, prompt, small

from penstock.services.scheduler.block_manager import BlockManager
from penstock.services.scheduler.head_room import HeadRoom
from penstock.services.scheduler.kv_holder import SequenceHolder


class CountingLookups:
    """How many blocks were looked up in the prefix cache."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        match = BlockManager.match

        def counting(blocks: BlockManager, digests: Iterable[bytes]) -> list[int]:
            digests = list(digests)
            self.count += len(digests)
            return match(blocks, digests)

        monkeypatch.setattr(BlockManager, "match", counting)


def waiting_engine(head: list[int], cached: int) -> Engine:
    """Two sequences decode and fill memory so far that ``head``, whose first tokens are cached, has
    no room."""
    limits = small(num_blocks=64, max_model_len=250, max_num_batched_tokens=250)
    engine = Engine(limits)
    engine.submit(0, head[:cached], max_tokens=1)
    engine.run()
    for request_id in (1, 2):
        engine.submit(request_id, prompt(60, 20 * request_id), max_tokens=60)
    engine.step()
    return engine


def test_a_head_without_room_is_not_looked_up_at_every_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head = prompt(180, 5)
    engine = waiting_engine(head, cached=40)
    engine.submit(3, head, max_tokens=2)
    lookups = CountingLookups(monkeypatch)
    engine.step()
    first = lookups.count
    assert first > 0
    for _ in range(40):
        engine.step()
    assert engine.core.stats().waiting == 1
    assert lookups.count == first
    engine.run()
    assert lookups.count > first
    for request_id in range(4):
        engine.assert_finished(request_id)
    engine.assert_idle()


def test_a_head_starts_as_soon_as_enough_blocks_are_free() -> None:
    head = prompt(180, 5)
    engine = waiting_engine(head, cached=40)
    engine.submit(3, head, max_tokens=2)
    for _ in range(5):
        engine.step()
    assert 3 not in engine.started
    engine.cancel(1)
    engine.cancel(2)
    engine.step()
    assert engine.started[-1] == 3


@pytest.mark.parametrize("seed", range(12))
def test_what_is_passed_over_would_not_have_had_room(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    passed_over = 0
    may_fit = HeadRoom.may_fit

    def checked(room: HeadRoom, holder: SequenceHolder, owed: int) -> bool:
        nonlocal passed_over
        if may_fit(room, holder, owed):
            return True
        passed_over += 1
        kv = room._kv
        assert not room._has_room(holder, kv.num_held(kv.match(holder)), owed)
        return False

    monkeypatch.setattr(HeadRoom, "may_fit", checked)
    engine = Engine(small(num_blocks=14, max_num_batched_tokens=60), policy="priority")
    prefixes = [prompt(24, 11 * number) for number in range(3)]
    for request_id in range(60):
        tokens = [*rng.choice(prefixes)[: rng.randint(1, 24)], *prompt(rng.randint(1, 16), 50)]
        engine.submit(request_id, tokens, rng.randint(1, 18), priority=rng.randint(0, 2))
        for _ in range(rng.randint(0, 5)):
            engine.step()
        if rng.random() < 0.1:
            engine.cancel(rng.randrange(request_id + 1))
    engine.run()
    assert passed_over > 20
    engine.assert_idle()
