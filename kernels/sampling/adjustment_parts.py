"""Parts of adjustments: those of some rows, and those of one rank's columns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.kernels.sampling.allowed_tokens import AllowedTokens
from penstock.kernels.sampling.choose import Adjustment
from penstock.kernels.sampling.penalties import Penalties
from penstock.kernels.sampling.rows import IntArray
from penstock.kernels.sampling.stages import SamplerStages
from penstock.kernels.sampling.token_biases import TokenBiases


def of_rows(adjustments: Sequence[Adjustment], rows: IntArray, count: int) -> list[Adjustment]:
    """The adjustments of these rows of ``count``, ascending, which are numbered anew. Raises
    ``TypeError`` for one that is not known here."""
    place = np.full(count, -1, np.int64)
    place[rows] = np.arange(len(rows))
    return [part for step in adjustments if len((part := _of_rows(step, place)).rows)]


def _of_rows(step: Adjustment, place: IntArray) -> Adjustment:
    named = step.entry_rows if isinstance(step, TokenBiases) else step.rows
    at = np.flatnonzero(place[named] >= 0)
    rows = place[named[at]]
    match step:
        case TokenBiases():
            return TokenBiases(rows, step.tokens[at], step.values[at])
        case AllowedTokens():
            return step._replace(rows=rows, masks=step.masks[at])
        case Penalties():
            return step._replace(
                rows=rows, repetition=step.repetition[at], frequency=step.frequency[at],
                presence=step.presence[at], slots=step.slots[at],
            )  # fmt: skip
        case SamplerStages():
            return SamplerStages(
                rows, [step.stages[one] for one in at.tolist()], step.keys[at],
                [step.bounds[one] for one in at.tolist()],
            )  # fmt: skip
        case _:
            raise TypeError(f"{type(step).__name__} has no parts of some rows")


def of_columns(step: Adjustment, first: int, count: int) -> Adjustment:
    """What an adjustment of whole rows is for ``count`` columns from token ``first`` on. Raises
    ``TypeError`` for one that needs whole rows."""
    match step:
        case TokenBiases():
            at = np.flatnonzero((step.tokens >= first) & (step.tokens < first + count))
            return TokenBiases(step.entry_rows[at], step.tokens[at] - first, step.values[at])
        case AllowedTokens():
            return step._replace(first=first)
        case Penalties():
            return step._replace(counts=step.counts.narrow(1, first, count))
        case _:
            raise TypeError(f"{type(step).__name__} needs whole rows")
