"""Slots that Mirostat steers: each one's bound, which follows from its output's logprobs."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from penstock.kernels.sampling.samplers.mirostat import first_bound, next_bound
from penstock.protocol.wire.messages.steps import SlotAdjustments


class SteeredSlots:
    """The bounds of the slots of one executor."""

    def __init__(self, slots: int) -> None:
        self.asks = np.zeros(slots, np.bool_)
        self.bound = np.zeros(slots, np.float64)
        self._tau = np.zeros(slots, np.float64)
        self._eta = np.zeros(slots, np.float64)

    def begin(self, slot: int, asked: SlotAdjustments) -> None:
        """A slot that has no output, or whose output's logprobs come with ``took``."""
        (stage,) = (stage for stage in asked.stages if stage.sampler == "mirostat")
        self._tau[slot], self._eta[slot] = stage.values
        self.asks[slot] = True
        self.bound[slot] = first_bound(float(self._tau[slot]))

    def forget(self, slot: int) -> None:
        self.asks[slot] = False

    def took(self, slot: int, logprobs: Iterable[float]) -> None:
        """A slot's next tokens had these logprobs by the model alone."""
        bound = float(self.bound[slot])
        for logprob in logprobs:
            bound = next_bound(bound, float(self._tau[slot]), float(self._eta[slot]), logprob)
        self.bound[slot] = bound
