"""What requests ask of the prefix cache: which blocks go first, which last, and for how long."""

from __future__ import annotations

import random
from array import array
from collections import Counter

import msgspec
import pytest
from support.counted import instructions
from support.scheduler.scheduler_harness import Engine, prompt, small, token_work

from penstock.protocol.wire.messages.cache_hints import RetainedSpan
from penstock.protocol.wire.messages.requests import TokenWork
from penstock.services.scheduler.block_manager import MOST_LAPSES, BlockManager
from penstock.services.scheduler.cache_shares import CacheShares
from penstock.services.scheduler.kv_cache import KVCache
from penstock.services.scheduler.stats import Counters

MINUTES, HOUR = 300, 3600


class Cache:
    """Blocks, and chains of them by one letter."""

    def __init__(self, num_blocks: int, retained: float = 1.0, tenant: float = 1.0) -> None:
        self.counters = Counters()
        self.blocks = BlockManager(num_blocks, CacheShares(retained, tenant), self.counters)

    def names(self, letter: str, length: int) -> list[bytes]:
        return [f"{letter}{index}".encode() for index in range(length)]

    def put(self, letter: str, length: int, tenant: str = "") -> list[int]:
        """Compute a chain and let it go."""
        table = self.blocks.allocate(length)
        for block, name in zip(table, self.names(letter, length), strict=True):
            self.blocks.cache(block, name, 1)
        self.blocks.release(table, tenant)
        self.blocks.check([])
        return table

    def retain(
        self, letter: str, length: int, seconds: int = MINUTES, now: float = 0.0, tenant: str = ""
    ) -> None:
        self.blocks.retain(self.names(letter, length), tenant, seconds, now)
        self.blocks.check([])

    def let_go(self, letter: str, length: int, tenant: str = "", *, shared: bool = False) -> None:
        self.blocks.let_go(self.names(letter, length), tenant, shared=shared)
        self.blocks.check([])

    def found(self, letter: str) -> int:
        """Blocks of a chain that are still there."""
        return len(self.blocks.match(self.names(letter, 99)))

    def need(self, count: int) -> None:
        """Somebody else needs blocks for a moment."""
        self.blocks.release(self.blocks.allocate(count))
        self.blocks.check([])


def retained(cache: Cache) -> dict[str, int]:
    """Blocks of each chain that are."""
    marks = cache.blocks.retained.marks.values()
    names = [name for run in dict.fromkeys(marks) for name in run.names[: run.live]]
    return dict(sorted(Counter(chr(name[0]) for name in names).items()))


def test_retained_blocks_are_reused_after_all_others_and_still_before_anybody_waits() -> None:
    cache = Cache(6)
    cache.put("a", 3)
    cache.retain("a", 2)
    cache.put("b", 3)
    table = cache.blocks.allocate(4)
    assert (cache.found("a"), cache.found("b")) == (2, 0)
    assert cache.counters.cut_retentions == 0
    table += cache.blocks.allocate(1)
    assert cache.found("a") == 1
    table += cache.blocks.allocate(1)
    assert (cache.found("a"), cache.blocks.num_available) == (0, 0)
    assert (cache.blocks.num_retained, cache.counters.cut_retentions) == (0, 2)
    cache.blocks.check([table])


def test_a_retained_block_goes_like_any_other_when_its_time_is_over() -> None:
    cache = Cache(4)
    cache.put("a", 2)
    cache.retain("a", 2)
    cache.put("b", 2)
    cache.blocks.lapse(MINUTES - 1.0)
    assert cache.blocks.num_retained == 2
    cache.blocks.lapse(float(MINUTES))
    assert cache.blocks.num_retained == 0
    cache.need(2)
    assert (cache.found("a"), cache.found("b")) == (2, 0)
    cache.need(4)
    assert (cache.found("a"), cache.counters.cut_retentions) == (0, 0)


def test_where_the_time_of_many_blocks_is_over_at_once_they_end_some_at_a_time() -> None:
    cache = Cache(2 * MOST_LAPSES + 2)
    cache.put("a", 2 * MOST_LAPSES + 1)
    cache.retain("a", 2 * MOST_LAPSES + 1)
    left = []
    for _ in range(3):
        cache.blocks.lapse(float(MINUTES))
        left.append(cache.blocks.num_retained)
    assert left == [MOST_LAPSES + 1, 1, 0]


def test_each_use_that_asks_for_it_prolongs_the_time_and_a_shorter_one_takes_none_away() -> None:
    cache = Cache(2)
    cache.put("a", 2)
    cache.retain("a", 2, HOUR)
    cache.retain("a", 2, MINUTES, now=60.0)
    cache.blocks.lapse(HOUR - 1.0)
    assert cache.blocks.num_retained == 2
    cache.retain("a", 1, MINUTES, now=HOUR - 1.0)
    cache.blocks.lapse(HOUR + MINUTES - 2.0)
    assert cache.blocks.num_retained == 1
    cache.blocks.lapse(HOUR + MINUTES - 1.0)
    assert cache.blocks.num_retained == 0


def test_past_the_limit_what_was_retained_longest_ago_lapses_and_of_a_prefix_its_end() -> None:
    cache = Cache(10, retained=0.4)
    for letter, seconds, now in (("a", HOUR, 0.0), ("b", MINUTES, 1.0), ("c", MINUTES, 2.0)):
        cache.put(letter, 2)
        cache.retain(letter, 2, seconds, now)
    assert cache.blocks.num_retained == 4
    cache.put("d", 4)
    assert [cache.found(letter) for letter in "abcd"] == [2, 2, 2, 4]
    cache.need(6)
    assert [cache.found(letter) for letter in "abcd"] == [0, 2, 2, 0]
    cache.put("e", 6)
    cache.retain("e", 6, now=3.0)
    cache.need(6)
    assert [cache.found(letter) for letter in "bce"] == [0, 0, 4]


def test_with_a_share_of_nothing_nothing_is_retained() -> None:
    cache = Cache(4, retained=0.0)
    cache.put("a", 2)
    cache.retain("a", 2)
    assert cache.blocks.num_retained == 0


def test_a_tenant_has_its_share_of_what_is_retained() -> None:
    cache = Cache(16, retained=0.5, tenant=0.5)
    cache.put("a", 8)
    cache.put("b", 4)
    cache.retain("b", 4, tenant="bob")
    cache.retain("a", 8, now=1.0, tenant="ann")
    assert cache.blocks.num_retained == 8
    cache.need(8)
    assert (cache.found("a"), cache.found("b")) == (4, 4)


def test_of_several_tenants_one_that_has_more_than_an_equal_part_makes_room() -> None:
    """Of 12 places: ann has all of them while she is alone."""
    cache = Cache(60, retained=0.2)
    for letter, length in (("a", 4), ("b", 8), ("c", 3), ("d", 4), ("e", 9)):
        cache.put(letter, length)
    cache.retain("a", 4, HOUR, tenant="ann")
    cache.retain("b", 8, HOUR, now=1.0, tenant="ann")
    assert cache.blocks.num_retained == 12
    cache.retain("c", 3, now=2.0, tenant="bob")
    assert retained(cache) == {"a": 1, "b": 8, "c": 3}, "her oldest end"
    cache.retain("d", 4, HOUR, now=3.0, tenant="ann")
    assert retained(cache) == {"b": 5, "c": 3, "d": 4}, "and hers again, not his older ones"
    cache.retain("e", 9, HOUR, now=4.0, tenant="bob")
    assert retained(cache) == {"b": 2, "d": 4, "e": 6}


def test_what_several_tenants_share_is_no_part_of_any() -> None:
    cache = Cache(40, retained=0.2)
    for letter, length in (("a", 6), ("b", 2), ("c", 2)):
        cache.put(letter, length)
    for now, tenant in enumerate(("ann", "bob")):
        cache.retain("a", 6, now=now, tenant=tenant)
    cache.retain("b", 2, now=2.0, tenant="ann")
    cache.retain("a", 6, now=3.0, tenant="bob")
    cache.retain("c", 2, now=4.0, tenant="bob")
    assert retained(cache) == {"a": 6, "c": 2}, "it is the oldest mark that ends"


def test_what_is_let_go_is_reused_first_and_its_end_before_its_beginning() -> None:
    cache = Cache(6)
    for letter in "abc":
        cache.put(letter, 2)
    cache.retain("b", 2)
    cache.let_go("b", 2)
    assert cache.blocks.num_retained == 0
    cache.need(1)
    assert [cache.found(letter) for letter in "abc"] == [2, 1, 2]
    cache.need(2)
    assert [cache.found(letter) for letter in "abc"] == [2, 0, 2]


def test_what_others_may_use_is_let_go_only_where_the_tenant_alone_has_retained_it() -> None:
    cache = Cache(8)
    for letter in "abc":
        cache.put(letter, 2)
    cache.retain("a", 2, tenant="ann")
    cache.retain("b", 2, tenant="ann")
    cache.retain("b", 2, now=1.0, tenant="bob")
    for letter in "abc":
        cache.let_go(letter, 2, "ann", shared=True)
    assert cache.blocks.num_retained == 2
    cache.need(4)  # two are free
    assert [cache.found(letter) for letter in "abc"] == [0, 2, 2]


def test_a_tenants_cached_blocks_past_its_share_are_reused_before_those_of_others() -> None:
    cache = Cache(12, tenant=0.25)
    cache.put("o", 2, "old")
    cache.put("a", 5, "ann")
    cache.put("b", 5, "bob")
    cache.need(4)
    assert [cache.found(letter) for letter in "oab"] == [2, 3, 3]
    cache.need(6)
    assert [cache.found(letter) for letter in "oab"] == [0, 3, 3], "then the least recently used"


def test_without_others_a_tenant_may_have_the_whole_cache() -> None:
    cache = Cache(8, tenant=0.25)
    cache.put("a", 8, "ann")
    assert cache.found("a") == 8


@pytest.mark.parametrize("seed", range(4))
def test_counts_stay_right_with_marks_and_shares(seed: int) -> None:
    rng = random.Random(seed)
    cache = Cache(14, rng.choice([0.2, 0.5, 1.0]), rng.choice([0.1, 0.3, 1.0]))
    blocks, tables, now = cache.blocks, list[list[int]](), 0.0
    for step in range(500):
        letter, length = rng.choice("abc"), rng.randint(1, 4)
        names, tenant = cache.names(letter, length), rng.choice(["", "ann", "bob"])
        match rng.randrange(8):
            case 0 | 1 | 2 if length <= blocks.num_available:
                table = blocks.match(names)
                blocks.hold(table)
                missing = length - len(table)
                if missing <= blocks.num_available:
                    table += blocks.allocate(missing)
                    for block, name in zip(table, names, strict=True):
                        blocks.cache(block, name, step)
                tables.append(table)
            case 3 | 4 if tables:
                blocks.release(tables.pop(rng.randrange(len(tables))), tenant)
            case 5:
                blocks.retain(names, tenant, rng.choice([MINUTES, HOUR]), now)
            case 6:
                blocks.let_go(names, tenant, shared=rng.random() < 0.5)
            case 7:
                now += rng.choice([1.0, 200.0])
                blocks.lapse(now)
        if rng.random() < 0.02:
            blocks.forget_since(step - 5)
        blocks.check(tables)
        assert blocks.num_free + blocks.num_cached + blocks.num_used == blocks.num_blocks


def costs(blocks: int, shares: CacheShares) -> list[float]:
    """Instructions of the interpreter for each of so many blocks: to be computed in the place of
    others and let go, to be retained, and to be retained no longer."""
    manager = BlockManager(blocks, shares)

    def compute(letter: str) -> list[bytes]:
        table = manager.allocate(blocks)
        names = [f"{letter}{block}".encode() for block in table]
        for block, name in zip(table, names, strict=True):
            manager.cache(block, name, 1)
        manager.release(table, "ann")
        return names

    compute("a")
    parts = [
        instructions(lambda: compute("b")),
        instructions(lambda: manager.retain([f"b{b}".encode() for b in range(blocks)], "", 1, 0.0)),
        instructions(lambda: manager.lapse(1.0)),
    ]
    return [part / blocks for part in parts]


@pytest.mark.parametrize("shares", [CacheShares(1.0), CacheShares(1.0, 0.5)])
def test_a_block_costs_the_same_in_a_large_cache(shares: CacheShares) -> None:
    for few, many in zip(costs(100, shares), costs(1000, shares), strict=True):
        assert many < 1.1 * few


# --- requests


def retaining(tokens: list[int], seconds: int = MINUTES, **more: str | int) -> TokenWork:
    """A request that asks to retain its whole prompt."""
    work = token_work(tokens, **more)  # type: ignore[arg-type]
    return msgspec.structs.replace(work, retain=[RetainedSpan(len(tokens), seconds)])


def cached_tokens(engine: Engine, request_id: int, tokens: list[int]) -> int:
    """Of a prompt that is sent now."""
    engine.submit(request_id, tokens, max_tokens=1)
    engine.run()
    cached = engine.streams[request_id, 0].cached
    assert cached is not None
    return cached


def test_a_retained_prompt_survives_a_flood_of_other_prompts() -> None:
    engine = Engine(small())
    engine.run_alone(retaining(prompt(20), max_tokens=1))
    assert engine.core.stats().blocks_retained == 5
    for number in range(2, 8):
        engine.submit(number, prompt(24, start=10 * number), max_tokens=2)
        engine.run()
    assert cached_tokens(engine, 9, prompt(20)) == 16
    engine.run_alone(token_work(prompt(60, start=50)[:55], max_tokens=5), 10)
    assert engine.core.stats().blocks_retained == 1, "and gives way to who runs"
    assert engine.core.stats().counters.cut_retentions == 4


@pytest.mark.parametrize("length", [19, 20, 21])
def test_without_a_token_of_output_a_prompt_is_computed_or_released_without_that(
    length: int,
) -> None:
    engine = Engine(small())
    spans = [RetainedSpan(length, MINUTES)]
    engine.submit(1, prompt(length), max_tokens=0, cache_salt="one", retain=spans)
    engine.run()
    assert engine.core.stats().blocks_retained == length // 4
    steps = engine.core.stats().counters.steps
    engine.submit(2, prompt(length), max_tokens=0, cache_salt="one", release=True)
    engine.run()
    stats = engine.core.stats()
    assert (stats.blocks_retained, stats.counters.steps) == (0, steps)
    engine.submit(3, prompt(length), max_tokens=0, cache_salt="one")
    engine.run()
    assert engine.core.stats().counters.steps == steps, "nothing is asked of it"


def test_without_a_prefix_cache_hints_have_no_effect() -> None:
    engine = Engine(small(), caching=False)
    engine.submit(1, prompt(20), max_tokens=0, retain=[RetainedSpan(20, MINUTES)], release=True)
    engine.run()
    engine.assert_finished(1)
    assert engine.core.stats().counters.steps == 0, "nobody would find what is computed"


def test_choices_of_a_request_retain_its_prompt_once_and_a_new_worker_nothing() -> None:
    engine = Engine(small())
    assert engine.core.add(1, 0, "t", retaining(prompt(20), n=3), 0.0) is None
    engine.core.plan(0.0)
    assert engine.core.stats().blocks_retained == 5
    engine.core.restart(2)
    assert engine.core.stats().blocks_retained == 0
    engine.core.plan(0.0)
    assert engine.core.stats().blocks_retained == 5, "it is computed again, and retained again"
    engine.core.check()


def test_a_prompt_whose_step_failed_is_retained_when_it_has_been_computed_again() -> None:
    engine = Engine(small())
    engine.submit(1, prompt(20), retain=[RetainedSpan(20, MINUTES)])
    engine.worker.fail_steps[1] = "device lost"
    engine.plan()
    assert engine.core.stats().blocks_retained == 5
    engine.deliver()
    assert engine.core.stats().blocks_retained == 0
    engine.run()
    engine.assert_finished(1)
    assert engine.core.stats().blocks_retained == 5


def test_what_choices_share_is_let_go_with_the_last_of_them() -> None:
    engine = Engine(small())
    span = RetainedSpan(20, MINUTES)
    engine.submit(1, prompt(20), n=2, cache_salt="one", retain=[span], release=True)
    engine.step()
    engine.step()
    engine.cancel(1, 0)
    assert engine.core.stats().blocks_retained == 5, "the other one still computes with it"
    engine.run()
    assert engine.core.stats().blocks_retained == 0


def test_without_a_prefix_cache_nothing_is_hashed_to_be_let_go() -> None:
    cache = KVCache(8, 4, enable_prefix_caching=False)
    holder = cache.new_holder(array("i", prompt(20)), b"root")
    cache.let_go(holder, shared=False)
    assert not holder.digests


def test_time_passes_for_retained_blocks_while_the_engine_idles() -> None:
    engine = Engine(small())
    engine.run_alone(retaining(prompt(20), HOUR, max_tokens=1))
    engine.now += HOUR - 1.0
    engine.expire()
    assert engine.core.stats().blocks_retained == 5
    engine.now += 2.0
    engine.expire()
    assert engine.core.stats().blocks_retained == 0


def test_salts_keep_hints_apart() -> None:
    engine = Engine(small())
    engine.run_alone(retaining(prompt(20), max_tokens=1, cache_salt="one", tenant="ann"))
    other = token_work(prompt(20), max_tokens=1, cache_salt="two", tenant="ann")
    engine.run_alone(msgspec.structs.replace(other, release=True), 2)
    assert engine.core.stats().blocks_retained == 5
    same = token_work(prompt(20), max_tokens=1, cache_salt="one", tenant="bob")
    engine.run_alone(msgspec.structs.replace(same, release=True), 3)
    assert engine.core.stats().blocks_retained == 0


def test_what_a_request_releases_goes_before_older_prompts() -> None:
    engine = Engine(small())
    engine.submit(1, prompt(20), max_tokens=1)
    engine.run()
    last = token_work(prompt(20, start=30), max_tokens=1, cache_salt="one")
    engine.run_alone(msgspec.structs.replace(last, release=True), 2)
    engine.submit(3, prompt(35, start=60), max_tokens=1)  # nine blocks; six are free
    engine.run()
    assert cached_tokens(engine, 4, prompt(20)) == 16


@pytest.mark.parametrize(
    ("spans", "named"),
    [
        ([RetainedSpan(4, 77)], "77 seconds; 300 or 3600"),
        ([RetainedSpan(4, MINUTES)] * 5, "at most 4"),
    ],
)
def test_hints_that_no_tokenizer_sends_are_refused(spans: list[RetainedSpan], named: str) -> None:
    engine = Engine(small())
    work = msgspec.structs.replace(token_work(prompt(8)), retain=spans)
    rejected = engine.core.add(1, 0, "t", work, 0.0)
    assert rejected is not None
    assert (rejected.status, named in rejected.message) == (400, True)
