"""What a step has drawn, on the host."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.kernels.sampling import NOT_FINITE, NOTHING_LEFT
from penstock.services.worker.grammar_rows import Masks
from penstock.services.worker.slots import IntArray


class Drawn(NamedTuple):
    """Tokens of some rows."""

    at: IntArray
    """The slot of each."""
    num_output: IntArray
    """Tokens that each had put out before."""
    tokens: IntArray
    bad: IntArray
    """Why rows have none, as ``Choice.bad``."""
    masks: Masks | None
    """What grammars allowed."""


def causes(bad: IntArray) -> tuple[list[int], list[int]]:
    """Rows whose logits were not finite, and those of which nothing was left."""
    not_finite, banned = (np.flatnonzero(bad == why) for why in (NOT_FINITE, NOTHING_LEFT))
    return not_finite.tolist(), banned.tolist()
