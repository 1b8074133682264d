"""Adapters take turns in the places of a device, and the requests for them wait for each other."""

from __future__ import annotations

import gc
import itertools
import random
from collections import deque
from weakref import ref

import pytest
from support.scheduler.scheduler_harness import ROOMY, Engine, prompt, small

from penstock.protocol.wire.messages.steps import AdapterBrought, StepFailed, StepPlan
from penstock.services.scheduler.adapter_places import ASK_SECONDS, TURN_SECONDS
from penstock.services.scheduler.adapter_waiters import Waiter
from penstock.services.scheduler.admission import Offers
from penstock.services.scheduler.limits import Limits

STEP_SECONDS = 0.05


class Places:
    """What one worker has on its device; refuses what may not be."""

    def __init__(self, engine: AdaptedEngine) -> None:
        self.engine = engine
        self.resident = set(engine.offers.resident)
        self.slots: dict[int, str] = {}
        self.answers: deque[AdapterBrought] = deque()

    def execute(self, plan: StepPlan) -> None:
        if plan.full:
            self.slots.clear()
        for slot in plan.gone:
            self.slots.pop(slot)
        self.slots |= {new.slot: new.adapter for new in plan.added}
        assert {one for one in self.slots.values() if one} <= self.resident, "computed without it"

    def tell(self) -> None:
        """Take what the scheduler says."""
        for asked in self.engine.core.adapters.to_workers:
            self.resident = (self.resident & set(asked.keeps)) | {asked.digest}
            assert len(self.resident) <= (self.engine.offers.places or 0)
            self.answers.append(AdapterBrought(asked.number, asked.digest))
        self.engine.core.adapters.to_workers.clear()


class AdaptedEngine(Engine):
    """An engine with the adapters a to h, of which the first are in its places."""

    def __init__(
        self, places: int = 2, limits: Limits = ROOMY, ranks: int = 1, policy: str = "fcfs"
    ) -> None:
        self.offers = Offers(
            adapters=frozenset("abcdefgh"), places=places, resident="abcdefgh"[:places]
        )
        super().__init__(limits, policy, num_ranks=ranks, offers=self.offers)
        self.places = Places(self)

    def plan(self) -> StepPlan | None:
        plan = super().plan()
        if plan is not None:
            self.places.execute(plan)
        self.places.tell()
        return plan

    def come(self) -> None:
        """The oldest bringing is over."""
        self.core.adapters.answered(1, self.places.answers.popleft(), self.now)
        self.take(self.core.drain())
        self.core.check()

    def turn(self, *, comes: bool = True) -> None:
        """A step, in which what was asked for comes."""
        self.now += STEP_SECONDS
        self.step()
        while comes and self.places.answers:
            self.come()

    def until_over(self, turns: int = 4000) -> None:
        for _ in range(turns):
            if not any(stream.open for stream in self.streams.values()):
                return
            self.turn()
        raise AssertionError(f"not over after {turns} turns: {self.core.stats()}")

    def over(self, request_id: int) -> bool:
        return self.streams[request_id, 0].end is not None


@pytest.mark.parametrize("seed", range(6))
def test_eight_adapters_in_two_places_give_each_request_its_own_tokens(seed: int) -> None:
    """Preempted for want of memory, cancelled, with workers that are lost in between."""
    chance = random.Random(seed)
    limits = small() if seed % 2 else ROOMY
    engine = AdaptedEngine(1 + seed % 3, limits)
    left = list(range(1, 61))
    while left or any(stream.open for stream in engine.streams.values()):
        if left and chance.random() < 0.5:
            number, length = left.pop(), chance.randrange(1, 20)
            engine.submit(
                number, prompt(length, chance.randrange(3)), chance.randrange(1, 20),
                n=chance.choice([1, 1, 2]), adapter=chance.choice(["", *"abcdefgh"]),
                stop_ids=list(range(chance.randrange(4))),
            )  # fmt: skip
        if chance.random() < 0.02:
            engine.cancel(chance.choice([number for number, _ in engine.streams] or [0]))
        if chance.random() < 0.01:
            engine.take(engine.core.worker_gone())
            engine.answers.clear()
            engine.restart(offers=engine.offers)
            engine.places = Places(engine)
        engine.turn(comes=chance.random() < 0.3)
        assert engine.now < 600.0, "somebody is starved"
    counters = engine.core.adapters.counters
    assert counters.evicted > 5 and not counters.failed
    engine.turn()
    engine.assert_idle()


def test_who_waits_for_an_adapter_that_closes_again_and_again_is_known_once() -> None:
    engine = AdaptedEngine()
    engine.submit(1, prompt(4), adapter="a")
    (sequence,) = engine.core._requests.sequences()
    place = sequence.queue_place
    assert place is not None
    held = engine.core.adapters._resident["a"]
    for _ in range(3):
        held.release([Waiter(sequence, place, place)])
    assert len(held.released) == 1


def test_others_start_past_a_request_whose_adapter_finds_no_place() -> None:
    engine = AdaptedEngine()
    for number, adapter in enumerate("abc", 1):
        engine.submit(number, prompt(5), max_tokens=15, adapter=adapter)
    engine.submit(4, prompt(5), max_tokens=2, adapter="a")
    engine.submit(5, prompt(5), max_tokens=2)
    for _ in range(5):
        engine.turn()
    assert engine.over(4) and engine.over(5) and not engine.tokens(3)
    assert engine.core.stats().waiting_for["adapter"] == 1
    engine.until_over()
    assert engine.started == [1, 2, 4, 5, 3]


def test_the_queue_is_as_old_as_the_first_request_that_waits_for_its_adapter() -> None:
    engine = AdaptedEngine()
    for number, adapter in enumerate("abc", 1):
        engine.submit(number, prompt(5), max_tokens=15, adapter=adapter)
    engine.turn()
    engine.now += 7.0
    assert engine.core.queue_age(engine.now) == engine.now, "of the one for c"
    engine.until_over()
    assert engine.core.queue_age(engine.now) == 0.0


def test_the_least_recently_used_one_that_nobody_runs_leaves() -> None:
    engine = AdaptedEngine(3)
    engine.submit(1, prompt(5), max_tokens=2, adapter="a")
    engine.until_over()
    engine.submit(2, prompt(5), max_tokens=90, adapter="b")
    for number, adapter in ((3, "d"), (4, "e")):
        engine.submit(number, prompt(5), max_tokens=2, adapter=adapter)
        while not engine.over(number):
            engine.turn()
    assert engine.places.resident == {"b", "d", "e"}, "c went first, and then a"


def test_an_adapter_stays_while_an_unanswered_step_has_a_row_of_it() -> None:
    engine = AdaptedEngine(1)
    engine.submit(1, prompt(5), max_tokens=1, adapter="a")
    engine.submit(2, prompt(5), max_tokens=1, adapter="b")
    engine.plan()
    engine.plan()  # it has left its slot for want of a further token
    assert not engine.places.answers and engine.places.resident == {"a"}
    engine.deliver()
    engine.plan()
    assert engine.places.resident == {"b"}


def test_newcomers_of_adapters_that_are_there_do_not_starve_another() -> None:
    """Nor are they starved."""
    engine = AdaptedEngine()
    streams = engine.streams

    def newcomers() -> None:
        for adapter in "ab":
            engine.submit(len(streams), prompt(5), max_tokens=6, adapter=adapter)
        engine.turn()

    newcomers()
    for number, adapter in ((900, "c"), (901, "d")):
        engine.submit(number, prompt(5), max_tokens=4, adapter=adapter)
    while not (engine.over(900) and engine.over(901)):
        newcomers()
        assert engine.now < 5 * TURN_SECONDS
    assert engine.now > TURN_SECONDS
    waiting = [one for one in streams.values() if one.open]
    while any(one.open for one in waiting):
        newcomers()
        assert engine.now < 10 * TURN_SECONDS


def test_one_long_request_in_the_place_that_is_closed_first_does_not_hold_up_the_next() -> None:
    engine = AdaptedEngine()
    engine.submit(0, prompt(5), max_tokens=190, adapter="a")
    engine.submit(1, prompt(5), max_tokens=6, adapter="b")
    engine.turn()
    engine.submit(900, prompt(5), max_tokens=4, adapter="c")
    while not engine.over(900):
        engine.submit(len(engine.streams), prompt(5), max_tokens=6, adapter="b")
        engine.turn()
        assert engine.now < 4 * TURN_SECONDS
    assert not engine.over(0)
    engine.until_over()


def test_a_request_whose_adapter_has_come_keeps_it_until_there_is_room() -> None:
    engine = AdaptedEngine(limits=small(max_num_seqs=3, num_blocks=128, max_model_len=150))
    engine.submit(1, prompt(4), max_tokens=140, adapter="a")
    engine.submit(2, prompt(4), max_tokens=140)
    engine.turn(comes=False)
    for number, adapter in ((3, "c"), (4, "d"), (5, "")):
        engine.submit(number, prompt(4), max_tokens=60 if number == 5 else 4, adapter=adapter)
    engine.turn()
    assert engine.started == [1, 2, 5], "which took the last slot while c came"
    while not engine.over(5):
        assert engine.places.resident == {"a", "c"}
        engine.turn()
    assert engine.now > 2 * TURN_SECONDS
    engine.until_over()
    assert engine.started == [1, 2, 5, 3, 4]


def test_one_that_finds_no_room_gives_way_to_a_more_urgent_one() -> None:
    limits = small(max_num_seqs=2, num_blocks=64, max_model_len=150)
    engine = AdaptedEngine(1, limits, policy="priority")
    engine.submit(2, prompt(4), max_tokens=4, adapter="b", priority=5)
    engine.turn(comes=False)
    for number in (3, 4):
        engine.submit(number, prompt(4), max_tokens=40, priority=1)
    engine.turn()
    engine.turn()
    assert engine.places.resident == {"b"} and not engine.tokens(2)
    engine.submit(5, prompt(4), max_tokens=4, adapter="c", priority=0)
    engine.until_over()
    assert engine.started.index(5) < engine.started.index(2)


def test_who_loses_a_slot_finds_its_adapter_where_it_was() -> None:
    """A failed step takes all slots; who has run before starts before those who have not."""
    engine = AdaptedEngine(3)
    for number, adapter in enumerate("abc", 1):
        engine.submit(number, prompt(5), max_tokens=60, adapter=adapter)
    engine.turn()
    engine.submit(4, prompt(5), max_tokens=4, adapter="d")
    engine.turn()
    engine.turn()
    failed = StepFailed(1, engine.core.oldest_unanswered, "broken")
    engine.answers.clear()
    engine.worker._needs_full = True
    engine.take(engine.core.fail(failed, engine.now))
    engine.turn()
    assert engine.places.resident == {"a", "b", "c"}
    engine.until_over()
    assert engine.started == [1, 2, 3, 1, 2, 3, 4]
    counters = engine.core.adapters.counters
    assert engine.core.adapters.num_resident == 3 + counters.brought - counters.evicted


def test_who_is_resident_fills_the_batch_while_another_one_waits_for_a_place() -> None:
    engine, ids = AdaptedEngine(4), itertools.count(1)

    def newcomers() -> None:
        for _ in range(8 - engine.core.stats().waiting_requests):
            number = next(ids)
            engine.submit(number, prompt(5), 60 + 10 * (number % 7), adapter="abcd"[number % 4])

    for _ in range(40):
        newcomers()
        engine.turn()
    engine.submit(0, prompt(5), max_tokens=2, adapter="h")
    began, least = engine.now, 8
    while not engine.over(0):
        newcomers()
        engine.turn()
        least = min(least, engine.core.stats().running)
        assert engine.now < began + 12 * TURN_SECONDS
    assert least >= 7


@pytest.mark.parametrize("policy", ["fcfs", "priority", "sjf", "fair"])
def test_each_of_many_adapters_in_few_places_has_its_turn(policy: str) -> None:
    """Of clients who come again at once, nobody waits for much longer than a round takes."""
    chance, round_seconds = random.Random(7), 8 / 2 * 20 * STEP_SECONDS
    engine = AdaptedEngine(2, small(max_num_seqs=4, num_blocks=64), policy=policy)
    came: dict[int, float] = {}
    for number in range(1, 121):
        engine.submit(
            number, prompt(chance.randrange(1, 8)), chance.randrange(1, 20),
            n=chance.choice([1, 1, 1, 2]), adapter=chance.choice("abcdefgh"),
            tenant=chance.choice("xyz"),
        )  # fmt: skip
        came[number] = engine.now
        while len(engine.core._requests) > 12:
            engine.turn(comes=chance.random() < 0.5)
            for started in engine.started:
                came.pop(started, None)
            engine.started.clear()
            assert engine.now - min(came.values(), default=engine.now) < 3 * round_seconds


def test_who_waits_and_goes_leaves_nothing() -> None:
    engine = AdaptedEngine(1)
    engine.submit(0, prompt(5), max_tokens=150, adapter="a")
    engine.submit(1, prompt(5), max_tokens=5, adapter="b")
    engine.turn()
    for number in range(2, 300):
        engine.submit(number, prompt(5), max_tokens=5, adapter="b")
        engine.plan()
        engine.cancel(number)
    assert len(engine.core.adapters._wanted["b"]) <= 64
    engine.until_over()


def test_what_cannot_be_brought_ends_those_who_wait_and_nobody_else() -> None:
    engine = AdaptedEngine()
    engine.submit(1, prompt(5), max_tokens=5, adapter="c")
    engine.submit(2, prompt(5), max_tokens=5, adapter="b")
    engine.plan()
    asked = engine.places.answers.pop()
    broken = AdapterBrought(asked.number, asked.digest, "no memory")
    engine.core.adapters.answered(1, broken, engine.now)
    engine.take(engine.core.drain())
    end = engine.end(1)
    assert end.status == 500 and "could not be brought to the device: no memory" in end.message
    engine.until_over()
    engine.submit(3, prompt(5), max_tokens=5, adapter="c")
    engine.until_over()
    assert engine.core.adapters.counters.failed == 1
    engine.core.adapters.answered(1, broken, engine.now)  # comes twice, and late


def test_every_rank_must_have_it_and_is_asked_again_when_it_is_silent() -> None:
    engine = AdaptedEngine(ranks=2)
    engine.submit(1, prompt(5), max_tokens=5, adapter="c")
    engine.plan()
    (asked,) = engine.places.answers
    for _ in range(2):
        engine.core.adapters.answered(1, asked, engine.now)
    assert engine.core.stats().waiting_for["adapter"] == 1
    engine.now += ASK_SECONDS + 1.0
    engine.plan()
    assert list(engine.places.answers) == [asked, asked]
    engine.core.adapters.answered(2, asked, engine.now)
    assert not engine.core.stats().waiting_for["adapter"]


def test_an_adapter_that_is_loaded_takes_a_free_place_and_one_that_goes_frees_it() -> None:
    engine = AdaptedEngine()
    adapters = engine.core.adapters
    adapters.offered(frozenset("bcd"), 0.0)  # a is gone
    engine.places.tell()
    assert engine.places.resident == {"b", "c"} and len(engine.places.answers) == 1
    adapters.offered(frozenset("bd"), 0.0)  # c, too, before it has come
    engine.places.tell()
    assert engine.places.resident == {"b", "d"}
    engine.come()
    engine.come()
    assert adapters.num_resident == 2
    engine.core.check()


def test_what_has_ended_is_kept_by_no_place() -> None:
    """Its prompt and its output may be long."""
    engine = AdaptedEngine()
    for number, adapter in enumerate("aab"):
        engine.submit(number, prompt(9), 3, adapter=adapter)
    (known,) = [
        ref(one)
        for one in engine.core._requests.get(1).open.values()  # type: ignore[union-attr]
    ]
    engine.run()
    engine.assert_finished(1)
    assert engine.core.prefixes is not None
    engine.core.prefixes.report(0)  # a beat looks at what has ended
    gc.collect()
    assert known() is None


def test_nobody_is_brought_for_those_who_have_gone() -> None:
    engine = AdaptedEngine(1)
    engine.submit(1, prompt(5), max_tokens=60, adapter="a")
    engine.submit(2, prompt(5), max_tokens=5, adapter="b")
    engine.turn()
    engine.cancel(2)
    engine.until_over()
    assert engine.places.resident == {"a"} and not engine.core.adapters.counters.evicted


def test_an_engine_that_says_nothing_of_places_has_every_adapter() -> None:
    engine = Engine()
    engine.submit(1, prompt(5), adapter="x")
    engine.run()
    engine.assert_finished(1)
