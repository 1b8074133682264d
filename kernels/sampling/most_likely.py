"""The greedy choice."""

from __future__ import annotations

from torch import Tensor


def most_likely(logits: Tensor) -> Tensor:
    """The highest logit's token, the lowest of those that tie. logits: [R, V]; returns [R] int64.

    Not ``argmax``, which on the CPU takes three to six times as long for bf16.
    """
    return logits.max(-1).indices
