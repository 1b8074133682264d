"""``RankGroup`` on CUDA devices: NCCL for what a step computes, and one kernel over peer memory for
sums of few rows (``one_shot``); gloo (or encrypted links) for what the host must know.

A rank that dies leaves the others' kernels waiting on their devices, and their hosts for these. So
a thread of each rank waits for a word of the next one that never comes: the end of that process
ends the wait, and with it all that waits on this device.
"""

from __future__ import annotations

import datetime
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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
    widened,
)

if TYPE_CHECKING:
    from penstock.kernels.gpu.all_reduce import PeerRows
    from penstock.services.worker.gpu.one_shot import OneShotSums

_log = logging.getLogger("penstock.worker")
_FOR_EVER = datetime.timedelta(days=3650)
_WATCH = 1
_LAST, _FIRST = 0, 1
"""Ranks of two that tokens go from and to."""


class RankLost(RuntimeError):
    """Another rank of the engine is gone: what this one computes means nothing."""


class DeviceRanks:
    """See ``RankGroup``. Tensors on the host go by gloo."""

    def __init__(self, place: RankPlace, vocab_size: int, one_shot: bool = True) -> None:
        """one_shot: whether sums of few rows may go over peer memory."""
        self.place, self.vocab_size = place, vocab_size
        self._may_share = one_shot
        self._sums: OneShotSums | None = None
        self._host = HostRanks(place, vocab_size)
        self._all: Communicator | None = None
        self._stage: Communicator | None = None
        self._back: Communicator | None = None
        """From a rank of the last stage to that of the first with the same share."""
        self._side: torch.cuda.Stream | None = None
        self._lost = ""
        self._lock = threading.Lock()

    def meet(self, meeting: Meeting, like: Tensor | None = None) -> None:
        """like: rows [N, D] as they are summed, if there are kernels for that. Raises
        ``RuntimeError`` where the others do not come within ``LIMIT_SECONDS``."""
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
        if like is not None and self.place.shares > 1:
            self._connect_sums(meeting, like)
        # Not before: it waits at the store, which serves one thread of a process at a time.
        threading.Thread(target=self._watch, args=(meeting,), name="ranks", daemon=True).start()

    def _connect_sums(self, meeting: Meeting, like: Tensor) -> None:
        from penstock.services.worker.gpu.one_shot import connect_one_shot

        made: OneShotSums | str = "--disable-custom-all-reduce"
        if self._may_share:
            made = connect_one_shot(meeting, self.place, like)
        words = f"all by NCCL: {made}"
        if not isinstance(made, str):
            self._sums = made
            words = f"of up to {made.shared.rows} rows over peer memory, of more by NCCL"
        if self.place.share == 0:
            _log.info("sums over %d GPUs: %s", self.place.shares, words)

    def _connect(self, meeting: Meeting, made: list[BaseException | None], device: int) -> None:
        try:
            torch.cuda.set_device(device)
            place, store = self.place, meeting.store(datetime.timedelta(seconds=LIMIT_SECONDS))
            self._all = communicator(store, f"{meeting.name}/nccl", place.rank, place.size)
            if place.shares > 1:
                name = f"{meeting.name}/nccl {place.stage}"
                self._stage = communicator(store, name, place.share, place.shares)
            if place.stages > 1 and (place.is_first or place.is_last):
                name = f"{meeting.name}/nccl back {place.share}"
                self._back = communicator(store, name, _LAST if place.is_last else _FIRST, 2)
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
            self.end(f"rank {(place.rank + 1) % place.size} is gone: {failure}")

    def end(self, reason: str) -> None:
        """End what waits for other ranks on this device, from any thread."""
        self._lost = reason
        _log.info("%s", reason)
        with self._lock:
            if self._sums is not None:
                self._sums.stop()
            for each in (self._stage, self._all, self._back):
                if each is not None:
                    each.abort()

    def check(self) -> None:
        """Raises ``RankLost`` where what was computed may mean nothing."""
        if self._lost:
            raise RankLost(self._lost)
        if self._sums is not None and self._sums.gave_up:
            raise RankLost("another rank has not sent its part of a sum for minutes")

    def sum(self, x: Tensor) -> Tensor:
        if not x.is_cuda:
            return self._host.sum(x)
        if self._sums is not None and self._sums.shared.holds(x):
            self._sums.sum(x)
        elif self._stage is not None:
            self._stage.sum(x)
        return x

    def shared_rows(self, x: Tensor) -> PeerRows | None:
        sums = self._sums
        return sums.shared if sums is not None and sums.shared.holds(x) else None

    def gather(self, x: Tensor) -> Tensor:
        if not x.is_cuda:
            return self._host.gather(x)
        if self._stage is None:
            return x.expand(self.place.shares, *x.shape)
        parts = x.new_empty(self.place.shares, *x.shape)
        self._stage.gather(x.contiguous(), parts)
        return parts

    def from_first(self, x: Tensor) -> Tensor:
        if not x.is_cuda:
            return self._host.from_first(x)
        if self._stage is not None:
            self._stage.broadcast(x)
        return x

    def columns(self, x: Tensor) -> Tensor:
        if not x.is_cuda:
            return self._host.columns(x)
        if self._stage is None:
            return beside([x], self.vocab_size)
        parts = self.gather(widened(x, self.vocab_size, self.place))
        return beside(parts.unbind(), self.vocab_size)

    def agree(self, drawn: Tensor) -> Callable[[], None]:
        return self._host.agree(drawn)

    def send_tokens(self, tokens: Tensor) -> None:
        if self._back is not None:
            self._back.send(tokens, _FIRST)

    def receive_tokens(self, tokens: Tensor, free: torch.cuda.Event | None) -> Callable[[], None]:
        """On a stream of its own: the last stage, which sends in its turn, waits for nobody."""
        back = self._back
        if back is None:
            return lambda: None
        if self._side is None:
            self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._side):
            if free is not None:
                self._side.wait_event(free)
            back.receive(tokens, _LAST)
            done.record()
        return lambda: torch.cuda.current_stream().wait_event(done)

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


def communicator(store: Any, name: str, rank: int, size: int) -> Communicator:
    """NCCL's connections of a group, whose id its first rank tells the others at a store."""

    def share(unique: bytes | None) -> bytes:
        if unique is None:
            return bytes.fromhex(store.get(name).decode())
        store.set(name, unique.hex())
        return unique

    return Communicator(rank, size, share)
