"""Adapters whose disk does not answer are waited for so long, and no longer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from penstock.protocol.wire.messages.steps import AdapterBrought, BringAdapter, LoadAdapter
from penstock.services.worker.adapters import adapter_loader
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


def until(found: Callable[[], Any]) -> Any:
    """What is found once there is something."""
    nap = threading.Event()
    for _ in range(int(LIMIT / 0.001)):
        if one := found():
            return one
        nap.wait(0.001)
    raise AssertionError("it never came")


def seconds(name: str) -> float:
    return 0.0 if name.startswith("h") else LIMIT


def test_what_is_stuck_is_given_up_and_the_rest_goes_on() -> None:
    disk = Disk(["h"])
    work = Work("reads", disk.read)
    for name in ("a", "h", "b"):
        work.begin(name)
    assert until(lambda: list(work.finished())) == ["a"]
    assert until(lambda: list(work.overdue(seconds))) == ["h"]
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
    for name in (*names, "a", "b"):
        work.begin(name)
    found: list[str] = []
    until(lambda: found.extend(work.overdue(seconds)) or not work.busy)
    assert found == [*names, "a", "b"] and work.stuck == names
    disk.back.set()
    until(lambda: not work.stuck)
    work.begin("c")
    assert until(lambda: list(work.finished())) == ["c"], "one that came back goes on"


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
    disk = Disk(["hung"])

    class Folder:
        def __init__(self, folder: Path, model: object, rank: int) -> None:
            self.folder = folder

        def read(self, item_bytes: int) -> ReadAdapter:
            return ReadAdapter(disk.read(self.folder.name), {})

    monkeypatch.setattr(adapter_loader, "checked_folder", Folder)
    monkeypatch.setattr(adapter_loader, "AGAIN_SECONDS", 0.0)
    adapters: Any = Adapters({}, hung=Path("/far/hung"))
    loader = AdapterLoader(adapters, 8)

    def brought() -> list[AdapterBrought]:
        assert not list(loader.finished())
        return list(loader.brought())

    loader.bring(BringAdapter(1, "hung", []))
    (refused,) = until(brought)
    assert (refused.number, refused.digest) == (1, "hung")
    assert "/far/hung was not read within 0 s: its disk does not answer" in refused.reason
    loader.bring(BringAdapter(2, "hung", []))
    assert list(loader.brought()) == [AdapterBrought(2, "hung", refused.reason)], "at once"
    assert not loader.busy
    monkeypatch.setattr(adapter_loader, "AGAIN_SECONDS", LIMIT)
    loader.load(LoadAdapter("new", "/near/new"))
    assert [one.digest for one in until(loader.finished)] == ["new"]
    disk.back.set()
    until(lambda: not loader._reads.stuck)
    loader.bring(BringAdapter(3, "hung", []))
    assert "are taken" in until(brought)[0].reason, "it was read: there is only no place here"
