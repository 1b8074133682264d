"""Penalties on tokens that have occurred.

In this order, on token t's logit z (Keskar et al., "CTRL", 2019; OpenAI's API reference,
"frequency and presence penalties"):

    t in the prompt or the output:  z = z / repetition if z > 0 else z * repetition
    z -= frequency * (times that t occurs in the output)
    z -= presence * (t occurs in the output)

What has occurred is counted in a table [slots, V] of int16: the low 15 bits count a token in the
output, up to ``MOST_TIMES``, and the sign bit says that it occurs in the prompt.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.sampling.rows import FloatArray, IntArray

MOST_TIMES = 0x7FFF
"""A token that occurs more often counts as so often."""
IN_PROMPT = -0x8000


class Penalties(NamedTuple):
    """An adjustment of the A rows ``rows``, ascending."""

    rows: IntArray
    repetition: FloatArray
    """[A]; 1: off."""
    frequency: FloatArray
    presence: FloatArray
    slots: IntArray
    """[A]: each row's slot in ``counts``."""
    counts: Tensor
    """[slots, V] int16, on the logits' device."""

    def apply(self, logits: Tensor, place: IntArray) -> None:
        """Penalise in place; see ``Adjustment``."""
        device = logits.device

        def column(values: FloatArray) -> Tensor:
            return torch.from_numpy(values).to(device)[:, None]

        at = torch.from_numpy(place[self.rows]).to(device)
        counts = self.counts.index_select(0, torch.from_numpy(self.slots).to(device))
        z = logits.index_select(0, at)
        if (self.repetition != 1.0).any():
            repetition = column(self.repetition)
            z = torch.where(counts != 0, torch.where(z > 0, z / repetition, z * repetition), z)
        if self.frequency.any() or self.presence.any():
            times = counts.bitwise_and_(MOST_TIMES)
            z -= column(self.frequency) * times
            z -= column(self.presence) * (times > 0)
        logits[at] = z


def packed_counts(
    prompt: npt.NDArray[np.int32], output: npt.NDArray[np.int32]
) -> tuple[IntArray, npt.NDArray[np.int16]]:
    """The tokens that occur, each once, and what ``counts`` says of each."""
    tokens, where = np.unique(np.concatenate((prompt, output)), return_inverse=True)
    times = np.bincount(where[len(prompt) :], minlength=len(tokens))
    values = np.minimum(times, MOST_TIMES).astype(np.int16)
    values[where[: len(prompt)]] |= np.int16(IN_PROMPT)
    return tokens.astype(np.int64), values


def begin_counts(
    counts: Tensor, slot: int, prompt: npt.NDArray[np.int32], output: npt.NDArray[np.int32]
) -> None:
    """Make a slot's row of ``counts`` that of a sequence. Does not wait for the device."""
    tokens, values = packed_counts(prompt, output)
    row = counts[slot].zero_()
    row[torch.from_numpy(tokens).to(counts.device, non_blocking=True)] = torch.from_numpy(
        values
    ).to(counts.device, non_blocking=True)


def add_outputs(counts: Tensor, slots: IntArray, tokens: IntArray) -> None:
    """One more output token of each of these slots, no slot twice."""
    device = counts.device
    at = (torch.from_numpy(slots).to(device), torch.from_numpy(tokens).to(device))
    before = counts[at]
    counts[at] = before + ((before & MOST_TIMES) < MOST_TIMES).to(torch.int16)
