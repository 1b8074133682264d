"""Requests that want answers repeated bit for bit go to engines that do so."""

from __future__ import annotations

from test_router_adapters import FIRST, World

from penstock.protocol.wire.messages.membership import Capacity, Phase
from penstock.protocol.wire.messages.requests import Enqueue, Rejected


def world(*engines: bool) -> World:
    """Engines, by whether they repeat answers."""
    found = World()
    for number, repeats in enumerate(engines, 1):
        found.joined(number, "scheduler", capacity=Capacity(max_model_len=64, repeats=repeats))
    return found


def enqueue(where: World, number: int, attempt: int = FIRST, *, deterministic: bool = True) -> None:
    message = Enqueue(number, attempt, "t", b"work", deterministic=deterministic)
    where.dispatcher.request(message, where.now)


def test_of_engines_of_different_kinds_those_are_chosen_that_repeat_answers() -> None:
    where = world(False, True, False, True)
    for number in range(8):
        enqueue(where, number)
    assert sorted(set(where.where())) == ["2", "4"]
    for number in range(8, 16):
        enqueue(where, number, deterministic=False)
    assert {"1", "3"} <= set(where.where())


def test_what_came_back_is_refused_where_no_engine_is_left_that_does() -> None:
    where = world(False)
    enqueue(where, 1)  # the engine refuses it by name
    assert where.where() == ["1"]
    enqueue(where, 1, FIRST + 1)
    ((_, refused),) = where.sent
    assert isinstance(refused, Rejected) and refused.status == 503
    assert "no engine that is there repeats answers bit for bit (determ" in refused.message


def test_it_waits_for_an_engine_that_loads() -> None:
    where = world(False)
    where.joined(2, "scheduler", Phase.LOADING)
    enqueue(where, 1)
    assert where.where() == []
    where.joined(2, "scheduler", capacity=Capacity(max_model_len=64, repeats=True))
    where.dispatcher.tick(where.now)
    assert where.where() == ["2"]
