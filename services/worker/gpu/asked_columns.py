"""What new slots ask of the sampler, as columns of the device's state."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from penstock.kernels.gpu.sampler_memory import (
    ASKS_ALLOWED,
    ASKS_BAD_WORDS,
    ASKS_BIASES,
    ASKS_HISTORY,
    ASKS_PENALTIES,
    ASKS_STAGES,
)
from penstock.protocol.wire.messages.steps import SlotAdjustments
from penstock.services.worker.slots import IntArray, SlotTable

ASKED_NUMBERS = ("asks", "top_k", "entry_count", "logprobs")
ASKED_SHARES = (
    "temperature", "top_p", "min_p", "repetition", "frequency", "presence",
)  # fmt: skip
"""Columns of ``penstock.kernels.gpu.sampler_memory.SamplerSlots``, int32 and fp32. ``logprobs`` is
how many likeliest tokens to list; -1: none are wanted."""


def asked_columns(slots: SlotTable, added: IntArray) -> Iterator[tuple[str, IntArray]]:
    """Name and values, as the int32 that they are sent in, of what these slots ask for. Numbers
    of an adjustment that no slot asks for are not sent: nothing reads them."""
    for name in ("temperature", "top_p", "min_p"):
        yield name, _bits(getattr(slots, name)[added])
    yield "top_k", slots.top_k[added]
    yield "logprobs", slots.logprobs[added]
    asked = [slots.adjustments[slot] for slot in added.tolist()]
    yield "asks", np.array([_bits_of(one) for one in asked], np.int64)
    if not slots.asks[added].any():
        return
    every = [one or SlotAdjustments() for one in asked]
    yield "entry_count", np.array([_entries_of(a) for a in every], np.int64)
    for name in ("repetition", "frequency", "presence"):
        yield name, _bits(np.array([getattr(one, name) for one in every], np.float32))


def _bits(values: npt.NDArray[np.float32]) -> IntArray:
    return values.view(np.int32).astype(np.int64)


def _entries_of(asked: SlotAdjustments) -> int:
    """Biases and bans that are entries of a slot; the masks of a grammar know of ends."""
    ends = asked.ends if asked.grammar is None else b""
    return (len(asked.biased) + len(ends) + len(asked.banned)) // 4


def _bits_of(asked: SlotAdjustments | None) -> int:
    """``ASKS_``… bits of a slot."""
    if asked is None:
        return 0
    bits = ASKS_PENALTIES if asked.penalised else 0
    bits |= ASKS_BIASES if _entries_of(asked) else 0
    bits |= ASKS_ALLOWED if asked.allowed is not None or asked.grammar is not None else 0
    bits |= ASKS_HISTORY if asked.repeats else 0
    bits |= ASKS_STAGES if asked.stages else 0
    return bits | (ASKS_BAD_WORDS if asked.bad_words else 0)
