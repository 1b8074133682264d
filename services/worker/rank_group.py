"""The ranks of one engine, as one of them sees the others: what they add up, gather and hand on.

A rank loads its share of the model alone. The ranks meet when the scheduler has made a group of
them: rank 0 listens at an address that every ``Attach`` of the group holds. Before that each takes
its own part for the whole, so that a step can be measured.

No rank waits for ever: what takes longer than ``LIMIT_SECONDS`` raises, and the end of a process
closes its connections, which raises at once wherever somebody waits for it.
"""

from __future__ import annotations

import datetime
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed
from torch import Tensor
from torch.nn.functional import pad

from penstock.kernels.all_reduce import all_reduce
from penstock.kernels.sampling.shard import Shard
from penstock.services.worker.link_group import LinkGroup
from penstock.services.worker.models.rank_shares import RankPlace, own_tokens
from penstock.services.worker.rank_links import RankLinks

if TYPE_CHECKING:
    from penstock.kernels.gpu.all_reduce import PeerRows

dist: Any = torch.distributed
"""Its compiled part has no types."""
LIMIT_SECONDS = 120.0
"""Most time that a rank waits for the others: the longest step, and what ranks may lie apart."""
MEET_SECONDS = 30.0
"""Most time that a rank waits for the others to come."""
THREADS = 8
"""Broadcasts that a rank may wait for at once: as many as micro-batches are under way."""


class RankGroup(Protocol):
    """Called by all ranks that share a stage, or by all of the engine, in the same order."""

    place: RankPlace
    vocab_size: int
    """Of all ranks together."""

    def meet(self, meeting: Meeting) -> None:
        """Find the other ranks. Raises ``RuntimeError`` where they do not come in time."""

    def sum(self, x: Tensor) -> Tensor:
        """``x`` with the sum over the ranks of a stage in it, the same bits on all of them."""

    def shared_rows(self, x: Tensor) -> PeerRows | None:
        """Memory by which a kernel can sum rows like ``x`` [N, D] over the ranks of a stage;
        ``None``: only ``sum`` can."""

    def gather(self, x: Tensor) -> Tensor:
        """[shares, ...]: ``x`` of every rank of a stage, in their order, on all of them."""

    def from_first(self, x: Tensor) -> Tensor:
        """``x`` overwritten with that of the first rank of a stage, on all of them."""

    def columns(self, x: Tensor) -> Tensor:
        """[R, V]: the columns that the ranks of a stage have, side by side; on others than the
        first perhaps anything of this shape. x: [R, n], of this rank's tokens (``own_tokens``)."""

    def agree(self, drawn: Tensor) -> Callable[[], None]:
        """Begin to overwrite what was drawn, on the host, with what rank 0 has, on all ranks; what
        is returned waits until it is there."""

    def hand_on(self, x: Tensor) -> None:
        """Give ``x`` to the next stage. On a host it must not change any more: it may still be on
        its way when this returns; on a device what comes later on the stream may change it."""

    def take(self, x: Tensor) -> Tensor:
        """``x`` with what the stage ahead has handed on in it."""


class Meeting(Protocol):
    """Where the ranks of a group meet."""

    @property
    def name(self) -> str:
        """Unlike that of any other meeting."""

    def store(self, limit: datetime.timedelta) -> Any:
        """What all of them can read and write."""

    def interface(self) -> str:
        """The address at which this rank listens to the others."""

    def links(self) -> RankLinks | None:
        """Its own connections to all other ranks; ``None``: those of torch are used. Raises
        ``RankFailed`` where the others do not come."""


class HostRanks:
    """``RankGroup`` on CPUs, by gloo, or by ``RankLinks`` between hosts.

    Sums go by rank, from the first to the last: so a row's bits do not depend on where in the
    tensor it lies, as they do where every rank begins with another part.
    """

    def __init__(self, place: RankPlace, vocab_size: int) -> None:
        self.place, self.vocab_size = place, vocab_size
        self._all: Any = None
        self._stage: Any = None
        self._handed_on: deque[tuple[Any, Tensor]] = deque()

    def meet(self, meeting: Meeting) -> None:
        place, limit = self.place, datetime.timedelta(seconds=LIMIT_SECONDS)
        self._handed_on.clear()
        all_there(meeting, place)
        self._all = connected("all", meeting, place.rank, range(place.size), limit)
        if place.shares > 1:
            name = f"stage {place.stage}"
            members = [place.rank_at(place.stage, share) for share in range(place.shares)]
            self._stage = connected(name, meeting, place.share, members, limit)

    def sum(self, x: Tensor) -> Tensor:
        if self._stage is None:
            return x
        parts = x.new_empty(self.place.shares, *x.shape)
        self._stage.allgather([list(parts.unbind())], [x]).wait()
        return all_reduce(parts.unbind(), x)

    def shared_rows(self, x: Tensor) -> PeerRows | None:
        return None

    def gather(self, x: Tensor) -> Tensor:
        if self._stage is None:
            return x.expand(self.place.shares, *x.shape)
        parts = x.new_empty(self.place.shares, *x.shape)
        self._stage.allgather([list(parts.unbind())], [x.contiguous()]).wait()
        return parts

    def from_first(self, x: Tensor) -> Tensor:
        if self._stage is not None:
            self._stage.broadcast([x], dist.BroadcastOptions()).wait()
        return x

    def columns(self, x: Tensor) -> Tensor:
        if self._stage is None:
            return beside([x], self.vocab_size)
        first, own = not self.place.share, widened(x, self.vocab_size, self.place)
        parts = [torch.empty_like(own) for _ in range(self.place.shares)] if first else []
        self._stage.gather([parts] if first else [], [own], dist.GatherOptions()).wait()
        return beside(parts, self.vocab_size) if first else x.new_zeros(len(x), self.vocab_size)

    def agree(self, drawn: Tensor) -> Callable[[], None]:
        if self._all is None:
            return lambda: None
        begun = self._all.broadcast([drawn], dist.BroadcastOptions())

        def wait() -> None:
            begun.wait()

        return wait

    def hand_on(self, x: Tensor) -> None:
        """As many may be under way as there are stages: the next one takes them in its turn."""
        if self._all is None:
            return
        place = self.place
        work = self._all.send([x], place.rank_at(place.stage + 1, place.share), 0)
        self._handed_on.append((work, x))
        if len(self._handed_on) > place.stages:
            self._handed_on.popleft()[0].wait()

    def take(self, x: Tensor) -> Tensor:
        if self._all is None:
            return x.zero_()
        place = self.place
        self._all.recv([x], place.rank_at(place.stage - 1, place.share), 0).wait()
        return x


def all_there(meeting: Meeting, place: RankPlace) -> None:
    """Wait until all ranks have come, which are asked to at the same time: who connects waits much
    longer for one that has not. Raises ``RuntimeError``, also where they have divided the layers
    otherwise than this one."""
    if meeting.links() is not None:
        return
    limit = datetime.timedelta(seconds=MEET_SECONDS)
    store = meeting.store(limit)
    counts, names = str(place.counts), [f"{meeting.name}/{rank}" for rank in range(place.size)]
    store.set(names[place.rank], counts)
    store.wait(names, limit)
    for rank, name in enumerate(names):
        if (theirs := store.get(name).decode()) != counts:
            raise RuntimeError(
                f"rank {rank} has stages of {theirs} layers, and rank {place.rank} of {counts}; "
                "give all workers of an engine the same --pipeline-layers"
            )


def connected(
    name: str, meeting: Meeting, rank: int, members: Sequence[int], limit: datetime.timedelta
) -> Any:
    """Some ranks of an engine, for one purpose, under a name. rank: this one's number among the
    members; limit: for whatever one of them waits for. Raises ``RuntimeError`` where they do not
    come."""
    if (links := meeting.links()) is not None:
        return LinkGroup(links, name, rank, members, limit)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=meeting.interface())]
    options._timeout = limit
    options._threads = THREADS
    store = meeting.store(datetime.timedelta(seconds=LIMIT_SECONDS))
    return dist.ProcessGroupGloo(
        dist.PrefixStore(f"{meeting.name}/{name}", store), rank, len(members), options
    )


def widened(x: Tensor, vocab_size: int, place: RankPlace) -> Tensor:
    """``x`` [R, n], as wide as that of the rank with the most tokens."""
    return pad(x, (0, -(-vocab_size // place.shares) - x.shape[1])).contiguous()


def shard_of(ranks: RankGroup) -> Shard:
    """What a rank has of the logits."""
    own = own_tokens(ranks.vocab_size, ranks.place)
    return Shard(own.start, ranks.vocab_size, not ranks.place.share, ranks.gather, ranks.columns)


def beside(parts: Sequence[Tensor], width: int) -> Tensor:
    """[R, width]: the parts [R, n] side by side, cut off or with zeros behind them."""
    found = torch.cat(list(parts), 1)
    return pad(found, (0, width - found.shape[1]))
