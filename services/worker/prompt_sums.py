"""Pooling over all positions of a prompt that is computed in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.services.worker.slots import PlannedChunk, PlannedStep

Over = Literal["cls", "mean", "max"]


class _Sum(NamedTuple):
    value: Tensor
    """[hidden]: the sum so far in float64, or the maximum or the first position's state as the
    model gives them."""
    positions: int


class PromptSums:
    """What has come of each slot's prompt so far.

    A sequence that has lost its slot begins anew: nothing of its prompt may be taken from the
    cache then.
    """

    def __init__(self, over: Over) -> None:
        self._over = over
        self._of: dict[int, _Sum] = {}

    def begin(self, added: Sequence[int]) -> None:
        """Slots that a plan has filled."""
        for slot in added:
            self._of.pop(slot, None)

    def add(self, chunk: PlannedChunk, states: Tensor) -> None:
        """states: [tokens of the chunk, hidden], behind the model's last norm. Raises
        ``ValueError`` for a chunk that does not go on where the one before has ended."""
        found = self._of.get(chunk.slot)
        if chunk.start != (found.positions if found is not None else 0):
            raise ValueError(
                f"slot {chunk.slot}: pooling over all positions, but the chunk begins at "
                f"{chunk.start}"
            )
        match self._over:
            case "cls":
                value = states[0].clone() if found is None else found.value
            case "mean":
                value = states.sum(0, dtype=torch.float64)
                value = value if found is None else found.value + value
            case "max":
                value = states.amax(0)
                value = value if found is None else torch.maximum(found.value, value)
        self._of[chunk.slot] = _Sum(value, chunk.start + len(chunk.tokens))

    def states(self, slots: Sequence[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        """[len(slots), hidden] of slots whose prompts are computed."""
        found = [self._of.pop(slot) for slot in slots]
        parts = [one.value / one.positions if self._over == "mean" else one.value for one in found]
        return torch.stack(parts).float().cpu().numpy()


def chunk_rows(step: PlannedStep) -> list[tuple[int, PlannedChunk]]:
    """The chunks of a step, each with its first row."""
    row, found = len(step.decoding), []
    for chunk in step.chunks:
        found.append((row, chunk))
        row += len(chunk.tokens)
    return found
