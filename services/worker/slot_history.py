"""The tokens that a new slot's adjustments read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.protocol.wire.messages.steps import NewSlot


class History(NamedTuple):
    """What a new slot's adjustments read: int32 ids of the vocabulary."""

    prompt: npt.NDArray[np.int32]
    """All of it, or nothing: then they do not read it."""
    output: npt.NDArray[np.int32]
    """All of it."""


def history(new: NewSlot, prompts: Sequence[bytes] = ()) -> History:
    """prompts: those of the plan that adds the slot."""
    if new.prompt >= 0:
        prompt = np.frombuffer(prompts[new.prompt], "<i4")
    else:
        prompt = np.frombuffer(new.tokens, "<i4")[: 0 if new.start else new.prompt_len]
    return History(prompt[new.virtual_tokens :], output_of(new))


def output_of(new: NewSlot) -> npt.NDArray[np.int32]:
    """All output so far of a new slot that has adjustments, int32 ids."""
    return np.frombuffer(new.tokens, "<i4")[max(new.prompt_len - new.start, 0) :]
