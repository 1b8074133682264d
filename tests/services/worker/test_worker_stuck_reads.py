"""Adapters whose disk does not answer are waited for so long, and no longer."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.polling import until

from penstock.protocol.wire.messages.steps import AdapterBrought, BringAdapter, LoadAdapter
from penstock.services.worker.adapters import adapter_loader, background_work
from penstock.services.worker.adapters.adapter_loader import AdapterLoader
from penstock.services.worker.adapters.background_work import MOST_STUCK, BackgroundWork
from penstock.services.worker.adapters.peft_folder import ReadAdapter

Work = BackgroundWork[str, str]
LIMIT = 120.0


class Disk:
    """Reads end at once, except those of ``hangs``, which end when it is set."""

    def __init__(self, hangs: Iterable[str]) -> None:
        self.hangs = set(hangs)
        self.back = threading.Event()

    def read(self, name: str) -> str:
        if name in self.hangs:
            self.back.wait(LIMIT)
        return name


def begin(work: Work, *names: str) -> None:
    """What hangs may take no time."""
    for name in names:
        work.begin(name, 0.0 if name.startswith("h") else LIMIT)


def test_what_is_stuck_is_given_up_and_the_rest_goes_on() -> None:
    disk = Disk(["h"])
    work = Work("reads", disk.read)
    begin(work, "a")
    assert until(lambda: list(work.finished())) == ["a"]
    begin(work, "h")
    until(lambda: work._turns[0].piece)
    begin(work, "b")
    assert until(lambda: list(work.overdue())) == ["h"]
    assert until(lambda: list(work.finished())) == ["b"] and not work.busy
    assert work.stuck == ["h"]
    disk.back.set()
    until(lambda: not work.stuck)
    work.begin("c")
    assert until(lambda: list(work.finished())) == ["c"], "what was given up never comes"


def test_nothing_waits_behind_as_many_as_may_be_stuck() -> None:
    names = [f"h{number}" for number in range(MOST_STUCK)]
    disk = Disk(names)
    work = Work("reads", disk.read)
    for name in names:
        begin(work, name)
        until(lambda: work._turns[0].piece)
        assert list(work.overdue()) == [name]
    begin(work, "a", "b")
    assert list(work.overdue()) == ["a", "b"] and work.stuck == names and not work.busy
    disk.back.set()
    until(lambda: not work.stuck)
    work.begin("c")
    assert until(lambda: list(work.finished())) == ["c"], "one that came back goes on"


def test_another_thread_begins_behind_one_that_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_work, "SLOW_SECONDS", -1.0)
    disk = Disk(["one", "two"])
    work = Work("reads", disk.read)
    begin(work, "one", "two", "a")
    assert until(lambda: [*work.overdue(), *work.finished()]) == ["a"]
    assert work.busy and not work.stuck, "nothing is given up"
    disk.back.set()
    found: list[str] = []
    until(lambda: found.extend(work.finished()) or not work.busy)
    assert sorted(found) == ["one", "two"]
    until(lambda: len(work._turns) == 1)


def test_what_waits_is_given_up_as_soon_as_what_it_waits_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And waits anew from when something ends."""
    now = [0.0]
    monkeypatch.setattr(background_work, "time", SimpleNamespace(monotonic=lambda: now[0]))
    disk = Disk(["h", "b"])
    work = Work("reads", disk.read)
    work.begin("h", 30.0)
    until(lambda: work._turns[0].piece)
    work.begin("b", 30.0)
    now[0] = 4.0
    assert not list(work.overdue()) and len(work._turns) == 1
    now[0] = 31.0
    assert list(work.overdue()) == ["h", "b"] and not work.busy
    disk.back.set()
    until(lambda: not work.stuck)
    other = Disk(["slow"])
    work = Work("reads", other.read)
    work.begin("slow", LIMIT)
    until(lambda: work._turns[0].piece)
    work.begin("last", 30.0)
    (waiting,) = work._waiting
    now[0] = 50.0
    other.back.set()
    assert until(lambda: list(work.finished()))[0] == "slow"
    assert waiting.since == 50.0


class Adapters:
    """Those of a worker without a model; ``held`` are in the host's memory."""

    model: Any = None
    item_bytes, places = 4, 2

    def __init__(self, held: dict[str, Any], **folders: Path) -> None:
        self.held, self.folders = held, folders
        self.numbers: dict[str, int] = {}

    def keep_only(self, digests: Iterable[str]) -> None:
        pass

    def prepared(self, read: ReadAdapter) -> dict[str, Any]:
        return {}

    def load(self, digest: str, folder: Path, *, replaces: bool) -> None:
        self.folders[digest] = folder

    def coming(self, digest: str) -> None:
        return None

    def hold(self, digest: str, updates: Any) -> None:
        self.held[digest] = updates

    def reserve(self, digest: str) -> None:
        return None


def test_requests_for_an_adapter_that_cannot_be_read_again_get_an_error_and_others_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = Disk(["hung", "late"])

    class Folder:
        def __init__(self, folder: Path, model: object, rank: int) -> None:
            self.folder = folder

        def read(self, item_bytes: int) -> ReadAdapter:
            return ReadAdapter(disk.read(self.folder.name), {})

    monkeypatch.setattr(adapter_loader, "checked_folder", Folder)
    monkeypatch.setattr(adapter_loader, "AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(adapter_loader, "HUNG_SECONDS", 0.5)
    adapters: Any = Adapters({}, hung=Path("/far/hung"), late=Path("/far/late"))
    loader = AdapterLoader(adapters, 8)

    def brought() -> list[AdapterBrought]:
        assert not list(loader.finished())
        return list(loader.brought())

    loader.bring(BringAdapter(1, "hung", []))
    until(lambda: loader._reads._turns[0].piece)
    (refused,) = until(brought)
    assert (refused.number, refused.digest) == (1, "hung")
    assert "/far/hung was not read within 0 s: its disk does not answer" in refused.reason
    loader.bring(BringAdapter(2, "hung", []))
    assert list(loader.brought()) == [AdapterBrought(2, "hung", refused.reason)], "at once"
    assert not loader.busy
    loader.bring(BringAdapter(3, "late", []))
    (refused,) = until(brought)
    assert "/far/late was not read within 0.5 s" in refused.reason, "the disk is known to hang"
    monkeypatch.setattr(adapter_loader, "AGAIN_SECONDS", LIMIT)
    loader.load(LoadAdapter("new", "/near/new"))
    assert [one.digest for one in until(loader.finished)] == ["new"]
    disk.back.set()
    until(lambda: not loader._reads.stuck)
    loader.bring(BringAdapter(4, "hung", []))
    assert "are taken" in until(brought)[0].reason, "it was read: there is only no place here"
