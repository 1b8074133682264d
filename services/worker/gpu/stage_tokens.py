"""Tokens on their way from the last stage of a pipeline to the first, from device to device.

The last stage sends what a step has drawn. The first one receives it beside the steps of other
micro-batches, and writes it into the batch's state ahead of the first step that decodes one of
these slots: so no stage waits for a step that it does not need. Stages between need no tokens,
since positions advance by themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.services.worker.gpu.batch_state import RING, BatchState
from penstock.services.worker.slots import IntArray


class TokenSource(Protocol):
    """What brings tokens from the last stage."""

    def receive_tokens(self, tokens: Tensor, free: torch.cuda.Event | None) -> Callable[[], None]:
        """Begin to overwrite ``tokens`` with what the last stage sends next; what is returned lets
        what comes later on the stream wait for it. free: when nothing reads the former ones."""


class _Coming(NamedTuple):
    """Tokens of a step."""

    slots: IntArray
    places: Tensor
    """The same on the device."""
    tokens: Tensor
    wait: Callable[[], None]
    ring: int


class StageTokens:
    """What the first stage waits for; at most ``RING`` steps' tokens."""

    def __init__(self, state: BatchState, source: TokenSource) -> None:
        self._state, self._source = state, source
        self._ring = [torch.zeros_like(state.last_token) for _ in range(RING)]
        self._free: list[torch.cuda.Event | None] = [None] * RING
        self._turn = 0
        self._coming: deque[_Coming] = deque()
        """Oldest first."""

    def expect(self, slots: IntArray) -> None:
        """The step that was put on the stream draws a token for each of these slots."""
        if len(self._coming) == RING:
            self._take_oldest()
        ring = self._turn
        self._turn = (ring + 1) % RING
        tokens = self._ring[ring][: len(slots)]
        places = self._state.sample_slots[: len(slots)].long()
        wait = self._source.receive_tokens(tokens, self._free[ring])
        self._coming.append(_Coming(slots, places, tokens, wait, ring))

    def take(self, slots: IntArray) -> None:
        """Have the latest tokens of these slots where the next step on the stream reads them."""
        needed = [n for n, one in enumerate(self._coming) if np.isin(slots, one.slots).any()]
        for _ in range(needed[-1] + 1 if needed else 0):
            self._take_oldest()

    def forget(self) -> None:
        """Nobody reads what has not been taken."""
        self._coming.clear()

    def _take_oldest(self) -> None:
        one = self._coming.popleft()
        one.wait()
        self._state.last_token.index_copy_(0, one.places, one.tokens)
        if one.tokens.is_cuda:
            read = torch.cuda.Event()  # type: ignore[no-untyped-call]
            read.record()
            self._free[one.ring] = read
