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
from penstock.services.worker.adapters.model_adapters import Coming, ModelAdapters, Updates
from penstock.services.worker.adapters.peft_folder import AdapterFolder


class _Wanted(NamedTuple):
    asked: LoadAdapter
    replaces: bool


class _Read(NamedTuple):
    wanted: _Wanted
    digest: str = ""
    updates: Updates | None = None
    reason: str = ""


class _Filled(NamedTuple):
    coming: Coming
    reason: str = ""


class AdapterLoader:
    """Reads one adapter at a time in a thread of its own, and fills one place at a time in another;
    the steps' thread takes note of what was done, which takes it microseconds."""

    def __init__(self, adapters: ModelAdapters, max_rank: int) -> None:
        """max_rank: ``--max-lora-rank``."""
        self.adapters = adapters
        self._max_rank = max_rank
        self._reads = BackgroundWork("adapters read", self._read)
        self._fills = BackgroundWork("adapters brought", self._fill)
        self._brings: dict[str, int] = {}
        """Digest → number of the latest bringing that was asked for and is not over."""
        self._answers: list[AdapterBrought] = []

    @property
    def busy(self) -> bool:
        """Whether something is read or brought."""
        return self._reads.busy or self._fills.busy

    def load(self, asked: LoadAdapter, *, replaces: bool = False) -> None:
        """replaces: there is one of that name, which leaves for it."""
        self._reads.begin(_Wanted(asked, replaces))

    def _read(self, wanted: _Wanted) -> _Read:
        try:
            folder = Path(wanted.asked.folder)
            checked = AdapterFolder(folder, self.adapters.sizes, self._max_rank)
            read = checked.read(self.adapters.item_bytes)
            return _Read(wanted, read.digest, self.adapters.prepared(read))
        except (BadModelFolder, RuntimeError) as error:
            return _Read(wanted, reason=str(error))
        except Exception as error:
            return _Read(wanted, reason=f"{type(error).__name__}: {error}")

    def finished(self) -> list[AdapterLoaded]:
        """What has been read since the last call."""
        return [self._held(read) for read in self._reads.finished()]

    def _held(self, read: _Read) -> AdapterLoaded:
        asked, replaces = read.wanted
        name, folder = asked.name, asked.folder
        if read.updates is None:
            return AdapterLoaded(name, folder, reason=read.reason)
        try:
            self.adapters.hold(read.digest, read.updates, replaces=replaces)
        except RuntimeError as error:
            return AdapterLoaded(name, folder, reason=str(error))
        return AdapterLoaded(name, folder, read.digest)

    def bring(self, asked: BringAdapter) -> None:
        """Bring an adapter into a place, beside those that must stay in theirs."""
        adapters, digest = self.adapters, asked.digest
        adapters.keep_only({*asked.keeps, digest})
        self._brings[digest] = asked.number
        if digest in adapters.numbers:
            self._answer(digest)
        elif digest not in adapters.held:
            self._answer(digest, "the worker has not loaded the adapter")
        elif adapters.coming(digest) is not None:
            return  # its answer will come
        elif (coming := adapters.reserve(digest)) is not None:
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
