"""A group of ranks over ``RankLinks``, with those calls of a process group of torch that ranks use.

Everybody sends what he has to everybody who needs it: the groups are small, and a tensor that is
added up must arrive whole anyway, since sums go by rank (see ``HostRanks``).
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.services.worker.rank_links import ANYBODY, RankFailed, RankLinks


class Begun:
    """What was begun; ``wait`` returns when it is done."""

    def __init__(self, wait: Callable[[], None] = lambda: None) -> None:
        self.wait = wait


class LinkGroup:
    """Some ranks of an engine, for one purpose. Ranks are numbered within the group."""

    def __init__(
        self,
        links: RankLinks,
        name: str,
        rank: int,
        members: Sequence[int],
        limit: datetime.timedelta,
    ) -> None:
        """rank: this one's number; members: the ranks' numbers within the engine."""
        self._links, self._name, self._rank = links, name, rank
        self._members = list(members)
        self._limit = limit.total_seconds()

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> Begun:
        """Each rank's tensor, on all ranks."""
        (parts,), (mine,) = outputs, inputs
        for peer in self._others():
            self._send(peer, "all", mine)
        parts[self._rank].copy_(mine)
        for peer in self._others():
            self._receive(peer, "all", parts[peer])
        return Begun()

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any) -> Begun:
        """Each rank's tensor, on the first."""
        (mine,) = inputs
        if self._rank:
            self._send(0, "gather", mine)
            return Begun()
        (parts,) = outputs
        parts[0].copy_(mine)
        for peer in self._others():
            self._receive(peer, "gather", parts[peer])
        return Begun()

    def broadcast(self, tensors: list[Tensor], options: Any) -> Begun:
        """The first rank's tensor, on all ranks once that is waited for."""
        (x,) = tensors
        if self._rank:
            return Begun(lambda: self._receive(0, "told", x))
        for peer in self._others():
            self._send(peer, "told", x)
        return Begun()

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Begun:
        (x,) = tensors
        self._send(rank, f"to {tag}", x)
        return Begun()

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Begun:
        (x,) = tensors
        return Begun(lambda: self._receive(rank, f"to {tag}", x))

    def _others(self) -> list[int]:
        return [peer for peer in range(len(self._members)) if peer != self._rank]

    def _send(self, rank: int, lane: str, x: Tensor) -> None:
        data = _bytes_of(x.contiguous()).data
        self._links.send(self._members[rank], f"{self._name}/{lane}", data)

    def _receive(self, rank: int, lane: str, out: Tensor) -> None:
        data = self._links.receive(self._members[rank], f"{self._name}/{lane}", self._limit)
        whole = out if out.is_contiguous() else out.contiguous()
        target = _bytes_of(whole)
        if len(data) != target.size:
            raise RankFailed(
                f"rank {self._members[rank]} sent {len(data)} bytes where {target.size} were due"
            )
        target[:] = np.frombuffer(data, np.uint8)
        if whole is not out:
            out.copy_(whole)


def _bytes_of(x: Tensor) -> npt.NDArray[np.uint8]:
    found: npt.NDArray[np.uint8] = x.reshape(-1).view(torch.uint8).numpy()
    return found


class LinkStore:
    """Values that one rank sets and all others get, as of a store of torch."""

    def __init__(self, links: RankLinks, others: Sequence[int], limit_s: float) -> None:
        self._links, self._others, self._limit = links, list(others), limit_s

    def set(self, key: str, value: str) -> None:
        for peer in self._others:
            self._links.send(peer, f"store/{key}", value.encode(), named=False)

    def get(self, key: str) -> bytes:
        """Once each key."""
        return self._links.receive(ANYBODY, f"store/{key}", self._limit)
