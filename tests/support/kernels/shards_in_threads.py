"""Ranks that share a vocabulary as threads of one process, and what they exchange."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from penstock.kernels.sampling.shard import Shard

Found = TypeVar("Found")


class ShardsInThreads:
    """``run`` calls a function once for every rank, each with its own columns."""

    def __init__(self, vocab: int, shares: int) -> None:
        self.vocab, self.shares = vocab, shares
        self.width = -(-vocab // shares)
        self.sent: list[int] = []
        """Bytes that each rank gives in each exchange."""
        self.gathered: list[int] = []
        """Rows of which all columns were gathered, by exchange."""
        self._barrier = threading.Barrier(shares, timeout=30)
        self._given: list[Tensor] = [torch.empty(0)] * shares

    def own(self, share: int) -> slice:
        return slice(share * self.width, min((share + 1) * self.width, self.vocab))

    def run(self, work: Callable[[Shard, slice], Found]) -> list[Found]:
        """work: is given a shard and its columns. Returns what it gives on each rank."""

        def one(share: int) -> Found:
            try:
                return work(self._shard(share), self.own(share))
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.shares) as threads:
            return list(threads.map(one, range(self.shares)))

    def _shard(self, share: int) -> Shard:
        def exchange(x: Tensor) -> list[Tensor]:
            self._given[share] = x.clone()
            self._barrier.wait()
            parts = list(self._given)
            self._barrier.wait()
            return parts

        def gather(x: Tensor) -> Tensor:
            if not share:
                self.sent.append(x.nbytes)
            return torch.stack(exchange(x))

        def columns(x: Tensor) -> Tensor:
            if not share:
                self.gathered.append(len(x))
                self.sent.append(x.nbytes)
            parts = exchange(pad(x, (0, self.width - x.shape[1])))
            whole = torch.cat(parts, 1)[:, : self.vocab]
            return torch.zeros_like(whole) if share else whole

        return Shard(self.own(share).start, self.vocab, not share, gather, columns)
