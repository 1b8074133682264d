"""The ranks of one engine, as one of them sees the others: what they add up, gather and hand on.

A rank loads its share of the model alone. The ranks meet when the scheduler has made a group of
them: rank 0 listens at an address that every ``Attach`` of the group holds. Before that each takes
its own part for the whole, so that a step can be measured.

No rank waits for ever: what takes longer than ``LIMIT_SECONDS`` raises, and the end of a process
closes its connections, which raises at once wherever somebody waits for it.
"""

from __future__ import annotations

import datetime
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.services.worker.models.rank_shares import RankPlace

LIMIT_SECONDS = 120.0
"""Most time that a rank waits for the others: the longest step, and what ranks may lie apart."""


class RankGroup(Protocol):
    """Called by all ranks that share a stage, or by all of the engine, in the same order."""

    place: RankPlace

    def meet(self, meeting: Meeting) -> None:
        """Find the other ranks. Raises ``RuntimeError`` where they do not come in time."""

    def sum(self, x: Tensor) -> Tensor:
        """``x`` with the sum over the ranks of a stage in it, the same bits on all of them."""

    def columns(self, x: Tensor, count: int) -> Tensor:
        """The first ``count`` columns of what the ranks of a stage have side by side. x: [R, n].
        Returns [R, count] on the first of them, elsewhere anything of that shape."""

    def agree(self, tokens: Tensor) -> None:
        """Overwrite ``tokens`` with those of rank 0, on all ranks."""

    def hand_on(self, x: Tensor) -> None:
        """Give ``x`` to the next stage."""

    def take(self, x: Tensor) -> Tensor:
        """``x`` with what the stage ahead has handed on in it."""


class Meeting(Protocol):
    """Where the ranks of a group meet."""

    name: str
    """Of the group, unlike that of any other."""

    def store(self, limit: datetime.timedelta) -> dist.Store:
        """What all of them can read and write."""

    def interface(self) -> str:
        """The address at which this rank listens to the others."""


class HostRanks:
    """``RankGroup`` on CPUs, by gloo.

    Sums go by rank, from the first to the last: so a row's bits do not depend on where in the
    tensor it lies, as they do where every rank begins with another part.
    """

    def __init__(self, place: RankPlace) -> None:
        self.place = place
        self._all: dist.ProcessGroupGloo | None = None
        self._stage: dist.ProcessGroupGloo | None = None

    def meet(self, meeting: Meeting) -> None:
        place, limit = self.place, datetime.timedelta(seconds=LIMIT_SECONDS)
        store = meeting.store(limit)

        def made(name: str, rank: int, size: int) -> dist.ProcessGroupGloo:
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=meeting.interface())]
            options._timeout = limit
            named = dist.PrefixStore(f"{meeting.name}/{name}", store)
            return dist.ProcessGroupGloo(named, rank, size, options)

        self._all = made("all", place.rank, place.size)
        if place.shares > 1:
            self._stage = made(f"stage {place.stage}", place.share, place.shares)

    def sum(self, x: Tensor) -> Tensor:
        if self._stage is None:
            return x
        parts = x.new_empty(self.place.shares, *x.shape)
        self._stage.allgather([list(parts.unbind())], [x]).wait()
        return _in_order(parts, x)

    def columns(self, x: Tensor, count: int) -> Tensor:
        if self._stage is None:
            return x[:, :count] if x.shape[1] >= count else _filled(x, count)
        first = not self.place.share
        parts = [torch.empty_like(x) for _ in range(self.place.shares)] if first else []
        self._stage.gather([parts] if first else [], [x], dist.GatherOptions()).wait()
        return torch.cat(parts, 1)[:, :count] if first else _filled(x, count)

    def agree(self, tokens: Tensor) -> None:
        if self._all is not None:
            self._all.broadcast([tokens], dist.BroadcastOptions()).wait()

    def hand_on(self, x: Tensor) -> None:
        if self._all is not None:
            place = self.place
            self._all.send([x], place.rank_at(place.stage + 1, place.share), 0).wait()

    def take(self, x: Tensor) -> Tensor:
        if self._all is None:
            return x.zero_()
        place = self.place
        self._all.recv([x], place.rank_at(place.stage - 1, place.share), 0).wait()
        return x


def _in_order(parts: Tensor, out: Tensor) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return out.copy_(total)


def _filled(x: Tensor, count: int) -> Tensor:
    """[R, count]: x, and zeros behind it."""
    return torch.nn.functional.pad(x, (0, max(0, count - x.shape[1])))[:, :count]
