"""Marks on blocks of the cache: as if each block had its own, at the cost of a run of them."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from typing import NamedTuple

import pytest
from support.counted import instructions

from penstock.services.scheduler import retained_blocks
from penstock.services.scheduler.block_manager import BlockManager
from penstock.services.scheduler.cache_shares import CacheShares
from penstock.services.scheduler.retained_blocks import RetainedBlocks
from penstock.services.scheduler.stats import Counters

TURN = 2
"""Blocks by which a conversation grows."""


class Mark(NamedTuple):
    tenant: str | None
    seconds: int
    until: float
    setting: int
    depth: int

    @property
    def age(self) -> tuple[int, int]:
        """What is set first comes first, of a prefix its end."""
        return self.setting, -self.depth


class PlainMarks:
    """What ``RetainedBlocks`` does, block by block."""

    def __init__(self, most: int, most_each: int) -> None:
        self.most, self.most_each = most, most_each
        self.marks: dict[int, Mark] = {}
        self._settings = 0

    def set(self, blocks: list[int | None], tenant: str, seconds: int, now: float) -> None:
        self._settings += 1
        for depth, block in enumerate(blocks):
            if block is None:
                continue
            new = Mark(tenant or None, seconds, now + seconds, self._settings, depth)
            old = self.marks.get(block, new)
            if old.tenant != new.tenant:
                new = new._replace(tenant=None)
            self.marks[block] = new if old.until <= new.until else old._replace(tenant=new.tenant)

    def oldest(self, tenant: str | None = None) -> int:
        found = [one for one, mark in self.marks.items() if tenant in (None, mark.tenant)]
        return min(found, key=lambda block: self.marks[block].age)

    def cut(self, tenant: str) -> list[int]:
        """End marks until there are not too many."""
        cut: list[int] = []

        def end(block: int) -> None:
            cut.append(block)
            del self.marks[block]

        while self._counts()[tenant] > self.most_each:
            end(self.oldest(tenant))
        while (over := len(self.marks) - self.most) > 0:
            counts = self._counts()
            largest = max(counts, key=lambda one: (counts[one], one), default="")
            spare = counts[largest] - self.most // max(1, len(counts)) if len(counts) > 1 else 0
            if spare <= 0:
                end(self.oldest())
            for _ in range(min(over, spare)):
                end(self.oldest(largest))
        return cut

    def _counts(self) -> Counter[str]:
        return Counter(mark.tenant for mark in self.marks.values() if mark.tenant is not None)


@pytest.mark.parametrize("most_pieces", [1, 64])
@pytest.mark.parametrize("seed", range(4))
def test_each_block_has_the_mark_that_it_would_have_alone(
    seed: int, most_pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains branch, grow, and lose blocks at any place."""
    monkeypatch.setattr(retained_blocks, "MOST_PIECES", most_pieces)
    rng = random.Random(seed)
    known: dict[bytes, int] = {}
    shares = CacheShares(rng.choice([0.3, 0.6, 1.0]), rng.choice([0.3, 1.0]))
    retained = RetainedBlocks(60, shares, Counters(), known.get)
    plain, now = PlainMarks(retained.most, retained.most_each), 0.0
    for block in range(1500):
        chain = "".join(rng.choice("aab") for _ in range(rng.randint(1, 14)))
        names = [chain[: end + 1].encode() for end in range(len(chain))][: retained.most_each]
        match rng.randrange(6):
            case 0 | 1:
                for place, name in enumerate(names):
                    known.setdefault(name, 100 * block + place)
            case 2 | 3:
                tenant, seconds = rng.choice(["", "ann", "bob"]), rng.choice([300, 300, 3600])
                blocks = [known.get(name) for name in names]
                lacked = [one for one in blocks if one is not None and one not in plain.marks]
                plain.set(blocks, tenant, seconds, now)
                assert retained.set(names, 0, tenant, seconds, now) == lacked
                cut = []
                for excess in retained.excess(tenant):
                    cut.append(excess)
                    retained.cut(excess)
                assert cut == plain.cut(tenant)
            case 4 if known:
                name = rng.choice(list(known))
                assert (plain.marks.pop(known[name], None) is None) == (
                    retained.end(known[name]) is None
                )
                if rng.random() < 0.7:
                    del known[name]
            case 5:
                now += rng.choice([0.0, 1.0, 50.0, 200.0])
                while (over := retained.first_over(now)) is not None:
                    assert plain.marks.pop(over).until <= now
                    retained.end(over)
        retained.check()
        assert {
            one: (run.tenant, run.seconds, run.until) for one, run in retained.marks.items()
        } == {one: (mark.tenant, mark.seconds, mark.until) for one, mark in plain.marks.items()}


def turns(length: int, count: int) -> list[int]:
    """Instructions of the interpreter by which a conversation's whole prompt is retained in each of
    some turns, while another one that begins with the same half goes on."""
    manager = BlockManager(3 * length + 100, CacheShares(1.0))

    def known(letter: str, blocks: int) -> list[bytes]:
        half = [f"a{number}" for number in range(length // 2)]
        rest = [f"{letter}{number}" for number in range(blocks - len(half))]
        names = [name.encode() for name in half + rest]
        missing = [name for name in names if manager.find(name) is None]
        table = manager.allocate(len(missing))
        for block, name in zip(table, missing, strict=True):
            manager.cache(block, name, 1)
        return names

    found = []
    for turn in range(count):
        for letter in "bc":
            names = known(letter, length + TURN * turn)
            found.append(instructions(partial(manager.retain, names, "ann", 300, 0.0)))
    return found[4:]


def test_a_turn_costs_what_it_adds_however_long_its_prefix_is() -> None:
    short, long = turns(100, 6), turns(1600, 6)
    assert max(long) < 1.5 * max(short)


def test_a_chain_that_was_marked_in_many_pieces_is_put_together() -> None:
    known = {f"a{number}".encode(): number for number in range(200)}
    retained = RetainedBlocks(200, CacheShares(1.0), Counters(), known.get)
    names = list(known)
    for count in range(200, 0, -1):
        retained.set(names[:count], 0, "ann", 300, float(200 - count))
    assert len(set(retained.marks.values())) == 200
    for now in (200.0, 201.0):
        retained.set(names, 0, "ann", 300, now)
        retained.check()
        assert len(set(retained.marks.values())) == 1
