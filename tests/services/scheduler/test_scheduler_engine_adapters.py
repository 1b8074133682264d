"""Which adapters an engine has, as its workers load them and requests come to their ends."""

from __future__ import annotations

from typing import Any

from penstock.protocol.wire.messages.administration import AdapterPlace
from penstock.protocol.wire.messages.engine import Adapter
from penstock.protocol.wire.messages.requests import RequestHead
from penstock.protocol.wire.messages.steps import (
    AdapterLoaded,
    DropAdapter,
    LoadAdapter,
    NameAdapters,
)
from penstock.services.scheduler.admission import Offers
from penstock.services.scheduler.engine_adapters import (
    HELD_SECONDS,
    RETURN_SECONDS,
    EngineAdapters,
)

PLACE = AdapterPlace("sql", "/sql", "1")


class World:
    def __init__(self, ranks: int = 1) -> None:
        self.sent: list[Any] = []
        self.used: set[str] = set()
        self.adapters = EngineAdapters(ranks, self.send)

    def send(self, message: Any) -> bool:
        self.sent.append(message)
        return True

    def answer(self, rank: int, digest: str, reason: str = "", now: float = 0.0) -> None:
        self.adapters.answered(rank, AdapterLoaded("sql", "/sql", digest, reason), now)

    def sweep(self, now: float) -> bool:
        def not_done_by(offers: Offers) -> list[int]:
            return [1 for one in self.used if offers.lacks(RequestHead(adapter=one))]

        return self.adapters.sweep(not_done_by, now)


def test_an_adapter_is_the_engines_once_every_rank_has_it() -> None:
    world = World(ranks=2)
    assert world.adapters.load(PLACE).state == "loading"
    assert world.adapters.load(PLACE).state == "loading"
    assert world.sent == [LoadAdapter("sql", "/sql")]
    world.answer(0, "d1")
    assert not world.adapters.digests
    world.answer(1, "d1")
    for _ in range(2):  # whoever did not hear it asks again
        progress = world.adapters.load(PLACE)
        assert (progress.state, progress.digest) == ("loaded", "d1")
    assert world.adapters.adapters == [Adapter("sql", "d1")]


def test_what_one_rank_cannot_load_no_rank_keeps() -> None:
    world = World(ranks=2)
    world.adapters.load(PLACE)
    world.answer(0, "d1")
    world.answer(1, "", "no such folder")
    progress = world.adapters.load(PLACE)
    assert (progress.state, progress.reason) == ("failed", "no such folder")
    assert world.sent[-1] == DropAdapter("d1") and not world.adapters.adapters


def test_ranks_that_read_different_files_have_not_loaded_one() -> None:
    world = World(ranks=2)
    world.adapters.load(PLACE)
    world.answer(0, "d1")
    world.answer(1, "d2")
    assert "changed while they were read" in world.adapters.load(PLACE).reason
    assert {one.digest for one in world.sent[1:]} == {"d1", "d2"}


def test_memory_is_given_back_when_no_request_has_it_any_more() -> None:
    world = World()
    world.adapters.load(PLACE)
    world.answer(0, "d1")
    world.used = {"d1"}
    world.adapters.unload("sql", 10.0)
    assert world.adapters.adapters == [Adapter("", "d1")]
    assert world.adapters.digests == {"d1"}  # what was sent before others heard of it is served
    later = 10.0 + HELD_SECONDS + 1.0
    assert not world.sweep(10.0) and not world.sweep(later)
    world.used.clear()
    assert world.sweep(later) and world.sent[-1] == DropAdapter("d1")
    assert not world.adapters.digests and not world.sweep(later)


def test_a_replaced_adapter_stays_for_its_requests_and_another_name_keeps_it() -> None:
    world = World()
    world.adapters.attached([Adapter("sql", "d1"), Adapter("copy", "d1")], 0.0)
    world.adapters.load(PLACE)
    world.answer(0, "d2")
    assert world.adapters.digests == {"d1", "d2"}
    assert not world.sweep(100.0)
    world.adapters.unload("copy", 100.0)
    assert world.sweep(200.0) and world.adapters.digests == {"d2"}


def test_a_lost_worker_ends_what_it_was_loading() -> None:
    world = World()
    world.adapters.load(PLACE)
    world.adapters.attached([], 0.0)
    assert world.adapters.load(PLACE).reason == "the worker was lost meanwhile"
    other = AdapterPlace("sql", "/sql", "2")
    assert world.adapters.load(other).state == "loading"
    third = world.adapters.load(AdapterPlace("sql", "/sql", "3"))
    assert "by another request" in third.reason


def test_what_leaves_stays_while_another_is_loaded_which_may_be_the_same() -> None:
    world = World()
    world.adapters.attached([Adapter("copy", "d1")], 0.0)
    world.adapters.unload("copy", 0.0)
    world.adapters.load(PLACE)  # of the same content, which nobody knows yet
    assert not world.sweep(100.0) and world.sent[1:] == [LoadAdapter("sql", "/sql")]
    world.answer(0, "d1", now=100.0)
    assert not world.sweep(200.0) and world.adapters.digests == {"d1"}


def test_what_could_not_be_loaded_stays_while_another_is_loaded_which_may_be_the_same() -> None:
    world = World(ranks=2)
    world.adapters.load(PLACE)
    world.adapters.load(AdapterPlace("copy", "/copy", "2"))
    world.adapters.answered(0, AdapterLoaded("copy", "/copy", "d1"), 0.0)
    world.answer(0, "d1")
    world.answer(1, "", "no such folder")
    assert not [one for one in world.sent if isinstance(one, DropAdapter)]
    world.adapters.answered(1, AdapterLoaded("copy", "/copy", "d1"), 0.0)
    assert world.adapters.adapters == [Adapter("copy", "d1")]
    assert not [one for one in world.sent if isinstance(one, DropAdapter)]


def test_workers_are_told_which_names_there_are_for_the_next_scheduler() -> None:
    world = World(ranks=2)
    world.adapters.attached([Adapter("sql", "d1")], 0.0)
    world.adapters.load(PLACE)
    world.answer(0, "d2")
    assert world.sent == [LoadAdapter("sql", "/sql")], "not before every rank has it"
    world.answer(1, "d2")
    assert world.sent[-1] == NameAdapters([Adapter("sql", "d2"), Adapter("", "d1")])
    world.adapters.unload("sql", 0.0)
    assert world.sent[-1] == NameAdapters([Adapter("", "d1"), Adapter("", "d2")])
    world.sent.clear()
    world.adapters.unload("sql", 0.0)
    assert not world.sent, "it is gone already"


def test_what_was_unloaded_stays_so_for_the_next_scheduler_and_its_requests_go_on() -> None:
    world = World()
    world.adapters.attached([Adapter("sql", "d2"), Adapter("", "d1")], 50.0)
    assert world.adapters.digests == {"d1", "d2"}
    assert not world.sweep(50.0 + RETURN_SECONDS), "they may be on their way"
    world.used = {"d1"}
    assert not world.sweep(100.0)
    world.used.clear()
    assert world.sweep(100.0) and world.sent == [DropAdapter("d1")]
    assert world.adapters.adapters == [Adapter("sql", "d2")]


def test_what_a_scheduler_that_is_gone_had_asked_for_is_dropped() -> None:
    world = World()
    world.adapters.attached([Adapter("sql", "d1")], 0.0)
    world.answer(0, "d1")
    assert not world.sent
    world.answer(0, "d2")
    assert world.sent == [DropAdapter("d2")]
