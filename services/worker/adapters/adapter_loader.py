"""Adapters that come and go while steps are computed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.protocol.model_info import BadModelFolder
from penstock.protocol.wire.messages.steps import (
    AdapterBrought,
    AdapterLoaded,
    BringAdapter,
    LoadAdapter,
)
from penstock.services.worker.adapters.background_work import BackgroundWork
from penstock.services.worker.adapters.checked_folder import checked_folder
from penstock.services.worker.adapters.model_adapters import Coming, ModelAdapters, Updates

LOAD_SECONDS = 600.0
"""An adapter that is loaded is read for so long, at most; frontends wait as long for it."""
AGAIN_SECONDS = 30.0
"""The same of one that is read again, for requests that wait, …"""
HUNG_SECONDS = 5.0
"""… and while another one is not read, although it was given up."""


class _Wanted(NamedTuple):
    folder: Path
    name: str = ""
    replaces: bool = False
    again: str = ""
    """Digest of one that is loaded, and in memory no more."""
    seconds: float = LOAD_SECONDS
    """How long it may take."""

    @property
    def stuck(self) -> str:
        """What is said where it takes longer."""
        return (
            f"{self.folder} was not read within {self.seconds:g} s: its disk does not answer, or "
            "is too slow; once it is back, try again"
        )


class _Read(NamedTuple):
    wanted: _Wanted
    digest: str = ""
    updates: Updates | None = None
    reason: str = ""
    virtual_tokens: int = 0


class _Filled(NamedTuple):
    coming: Coming
    reason: str = ""


class AdapterLoader:
    """Reads one adapter at a time in a thread of its own, others beside one that takes long, and
    fills one place at a time in another thread; the steps' thread takes note of what was done,
    which takes it microseconds."""

    def __init__(self, adapters: ModelAdapters, max_rank: int) -> None:
        """max_rank: ``--max-lora-rank``."""
        self.adapters = adapters
        self._max_rank = max_rank
        self._reads = BackgroundWork("adapters read", self._read)
        self._fills = BackgroundWork("adapters brought", self._fill)
        self._again: set[str] = set()
        """Digests of those that are read again."""
        self._brings: dict[str, int] = {}
        """Digest → number of the latest bringing that was asked for and is not over."""
        self._answers: list[AdapterBrought] = []

    @property
    def busy(self) -> bool:
        """Whether something is read or brought."""
        return self._reads.busy or self._fills.busy

    def load(self, asked: LoadAdapter, *, replaces: bool = False) -> None:
        """replaces: there is one of that name, which leaves for it."""
        self._begin(_Wanted(Path(asked.folder), asked.name, replaces))

    def _begin(self, wanted: _Wanted) -> None:
        self._reads.begin(wanted, wanted.seconds)

    def _read(self, wanted: _Wanted) -> _Read:
        try:
            checked = checked_folder(wanted.folder, self.adapters.model, self._max_rank)
            read = checked.read(self.adapters.item_bytes)
            updates = self.adapters.prepared(read)
            return _Read(wanted, read.digest, updates, virtual_tokens=read.virtual_tokens)
        except (BadModelFolder, RuntimeError) as error:
            return _Read(wanted, reason=str(error))
        except Exception as error:
            return _Read(wanted, reason=f"{type(error).__name__}: {error}")

    def finished(self) -> list[AdapterLoaded]:
        """What has been loaded since the last call, or could not be."""
        found = []
        given_up = [_Read(wanted, reason=wanted.stuck) for wanted in self._reads.overdue()]
        for read in (*self._reads.finished(), *given_up):
            if read.wanted.again:
                self._held_again(read, read.wanted.again)
            else:
                found.append(self._loaded(read))
        return found

    def _loaded(self, read: _Read) -> AdapterLoaded:
        folder, name, replaces = read.wanted[:3]
        if read.updates is None:
            return AdapterLoaded(name, str(folder), reason=read.reason)
        try:
            self.adapters.load(read.digest, folder, replaces=replaces)
        except RuntimeError as error:
            return AdapterLoaded(name, str(folder), reason=str(error))
        self.adapters.hold(read.digest, read.updates)
        return AdapterLoaded(name, str(folder), read.digest, virtual_tokens=read.virtual_tokens)

    def _held_again(self, read: _Read, digest: str) -> None:
        self._again.discard(digest)
        if digest not in self.adapters.folders:
            return  # it is unloaded by now
        reason = read.reason
        if not reason and read.digest != digest:
            reason = f"{read.wanted.folder} has changed since it was loaded; load it anew"
        if read.updates is not None and not reason:
            self.adapters.hold(digest, read.updates)
        if digest in self._brings and reason:
            self._answer(digest, reason)
        elif digest in self._brings:
            self._place(digest)

    def bring(self, asked: BringAdapter) -> None:
        """Bring an adapter into a place, beside those that must stay in theirs."""
        adapters, digest = self.adapters, asked.digest
        wanted = {*asked.keeps, digest}
        adapters.keep_only(wanted)
        self._brings = {one: number for one, number in self._brings.items() if one in wanted}
        self._brings[digest] = asked.number
        if digest in adapters.numbers:
            self._answer(digest)
        elif digest not in adapters.folders:
            self._answer(digest, "the worker has not loaded the adapter")
        elif digest in adapters.held:
            self._place(digest)
        elif stuck := [one for one in self._reads.stuck if one.again == digest]:
            self._answer(digest, stuck[0].stuck)
        elif digest not in self._again:
            self._again.add(digest)
            seconds = HUNG_SECONDS if self._reads.stuck else AGAIN_SECONDS
            self._begin(_Wanted(adapters.folders[digest], again=digest, seconds=seconds))

    def _place(self, digest: str) -> None:
        """Begin to fill a place with an adapter, unless that has begun."""
        adapters = self.adapters
        if adapters.coming(digest) is not None:
            return
        if (coming := adapters.reserve(digest)) is not None:
            self._fills.begin(coming)
        else:
            self._answer(digest, f"all {adapters.places} places (--max-loras) are taken")

    def _answer(self, digest: str, reason: str = "") -> None:
        number = self._brings.pop(digest, 0)
        self._answers.append(AdapterBrought(number, digest, reason))

    def _fill(self, coming: Coming) -> _Filled:
        try:
            self.adapters.fill(coming)
        except Exception as error:
            return _Filled(coming, f"{type(error).__name__}: {error}")
        return _Filled(coming)

    def brought(self) -> Sequence[AdapterBrought]:
        """What is in its place since the last call, or cannot be; slots may have it from now on."""
        for coming, reason in self._fills.finished():
            wanted = self.adapters.coming(coming.digest) is coming
            if wanted and reason:
                self.adapters.abandon(coming)
            elif wanted:
                self.adapters.settle(coming)
            if wanted:
                self._answer(coming.digest, reason)
        if not self._answers:
            return ()
        answers, self._answers = self._answers, []
        return answers

    def drop(self, digest: str) -> None:
        """No later step has a row of it."""
        self._brings.pop(digest, None)
        self.adapters.remove(digest)
