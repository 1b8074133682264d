"""``RankGroup`` on CUDA devices: NCCL for what a step computes, gloo (or encrypted
links) for what the host must know.

A rank that dies leaves the others' kernels waiting on their devices, and their hosts for these. So
a thread of each rank waits for a word of the next one that never comes: the end of that process
ends the wait, and with it all that waits on this device.
"""

from __future__ import annotations

import datetime
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.services.worker.gpu.nccl import Communicator
from penstock.services.worker.models.rank_shares import RankPlace
from penstock.services.worker.rank_group import (
    LIMIT_SECONDS,
    HostRanks,
    Meeting,
    beside,
    connected,
)

_log = logging.getLogger("penstock.worker")
_FOR_EVER = datetime.timedelta(days=3650)
_WATCH = 1


class RankLost(RuntimeError):
    """Another rank of the engine is gone: what this one computes means nothing."""


class DeviceRanks:
    """See ``RankGroup``. Tensors on the host go by gloo."""

    def __init__(self, place: RankPlace, vocab_size: int) -> None:
        self.place, self.vocab_size = place, vocab_size
        self._host = HostRanks(place, vocab_size)
        self._all: Communicator | None = None
        self._stage: Communicator | None = None
        self._lost = ""
        self._lock = threading.Lock()

    def meet(self, meeting: Meeting) -> None:
        """Raises ``RuntimeError`` where the others do not come within ``LIMIT_SECONDS``."""
        self._host.meet(meeting)
        made: list[BaseException | None] = []
        # Waits for the others without a limit of its own.
        thread = threading.Thread(
            target=self._connect, args=(meeting, made, torch.cuda.current_device()),
            name="nccl", daemon=True,
        )  # fmt: skip
        thread.start()
        thread.join(LIMIT_SECONDS)
        if not made:
            raise RuntimeError(f"NCCL has not connected the ranks within {LIMIT_SECONDS:.0f} s")
        if made[0] is not None:
            raise made[0]
        threading.Thread(target=self._watch, args=(meeting,), name="ranks", daemon=True).start()

    def _connect(self, meeting: Meeting, made: list[BaseException | None], device: int) -> None:
        try:
            torch.cuda.set_device(device)
            place, store = self.place, meeting.store(datetime.timedelta(seconds=LIMIT_SECONDS))
            self._all = _communicator(store, f"{meeting.name}/nccl", place.rank, place.size)
            if place.shares > 1:
                name = f"{meeting.name}/nccl {place.stage}"
                self._stage = _communicator(store, name, place.share, place.shares)
        except BaseException as failure:
            made.append(failure)
        else:
            made.append(None)

    def _watch(self, meeting: Meeting) -> None:
        place = self.place
        nobody = torch.zeros(1)
        try:
            group = connected("watch", meeting, place.rank, range(place.size), _FOR_EVER)
            group.recv([nobody], (place.rank + 1) % place.size, _WATCH).wait()
        except RuntimeError as failure:
            self._lost = f"rank {(place.rank + 1) % place.size} is gone: {failure}"
            _log.info("%s", self._lost)
            with self._lock:
                for each in (self._stage, self._all):
                    if each is not None:
                        each.abort()

    def check(self) -> None:
        """Raises ``RankLost`` where what was computed may mean nothing."""
        if self._lost:
            raise RankLost(self._lost)

    def sum(self, x: Tensor) -> Tensor:
        if x.is_cuda and self._stage is not None:
            self._stage.sum(x)
            return x
        return x if x.is_cuda else self._host.sum(x)

    def columns(self, x: Tensor, out: Tensor) -> Tensor:
        """On all ranks of a stage: each draws for itself, so that their graphs are alike."""
        if not x.is_cuda:
            return self._host.columns(x, out)
        if self._stage is None:
            return beside([x], out)
        parts = x.new_empty(self.place.shares, *x.shape)
        self._stage.gather(x, parts)
        return beside(parts.unbind(), out)

    def agree(self, *drawn: Tensor) -> Callable[[], None]:
        if not drawn[0].is_cuda:
            return self._host.agree(*drawn)
        if self._all is not None:
            for each in drawn:
                self._all.broadcast(each)
        return lambda: None  # what comes next on the stream finds it

    def hand_on(self, x: Tensor) -> None:
        if not x.is_cuda:
            self._host.hand_on(x)
        elif self._all is not None:
            self._all.send(x, self.place.rank_at(self.place.stage + 1, self.place.share))

    def take(self, x: Tensor) -> Tensor:
        if not x.is_cuda:
            return self._host.take(x)
        if self._all is None:
            return x.zero_()
        self._all.receive(x, self.place.rank_at(self.place.stage - 1, self.place.share))
        return x


def _communicator(store: Any, name: str, rank: int, size: int) -> Communicator:
    def share(unique: bytes | None) -> bytes:
        if unique is None:
            return bytes.fromhex(store.get(name).decode())
        store.set(name, unique.hex())
        return unique

    return Communicator(rank, size, share)
