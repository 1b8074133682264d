"""Which models are awake: with injected time, and no processes."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.protocol.wire.messages.membership import Demand, Sleep
from penstock.services.launcher.residency import (
    AWAKE,
    HELD_SECONDS,
    IDLE_SECONDS,
    KEEP_ALIVE,
    WANTED,
    Residency,
)

MIN_AWAKE = 10.0


class World:
    """A policy, and models that fall asleep and wake as it says, each at once or when told."""

    def __init__(
        self,
        awake: str,
        asleep: str,
        resident: int | None,
        keep_alive: Mapping[str, float | None] | None = None,
        min_awake: float = MIN_AWAKE,
    ) -> None:
        self.now = 100.0
        kept = keep_alive or dict.fromkeys(awake + asleep)
        self.policy = Residency(awake, asleep, resident, kept, min_awake, self.now)

    def use(self, **demands: tuple[int, int] | int) -> None:
        """(open, held) of each model; of one number both."""
        for name in self.policy.models:
            told = demands.get(name, 0)
            is_open, held = told if isinstance(told, tuple) else (told, told)
            self.policy.models[name].observe(Demand(open=is_open, held=held, model=name), self.now)

    def decide(self) -> tuple[list[str], list[tuple[str, str]]]:
        """What is decided; it is done at once."""
        found = self.policy.decide(self.now)
        for name in found.wake:
            self.policy.entered(name, AWAKE, self.now)
        for name, _ in found.sleep:
            self.policy.entered(name, Sleep.ASLEEP, self.now)
        return found.wake, found.sleep

    def state(self, name: str) -> str:
        return self.policy.models[name].state


def test_a_model_that_is_wanted_wakes_at_once_where_there_is_room() -> None:
    world = World("a", "bc", 2)
    world.use(b=1)
    assert world.decide() == (["b"], [])


def test_the_idle_model_that_was_used_least_recently_makes_room() -> None:
    world = World("abc", "d", 3)
    for name in "bac":
        world.now += 1.0
        world.use(**{name: (1, 0)})
    world.now += IDLE_SECONDS
    world.use(d=1)
    assert world.decide() == ([], [("b", WANTED)])
    assert world.decide() == (["d"], [])


def test_a_model_in_use_gives_its_place_only_after_its_time_and_the_oldest_first() -> None:
    world = World("ab", "c", 2)
    world.policy.entered("a", AWAKE, 95.0)
    world.now = 104.9
    world.use(a=(1, 0), b=(5, 0), c=1)
    assert world.decide() == ([], [])
    world.now = 105.0
    world.use(a=(1, 0), b=(5, 0), c=1)
    assert world.decide() == ([], [("a", WANTED)])


def test_a_model_that_may_go_at_once_first_has_what_it_was_woken_for() -> None:
    world = World("a", "b", 1, min_awake=0.0)
    world.use(a=(1, 1), b=1)
    world.now += HELD_SECONDS - 0.1
    assert world.decide() == ([], []), "its request has not reached it"
    world.use(a=(1, 0), b=1)
    assert world.decide() == ([], [("a", WANTED)])
    world = World("a", "b", 1, min_awake=0.0)
    world.use(a=(1, 1), b=1)
    world.now += HELD_SECONDS
    assert world.decide() == ([], [("a", WANTED)]), "it may be that nothing ever does"


def test_a_model_whose_requests_end_between_two_looks_counts_as_used() -> None:
    world = World("a", "b", 1)
    for _ in range(8):
        world.now += 1.0
        ended = world.policy.models["a"].ended + 1
        world.policy.models["a"].observe(Demand(ended=ended), world.now)
        world.policy.models["b"].observe(Demand(open=1, held=1), world.now)
        assert world.decide() == ([], [])
    world.now += 2.0
    world.policy.models["a"].observe(Demand(ended=9), world.now)
    assert world.decide() == ([], [("a", WANTED)])


def test_no_more_models_leave_than_are_wanted() -> None:
    world = World("abc", "d", 3)
    world.now += 60.0
    world.use(d=1)
    found = world.policy.decide(world.now)
    assert found.sleep == [("a", WANTED)]
    world.policy.entered("a", Sleep.FALLING, world.now)
    assert world.policy.decide(world.now) == ([], []), "its place will be free"


def test_two_models_that_are_always_wanted_share_one_place_by_time() -> None:
    world = World("a", "b", 1)
    awake = dict.fromkeys("ab", 0.0)
    switches, longest, waiting = 0, 0.0, dict.fromkeys("ab", 0.0)
    while world.now < 700.0:
        world.now += 0.5
        for name in "ab":
            is_awake = world.state(name) == AWAKE
            awake[name] += 0.5 * is_awake
            waiting[name] = 0.0 if is_awake else waiting[name] + 0.5
            longest = max(longest, waiting[name])
        world.use(**{name: (9, 0) if world.state(name) == AWAKE else 9 for name in "ab"})
        switches += len(world.decide()[0])
    assert longest <= MIN_AWAKE + 1.0, "neither starves"
    assert abs(awake["a"] - awake["b"]) < 2 * MIN_AWAKE
    assert switches <= 600 / MIN_AWAKE, "a model that has woken stays awake for a while"


def test_who_waits_longest_is_woken_first() -> None:
    world = World("a", "bcd", 1)
    world.use(a=(1, 0), c=1)
    world.now += 1.0
    world.use(a=(1, 0), b=7, c=1)
    order = []
    for _ in range(40):
        world.now += 1.0
        held = {name: 1 for name in "bc" if world.state(name) != AWAKE and name not in order}
        world.use(**held)
        order += world.decide()[0]
    assert order == ["c", "b"]


def test_a_model_that_nobody_uses_falls_asleep_after_its_time() -> None:
    world = World("abc", "", None, {"a": 60.0, "b": None, "c": 0.0})
    world.now += IDLE_SECONDS
    world.use(a=(1, 0))
    assert world.decide() == ([], [("c", KEEP_ALIVE)])
    world.now += 59.9
    world.use()
    assert world.decide() == ([], [])
    world.now += 0.1
    world.use()
    assert world.decide() == ([], [("a", KEEP_ALIVE)])
    world.now += 1e6
    world.use(c=1)
    assert world.decide() == (["c"], []), "b stays for ever"


def test_a_model_that_could_not_be_woken_is_left_alone_for_a_while() -> None:
    world = World("a", "b", 2)
    world.policy.entered("b", Sleep.ASLEEP, world.now, not_before=world.now + 30.0)
    world.use(b=1)
    assert world.decide() == ([], [])
    world.now += 30.0
    world.use(b=1)
    assert world.decide() == (["b"], [])


def test_an_administrator_wakes_a_model_that_nobody_wants() -> None:
    world = World("a", "b", 1)
    world.policy.models["b"].asked_at = world.now
    world.now += IDLE_SECONDS
    world.use()
    assert world.decide() == ([], [("a", WANTED)])
    assert world.decide() == (["b"], [])
    world.now += 60.0
    world.use(a=1)
    assert world.decide() == ([], [("b", WANTED)]), "it was asked once"


@pytest.mark.parametrize("resident", [1, 2, 3])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_whatever_is_wanted_the_bound_holds_and_every_request_has_its_turn(
    resident: int, seed: int
) -> None:
    rng = random.Random(seed)
    names = "abcde"
    world = World(names[:resident], names[resident:], resident)
    done_at = dict.fromkeys(names, 0.0)
    """When what falls asleep or wakes is done with that."""
    waits: dict[str, float] = {}
    for _ in range(1500):
        world.now += 0.5
        for name in names:
            if rng.random() < 0.05:
                waits.setdefault(name, world.now)
            state = world.state(name)
            if state in (Sleep.FALLING, Sleep.WAKING) and world.now >= done_at[name]:
                after = AWAKE if state == Sleep.WAKING else Sleep.ASLEEP
                world.policy.entered(name, after, world.now)
            if world.state(name) == AWAKE and rng.random() < 0.5:
                waits.pop(name, None)
        world.use(**{n: (1, int(world.state(n) != AWAKE)) for n in waits})
        found = world.policy.decide(world.now)
        for name in found.wake:
            assert world.state(name) == Sleep.ASLEEP
            world.policy.entered(name, Sleep.WAKING, world.now)
        for name, _ in found.sleep:
            assert world.state(name) == AWAKE
            world.policy.entered(name, Sleep.FALLING, world.now)
        for name in (*found.wake, *(one for one, _ in found.sleep)):
            done_at[name] = world.now + rng.choice((0.5, 1.0, 4.0))
        taken = [name for name in names if world.state(name) != Sleep.ASLEEP]
        assert len(taken) <= resident
        oldest = min(waits.values(), default=world.now)
        assert world.now - oldest < len(names) * (MIN_AWAKE + 10.0), "somebody starves"
