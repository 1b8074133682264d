"""Adapters that come and go while steps are computed."""

from __future__ import annotations

import threading
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

import torch

from penstock.kernels.low_rank import LowRank
from penstock.protocol.model_info import BadModelFolder
from penstock.protocol.wire.messages.steps import AdapterLoaded, LoadAdapter
from penstock.services.worker.adapters.adapted_linear import AdaptedLinear
from penstock.services.worker.adapters.model_adapters import ModelAdapters
from penstock.services.worker.adapters.peft_folder import AdapterFolder


class _Read(NamedTuple):
    asked: LoadAdapter
    replaces: bool
    digest: str = ""
    updates: dict[AdaptedLinear, LowRank] | None = None
    reason: str = ""


class AdapterLoader:
    """Reads one adapter at a time in a thread of its own; the steps' thread puts what was read in
    its place, which takes it microseconds."""

    def __init__(self, adapters: ModelAdapters, max_rank: int) -> None:
        """max_rank: ``--max-lora-rank``."""
        self.adapters = adapters
        self._max_rank = max_rank
        self._wanted: SimpleQueue[tuple[LoadAdapter, bool]] = SimpleQueue()
        self._read: SimpleQueue[_Read] = SimpleQueue()
        self._open = 0
        """Adapters that were asked for and are not in their place."""
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        return self._open > 0

    def load(self, asked: LoadAdapter, *, replaces: bool = False) -> None:
        """replaces: there is one of that name, which leaves for it."""
        self._open += 1
        self._wanted.put((asked, replaces))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="adapters", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        torch.set_num_threads(1)
        while True:
            asked, replaces = self._wanted.get()
            try:
                self._read.put(self._reading(asked, replaces))
            except Exception as error:
                self._read.put(_Read(asked, replaces, reason=f"{type(error).__name__}: {error}"))

    @torch.inference_mode()
    def _reading(self, asked: LoadAdapter, replaces: bool) -> _Read:
        try:
            checked = AdapterFolder(Path(asked.folder), self.adapters.sizes, self._max_rank)
            read = checked.read(self.adapters.item_bytes)
            return _Read(asked, replaces, read.digest, self.adapters.prepared(read))
        except (BadModelFolder, RuntimeError) as error:
            return _Read(asked, replaces, reason=str(error))

    def finished(self) -> list[AdapterLoaded]:
        """What has been read since the last call; slots may have it from now on."""
        found: list[AdapterLoaded] = []
        while self._open:
            try:
                read = self._read.get_nowait()
            except Empty:
                break
            self._open -= 1
            found.append(self._placed(read))
        return found

    def _placed(self, read: _Read) -> AdapterLoaded:
        name, folder = read.asked.name, read.asked.folder
        if read.updates is None:
            return AdapterLoaded(name, folder, reason=read.reason)
        try:
            self.adapters.place(read.digest, read.updates, replaces=read.replaces)
        except RuntimeError as error:
            return AdapterLoaded(name, folder, reason=str(error))
        return AdapterLoaded(name, folder, read.digest)

    def drop(self, digest: str) -> None:
        """No later step has a row of it."""
        if digest in self.adapters.numbers:
            self.adapters.remove(digest)
