"""What one step computes: decode rows and chunks of prompts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


class PlannedChunk(NamedTuple):
    """``count`` known tokens of a slot, at positions ``start`` …."""

    slot: int
    start: int
    tokens: npt.NDArray[np.int32]
    sample: bool
    predicted: npt.NDArray[np.int32]
    """The prompt's tokens after those of the rows from ``predicted_from`` on, if their logprobs are
    wanted."""
    drawn: npt.NDArray[np.int32] = np.zeros(0, np.int32)
    """Output tokens after those of the rows from ``drawn_from`` on, if it matters how probable they
    were."""
    drawn_from: int = 0
    predicted_from: int = 0
    """Rows of virtual tokens, and no other, stand ahead of the one that predicts the first."""
    virtual: int = 0
    """Virtual tokens of the whole sequence: its first positions."""


class DraftRows(NamedTuple):
    """Decode rows of a step with drafts: of each slot its last token, and the drafts behind it."""

    tokens: IntArray
    positions: IntArray
    ahead: IntArray
    """How many drafts stand between the slot's last token and each row's."""


class PlannedStep(NamedTuple):
    """What is to be computed."""

    decoding: IntArray
    """Decoding slots, ascending. Not changed later."""
    chunks: list[PlannedChunk]
    sampled: IntArray
    """Slot of each row that is drawn: ``decoding``, then the chunks with ``sample``."""
    full: IntArray | None = None
    """Rows of the result that bring no token, since their slots have no position left; they are
    not among those above. ``None``: there are none."""
    drafts: DraftRows | None = None
    """Where slots have several rows: a slot then stands in ``decoding`` once for each."""
