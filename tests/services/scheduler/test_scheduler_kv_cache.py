"""The owner of KV memory alone, against a plain model: sequences, transfers, windows, failures.

The model knows what each block holds by content (a group and all tokens up to the block's end) and
under which names blocks can be found. Whatever happens, a prefix that is found holds exactly what
the sequence would compute, it is the longest one, and nothing that is still needed is given back.
"""

from __future__ import annotations

import random
import re
from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.protocol.wire.messages.engine import (
    CHUNK_ATTENTION,
    NO_BLOCK,
    WINDOW_ATTENTION,
    EngineSizes,
    LayerGroup,
)
from penstock.services.scheduler.block_hash import BLOCK_HASH_BYTES
from penstock.services.scheduler.cache_shares import CacheShares
from penstock.services.scheduler.kv_cache import KVCache
from penstock.services.scheduler.kv_groups import check_groups
from penstock.services.scheduler.kv_holder import KVHolder, SequenceHolder
from penstock.services.scheduler.kv_prefix import Prefix
from penstock.services.scheduler.limits import Limits

FULL = LayerGroup()
ROOTS = [b"one", b"another"]
TENANTS = ["", "ann", "bob", "cid"]


def window(positions: int) -> LayerGroup:
    return LayerGroup(WINDOW_ATTENTION, positions)


def chunk(positions: int) -> LayerGroup:
    return LayerGroup(CHUNK_ATTENTION, positions)


def random_shares(rng: random.Random) -> CacheShares:
    return CacheShares(rng.choice([0.0, 0.1, 0.5, 1.0]), rng.choice([0.02, 0.1, 0.5, 1.0, 1.0]))


class Content(NamedTuple):
    """What a full block holds."""

    group: int
    root: bytes
    tokens: tuple[int, ...]


@dataclass(eq=False)
class Runner:
    """A running sequence."""

    holder: SequenceHolder
    prompt_len: int
    computed: int
    """Tokens of its prompt that the plans made so far compute."""
    named: int = 0
    """Blocks of the beginning that were named or came with the prefix."""
    in_flight: int = 0
    """Decode steps that are planned and not answered."""

    @property
    def decodes(self) -> bool:
        return self.computed >= self.prompt_len


@dataclass
class PlannedStep:
    number: int
    decoding: list[Runner] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    """Blocks that its chunks complete."""


@dataclass
class Transfer:
    holder: KVHolder
    contents: list[Content]
    ready: bool


class World:
    """A cache, who uses it, and the model of it."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.size = rng.choice([1, 2, 4])
        self.groups = rng.choice(
            [
                *([FULL], [window(rng.randint(1, 9))], [FULL, window(rng.randint(1, 9))]),
                [window(rng.randint(1, 4)), FULL, FULL, window(rng.randint(1, 9))],
                *([chunk(rng.randint(1, 9))], [FULL, chunk(rng.randint(1, 9)), window(3)]),
            ]
        )
        check_groups(self.groups)
        self.most_row = rng.choice([1, 1, 2, 5])
        """Tokens that a decode row brings at most."""
        self.least_row = rng.choice([0, 1])
        self.chunk = rng.choice([3, 9, 40])
        ahead = max(self.chunk, 4 * self.most_row)
        self.caching = rng.random() < 0.9
        count = rng.randint(60, 160) // self.size * len(self.groups)
        self.kv = KVCache(count, self.size, self.caching, self.groups, ahead, random_shares(rng))
        self.now = 0.0
        self.found: dict[bytes, int] = {}
        """Blocks by their names in the first group without a window."""
        self.evicted: list[bytes] = []
        self.kv.follow(self.evicted.append)
        self.runners: list[Runner] = []
        self.transfers: list[Transfer] = []
        self.pending: list[PlannedStep] = []
        self.step = 0
        self.content: dict[int, Content] = {}
        self.known: dict[Content, tuple[int, int]] = {}
        """Block, and the step that completes it; 0: it is complete."""
        self.unnamed: list[Runner] = []
        """Those that have completed blocks which are to be found soon."""
        self.starts = [[rng.randrange(2) for _ in range(30)] for _ in range(3)]

    def play(self, actions: int) -> None:
        choices = [
            *(self.start, self.start, self.plan, self.plan, self.plan, self.answer, self.answer),
            *(self.answer, self.end, self.expect, self.pin, self.finish_transfer, self.rarely),
            *(self.name_unnamed, self.name_unnamed, self.retain, self.let_go, self.pass_time),
        ]
        for _ in range(actions):
            self.rng.choice(choices)()
            self.look()
        while self.pending:
            self.answer()
        for runner in list(self.runners):
            self.release(runner)
        for transfer in list(self.transfers):
            self.give_back(transfer)
        self.look()
        self.name_unnamed()
        self.look()
        assert self.kv.blocks.num_used == 0
        assert not self.kv.held_aside

    # The model.

    def held(self) -> dict[int, int]:
        """How often each block stands in a table."""
        counts: dict[int, int] = {}
        for holder in [r.holder for r in self.runners] + [t.holder for t in self.transfers]:
            for block in (b for table in holder.tables for b in table if b != NO_BLOCK):
                counts[block] = counts.get(block, 0) + 1
        return counts

    def contents(self, holder: SequenceHolder, index: int) -> list[Content]:
        """What the block at this place of each group's table is to hold."""
        tokens = tuple(holder.tokens[: (index + 1) * self.size])
        return [Content(group, holder.root, tokens) for group in range(len(self.groups))]

    def needed_from(self, group: int, position: int) -> int:
        """The first block that positions from this one on attend to."""
        positions = self.groups[group].window
        if self.groups[group].kind == CHUNK_ATTENTION:
            return (position - position % positions) // self.size
        return max(0, position - positions + 1) // self.size if positions else 0

    def name(self, block: int, content: Content, step: int) -> None:
        taken = any(block == other for other, _ in self.known.values())
        if self.caching and not taken and content not in self.known:
            self.known[content] = (block, step)

    def name_generated(self, runner: Runner) -> None:
        if not runner.decodes:
            return
        full = (len(runner.holder.tokens) - 1) // self.size
        for index in range(runner.named, full):
            for content in self.contents(runner.holder, index):
                block = runner.holder.tables[content.group][index]
                if block != NO_BLOCK:
                    self.name(block, content, 0)
        runner.named = max(runner.named, full)

    def name_unnamed(self) -> None:
        """What was put off is found now, whatever has become known meanwhile."""
        while self.kv._unnamed:
            self.kv.name_some()
        for runner in self.unnamed:
            if runner in self.runners:
                self.name_generated(runner)
        self.unnamed.clear()

    def forget_blocks(self, blocks: set[int]) -> None:
        self.known = {c: at for c, at in self.known.items() if at[0] not in blocks}

    def taking(self) -> tuple[dict[int, int], set[int]]:
        """To be asked before blocks are taken: what is held, and what is free."""
        held, named = self.held(), {block for block, _ in self.known.values()}
        return held, {b for b in range(self.kv.blocks.num_blocks) if b not in held} - named

    def took(self, new: list[int], before: tuple[dict[int, int], set[int]]) -> None:
        """Nobody held these, and what can be found went only when nothing else was free."""
        held, free = before
        assert len(set(new)) == len(new)
        assert not held.keys() & set(new)
        evicted = set(new) - free
        assert not evicted or free <= set(new)
        self.forget_blocks(evicted)
        for block in new:
            self.content.pop(block, None)

    def longest(self, holder: SequenceHolder) -> int:
        """Blocks of the prefix that ``match`` must find."""
        for length in range((len(holder.tokens) - 1) // self.size, 0, -1):
            if all(
                self.contents(holder, index)[group] in self.known
                for group in range(len(self.groups))
                for index in range(self.needed_from(group, length * self.size), length)
            ):
                return length
        return 0

    def look(self) -> None:
        """The cache agrees with the model."""
        kv, held = self.kv, self.held()
        kv.check(runner.holder for runner in self.runners)
        named = {block for block, _ in self.known.values()}
        assert kv.blocks.num_used == len(held)
        assert kv.blocks.num_cached == len(named - held.keys())
        assert kv.num_available == kv.blocks.num_blocks - len(held)
        whole = next((g for g, group in enumerate(self.groups) if not group.window), 0)
        told = {at[0] for content, at in self.known.items() if content.group == whole}
        names = self.kv.blocks._by_digest
        found = {name: block for name, block in names.items() if len(name) == BLOCK_HASH_BYTES}
        assert sorted(found.values()) == sorted(told)
        assert self.found.keys() - found.keys() <= set(self.evicted), "whoever follows it hears it"
        assert all(len(name) == BLOCK_HASH_BYTES for name in self.evicted)
        self.evicted.clear()
        self.found = found
        for content, (block, _) in self.known.items():
            assert self.content[block] == content
        for runner in self.runners:
            used = sum(b != NO_BLOCK for table in runner.holder.tables for b in table)
            assert used <= kv.needed(runner.holder.capacity)

    # Sequences.

    def start(self) -> None:
        tokens = self.rng.choice(self.starts)[: self.rng.randint(1, 30)]
        tokens = tokens + [self.rng.randrange(2) for _ in range(self.rng.randint(0, 4))]
        root, tenant = self.rng.choice(ROOTS), self.rng.choice(TENANTS)
        holder = self.kv.new_holder(array("i", tokens), root, tenant)
        prefix = self.kv.match(holder)
        self.require_prefix(holder, prefix)
        held = self.held()
        blocks = [b for table in prefix.tables for b in table if b != NO_BLOCK]
        assert self.kv.num_held(prefix) == sum(block in held for block in blocks)
        if self.kv.needed(len(tokens) + 1) > self.kv.num_available:
            return
        self.kv.begin(holder, prefix)
        computed = prefix.length * self.size
        self.runners.append(Runner(holder, len(tokens), computed, prefix.length))
        assert holder.capacity == computed

    def require_prefix(self, holder: SequenceHolder, prefix: Prefix) -> None:
        assert prefix.length == (self.longest(holder) if self.caching else 0)
        for group, table in enumerate(prefix.tables):
            behind = self.needed_from(group, prefix.length * self.size)
            assert table[:behind] == [NO_BLOCK] * behind
            for index in range(behind, prefix.length):
                assert self.content[table[index]] == self.contents(holder, index)[group]

    def plan(self) -> None:
        """A step: chunks of prompts, and a row for each sequence that decodes."""
        if len(self.pending) == 3:
            return
        self.step += 1
        step = PlannedStep(self.step)
        self.pending.append(step)
        for runner in list(self.runners):
            if runner.decodes:
                self.plan_row(step, runner)
            elif self.rng.random() < 0.7:
                self.plan_chunk(step, runner)

    def advance(self, runner: Runner, position: int) -> None:
        if any(group.window for group in self.groups):
            self.name_generated(runner)
        elif runner.decodes and (runner.named + 1) * self.size < len(runner.holder.tokens):
            self.unnamed.append(runner)
        self.kv.advance(runner.holder, position)
        for group, table in enumerate(runner.holder.tables):
            behind = min(self.needed_from(group, position), len(table))
            assert table[:behind] == [NO_BLOCK] * behind
            assert NO_BLOCK not in table[behind:]

    def grow(self, runner: Runner, positions: int) -> None:
        before, tables = self.taking(), [list(table) for table in runner.holder.tables]
        told = self.kv.grow(runner.holder, positions)
        new = []
        for old, table in zip(tables, runner.holder.tables, strict=True):
            assert table[: len(old)] == old
            new.append(table[len(old) :])
        assert told == [block for blocks in zip(*new, strict=True) for block in blocks]
        assert positions <= runner.holder.capacity
        assert len(new[0]) == max(0, -(-positions // self.size) - len(tables[0]))
        self.took(told, before)

    def plan_chunk(self, step: PlannedStep, runner: Runner) -> None:
        start, holder = runner.computed, runner.holder
        self.advance(runner, start)
        end = min(runner.prompt_len, start + self.chunk, self.kv.room(holder))
        if end <= start:
            return
        self.grow(runner, end)
        self.kv.name_chunk(holder, start, end, step.number)
        for index in range(start // self.size, end // self.size):
            for content in self.contents(holder, index):
                block = holder.tables[content.group][index]
                self.content[block] = content
                self.name(block, content, step.number)
                step.written.append(block)
        runner.computed = end
        runner.named = end // self.size
        if runner.decodes:
            runner.in_flight = 1
            step.decoding.append(runner)

    def plan_row(self, step: PlannedStep, runner: Runner) -> None:
        known = len(runner.holder.tokens)
        position = known - 1 + self.least_row * runner.in_flight
        self.advance(runner, position)
        reach = known + self.most_row * (runner.in_flight + 1) - 1
        if reach > self.kv.room(runner.holder):
            self.release(runner)  # preempted
            return
        self.grow(runner, reach)
        runner.in_flight += 1
        step.decoding.append(runner)

    def answer(self) -> None:
        if not self.pending:
            return
        step = self.pending.pop(0)
        for content, (block, number) in self.known.items():
            self.known[content] = (block, 0 if number <= step.number else number)
        for runner in step.decoding:
            if runner not in self.runners:
                continue
            runner.in_flight -= 1
            tokens = runner.holder.tokens
            most = min(self.most_row, runner.holder.capacity - len(tokens) + 1)
            count = self.rng.randint(self.least_row, most)
            tokens.extend(self.rng.randrange(2) for _ in range(count))
            for index in range(runner.named, (len(tokens) - 1) // self.size):
                for content in self.contents(runner.holder, index):
                    block = runner.holder.tables[content.group][index]
                    if block != NO_BLOCK:
                        self.content[block] = content
            if len(tokens) > 60 or self.rng.random() < 0.05:
                self.release(runner)

    def release(self, runner: Runner) -> None:
        self.name_generated(runner)
        self.runners.remove(runner)
        self.kv.release(runner.holder)
        assert runner.holder.tables == [[] for _ in self.groups]

    def end(self) -> None:
        if self.runners:
            self.release(self.rng.choice(self.runners))

    # What requests ask of the cache: nothing that is held or found changes with it.

    def retain(self) -> None:
        if self.runners:
            holder = self.rng.choice(self.runners).holder
            tokens = self.rng.randint(1, len(holder.tokens))
            names = self.kv.retain(holder, tokens, self.rng.choice([300, 3600]), self.now)
            assert len(names) <= tokens // self.size

    def let_go(self) -> None:
        if self.runners:
            holder = self.rng.choice(self.runners).holder
            self.kv.let_go(holder, shared=self.rng.random() < 0.5)

    def pass_time(self) -> None:
        self.now += self.rng.choice([1.0, 100.0, 1000.0])
        self.kv.lapse(self.now)
        marks = self.kv.blocks.retained.marks.values()
        assert all(mark.until > self.now for mark in marks)

    # Transfers and pins.

    def expect(self) -> None:
        """Content is to come from elsewhere for a part of a chain in one group."""
        group = self.rng.randrange(len(self.groups))
        tokens = self.rng.choice(self.starts)[: self.rng.randint(self.size, 30)]
        holder = self.kv.new_holder(array("i", tokens), self.rng.choice(ROOTS))
        count = len(tokens) // self.size
        digests = self.kv.digests(holder, count)
        first = self.rng.randrange(count)
        before = self.taking()
        expected = self.kv.expect(digests[first:], group)
        if expected is None:
            assert count - first > self.kv.num_available
            return
        self.took(expected.tables[group], before)
        contents = [self.contents(holder, index)[group] for index in range(first, count)]
        self.transfers.append(Transfer(expected, contents, ready=False))

    def pin(self) -> None:
        if self.runners:
            holder = self.rng.choice(self.runners).holder
            group = self.rng.randrange(len(self.groups))
            pinned = self.kv.pin(holder.digests, group)
            contents = [self.contents(holder, i)[group] for i in range(len(holder.digests))]
            found = 0
            while found < len(contents) and contents[found] in self.known:
                found += 1
            assert pinned.tables[group] == [self.known[content][0] for content in contents[:found]]
            self.transfers.append(Transfer(pinned, [], ready=True))

    def finish_transfer(self) -> None:
        if not self.transfers:
            return
        transfer = self.rng.choice(self.transfers)
        if not transfer.ready and self.rng.random() < 0.7:
            blocks = [block for table in transfer.holder.tables for block in table]
            for block, content in zip(blocks, transfer.contents, strict=True):
                self.content[block] = content
                # Loaded content is cached whether or not prompts are looked up.
                if content not in self.known:
                    self.known[content] = (block, 0)
            self.kv.ready(transfer.holder)
            transfer.ready = True
        else:
            self.give_back(transfer)

    def give_back(self, transfer: Transfer) -> None:
        self.transfers.remove(transfer)
        self.kv.release(transfer.holder)

    # Failures.

    def rarely(self) -> None:
        if self.rng.random() < 0.5:
            self.rng.choice([self.fail, self.distrust, self.lose_all])()

    def fail(self) -> None:
        """A step and all behind it are lost, and so is what they wrote."""
        if not self.pending:
            return
        first = self.pending[0].number
        self.kv.forget_since(first)
        self.known = {c: at for c, at in self.known.items() if at[1] < first}
        for block in (block for step in self.pending for block in step.written):
            if not any(block == at[0] for at in self.known.values()):
                self.content.pop(block, None)
        self.pending.clear()
        for runner in list(self.runners):
            self.release(runner)

    def distrust(self) -> None:
        if self.runners:
            runner = self.rng.choice(self.runners)
            self.kv.distrust(runner.holder)
            for index in range(len(runner.holder.digests)):
                for content in self.contents(runner.holder, index):
                    self.known.pop(content, None)
            self.runners.remove(runner)
            self.kv.release(runner.holder)

    def lose_all(self) -> None:
        self.kv.forget_all()
        self.known.clear()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), actions=st.integers(20, 250))
def test_the_cache_is_what_a_plain_model_of_it_says(seed: int, actions: int) -> None:
    World(seed).play(actions)


def cached(kv: KVCache, holder: SequenceHolder, group: int, indices: list[int]) -> None:
    """Let these blocks of a chain be found in one group."""
    digests = kv.digests(holder, len(holder.tokens))
    for index in indices:
        expected = kv.expect([digests[index]], group)
        assert expected is not None
        kv.ready(expected)
        kv.release(expected)


def test_a_prefix_is_one_that_every_group_can_go_on_from() -> None:
    kv = KVCache(64, 1, groups=[window(3), FULL])
    holder = kv.new_holder(array("i", range(10)), b"root")
    cached(kv, holder, 1, [0, 1, 2, 3, 4, 5])
    cached(kv, holder, 0, [1, 2, 6, 7, 8])
    prefix = kv.match(holder)  # nine suit the window, six the other group, three both
    assert prefix.length == 3
    assert [block == NO_BLOCK for block in prefix.tables[0]] == [True, False, False]
    assert prefix.flat() == [b for pair in zip(*prefix.tables, strict=True) for b in pair]


def test_content_is_found_when_it_is_there_and_not_before() -> None:
    kv = KVCache(8, 1)
    holder = kv.new_holder(array("i", range(4)), b"root")
    digests = kv.digests(holder, 3)
    lost, expected = kv.expect(digests), kv.expect(digests)
    assert lost is not None and expected is not None
    assert kv.expect(digests) is None
    assert (kv.num_available, kv.held_aside, kv.match(holder).length) == (2, True, 0)
    kv.release(lost)
    assert (kv.num_available, kv.match(holder).length) == (5, 0)
    kv.ready(expected)
    assert kv.match(holder).tables == expected.tables
    kv.release(expected)
    assert (kv.num_available, kv.held_aside, kv.match(holder).length) == (8, False, 3)
    kv.check([])


def test_what_is_pinned_outlives_its_sequence_and_is_not_evicted() -> None:
    kv = KVCache(4, 1)
    holder = kv.new_holder(array("i", range(3)), b"root")
    kv.begin(holder, kv.match(holder))
    table = kv.grow(holder, 3)
    kv.name_chunk(holder, 0, 3, step=1)
    pinned = kv.pin(holder.digests)
    kv.release(holder)
    assert pinned.tables == [table]
    assert kv.num_available == 1
    other = kv.expect([b"x"])
    assert other is not None
    assert kv.expect([b"y"]) is None
    kv.release(pinned)
    assert kv.num_available == 3


@pytest.mark.parametrize(
    ("groups", "sentence"),
    [
        ([FULL] * 9, "the worker has 9 groups of layers"),
        ([FULL, LayerGroup("state")], "a group of layers of the kind 'state' (of full, state)"),
        ([window(0)], "with a window of 0 positions"),
        ([chunk(0)], "with a window of 0 positions"),
        ([LayerGroup(window=5)], "of the kind 'full' with a window of 5 positions"),
    ],
)
def test_groups_that_cannot_be_planned_for_are_named(
    groups: list[LayerGroup], sentence: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        Limits(100, 16, 4, 64, 64, 1000, groups=groups)


def test_the_longest_sequence_is_the_one_whose_blocks_fit_in_all_groups() -> None:
    sizes = {"num_blocks": 10, "block_size": 4, "max_num_seqs": 1, "max_num_batched_tokens": 4}
    sizes |= {"max_model_len": 1000, "vocab_size": 9}
    assert Limits(**sizes).kv_tokens == 40
    assert Limits(**sizes, groups=[FULL]).kv_tokens == 40
    assert Limits(**sizes, groups=[FULL, FULL]).kv_tokens == 20
    # The window and a step's positions, 3 + 4, lie in 3 blocks at most.
    assert Limits(**sizes, groups=[FULL, window(4)]).kv_tokens == 28
    assert Limits(**sizes, groups=[window(4)]).max_sequence_len == 1000


def test_tokens_that_all_sequences_have_together_are_counted_over_all_groups() -> None:
    sizes = EngineSizes(90, 4, 1, 4, 100, 9)
    assert sizes.all_kv_tokens == 360
    assert replace(sizes, groups=[FULL, FULL]).all_kv_tokens == 180
    # A sequence of 100 has 25 blocks, and 3 for its window: 90 blocks hold 3.2 of them.
    assert replace(sizes, groups=[FULL, window(4)]).all_kv_tokens == 321
    assert EngineSizes().all_kv_tokens == 0


def test_of_blocks_that_many_complete_at_once_a_plan_names_few() -> None:
    """A plan of 64 sequences that all fill a block would come too late for the device."""
    kv = KVCache(400, 4, True)
    holders = [kv.new_holder(array("i", [number] * 4), b"") for number in range(100)]
    for holder in holders:
        kv.begin(holder, kv.match(holder))
        kv.grow(holder, 9)
        kv.name_chunk(holder, 0, 4, 1)
        holder.tokens.extend([5] * 5)
    before = kv.blocks.num_cached, len(kv.blocks._by_digest)
    for holder in holders:
        kv.advance(holder, 8)
    assert (kv.blocks.num_cached, len(kv.blocks._by_digest)) == before
    named = []
    while kv._unnamed:
        kv.name_some()
        named.append(len(kv.blocks._by_digest) - before[1] - sum(named))
    assert named == [12, 11, 9, 8, 8, 8, 8, 8, 8, 8, 8, 4]
