"""What the requests of numbered slots ask for, in numpy columns."""

from __future__ import annotations

import numpy as np

from penstock.protocol.wire.messages.steps import SlotAdjustments


class SlotColumns:
    """Indexed by slot."""

    def __init__(self, slots: int) -> None:
        self.temperature = np.zeros(slots, np.float32)
        self.top_k = np.zeros(slots, np.int64)
        self.top_p = np.ones(slots, np.float32)
        self.min_p = np.zeros(slots, np.float32)
        self.logprobs = np.full(slots, -1, np.int64)
        """How many likeliest tokens to list; -1: no logprobs."""
        self.prompt_logprobs = np.full(slots, -1, np.int64)
        self.prompt_length = np.zeros(slots, np.int64)
        self.second = np.zeros(slots, np.int64)
        """Where the second text of a pair begins in a prompt; 0: nowhere."""
        self.most = np.zeros(slots, np.int64)
        """Tokens at which each slot's sequence ends at the latest."""
        self.adjustments: list[SlotAdjustments | None] = [None] * slots
        self.asks = np.zeros(slots, np.bool_)
        """Slots with adjustments."""
        self.steers = np.zeros(slots, np.bool_)
        """Slots whose next token depends on how probable their output was."""
        self.adapter = np.zeros(slots, np.int64)
        """Number of each slot's low-rank adapter; 0: none."""
        self.virtual = np.zeros(slots, np.int64)
        """Virtual tokens ahead of each slot's prompt."""
        self.soft_prompt = np.zeros(slots, np.int64)
        """Number of the adapter that they are of; 0: none."""
        self.seed = np.zeros(slots, np.uint64)
        self.choice = np.zeros(slots, np.uint64)
