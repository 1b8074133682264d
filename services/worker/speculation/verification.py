"""Which drafts of a step the model's own draws agree with.

A draw is keyed by seed, choice and position, so a row draws at each position what it had drawn
there by itself, as long as all drafts before it are what was drawn: text is the same with drafts
and without, and where nobody gave a seed it has the same distribution. Where the draws read what
came before (penalties, grammars, …), they are made one position after another, and each shows its
token to what reads it: so nothing has to be taken back.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from penstock.kernels.sampling import NOT_FINITE, NOTHING_LEFT
from penstock.protocol.wire.messages.steps import SampledLogprobs, StepResult
from penstock.services.worker.slots import DraftRows, IntArray, PlannedStep


class Draws(NamedTuple):
    """One token for each of some rows."""

    tokens: IntArray
    bad: IntArray
    """Why rows have none; 0: they have."""


Draw = Callable[[IntArray, IntArray, int], Draws]
"""(rows of the step's logits, the slot of each, how many tokens of this step came before) → draws,
shown to what reads them but for those that are bad behind other tokens."""


class Verified(NamedTuple):
    """What the decode rows of a step bring."""

    tokens: IntArray
    """Of all slots, one after another."""
    counts: IntArray
    """How many of each slot: one at least, which means nothing where ``bad``."""
    rows: IntArray
    """The row of the logits that each token was drawn from."""
    bad: IntArray
    """Of each slot's first row, as in ``Draws``."""

    @property
    def last(self) -> IntArray:
        """The last token of each slot."""
        found: IntArray = self.tokens[np.cumsum(self.counts) - 1]
        return found


def first_rows(drafts: DraftRows) -> IntArray:
    """The first row of each slot."""
    return np.flatnonzero(drafts.ahead == 0)


def accept(drafts: DraftRows, draws: Draws) -> Verified:
    """Where all rows are drawn at once, since no draw reads what came before."""
    tokens, bad = draws
    agree = np.zeros(len(tokens), np.bool_)
    agree[:-1] = (drafts.ahead[1:] > 0) & (tokens[:-1] == drafts.tokens[1:]) & (bad[:-1] == 0)
    first = first_rows(drafts)
    rows: list[int] = []
    counts = np.ones(len(first), np.int64)
    for number, row in enumerate(first.tolist()):
        rows.append(row)
        while agree[row] and not bad[row + 1]:
            row += 1
            rows.append(row)
            counts[number] += 1
    chosen = np.array(rows, np.int64)
    return Verified(tokens[chosen], counts, chosen, bad[first])


def accept_in_turn(step: PlannedStep, drafts: DraftRows, draw: Draw) -> Verified:
    """Draw the first row of each slot, then the second of those that agreed, and so on. step: the
    one without drafts."""
    first = first_rows(drafts)
    most = np.diff(first, append=len(drafts.ahead))
    open_rows, place = np.arange(len(first)), 0
    brought: list[list[int]] = [[] for _ in first]
    bad = np.zeros(len(first), np.int64)
    while len(open_rows):
        rows = first[open_rows] + place
        draws = draw(rows, step.sampled[open_rows], place)
        if place == 0:
            bad = draws.bad
        for at in np.flatnonzero((draws.bad == 0) | (place == 0)).tolist():
            brought[open_rows[at]].append(int(draws.tokens[at]))
        place += 1
        following = np.minimum(rows + 1, len(drafts.ahead) - 1)
        agree = (draws.bad == 0) & (most[open_rows] > place)
        agree &= draws.tokens == drafts.tokens[following]
        open_rows = open_rows[agree]
    counts = np.array([len(tokens) for tokens in brought], np.int64)
    before = np.cumsum(counts) - counts
    rows = np.repeat(first - before, counts) + np.arange(int(counts.sum()))
    return Verified(np.array(list(chain(*brought)), np.int64), counts, rows, bad)


def with_counts(result: StepResult, verified: Verified, drafted: IntArray) -> StepResult:
    """A result of the first rows of slots, with what the rows of their drafts bring. drafted: how
    many each has."""
    not_finite, banned = (np.flatnonzero(verified.bad == why) for why in (NOT_FINITE, NOTHING_LEFT))
    return replace(
        result,
        tokens=verified.tokens.astype("<i4").tobytes(),
        bad_rows=not_finite.tolist(),
        banned_rows=banned.tolist(),
        counts=verified.counts.astype(np.uint8).tobytes(),
        drafted=drafted.astype(np.uint8).tobytes(),
    )


def renumbered(result: StepResult, computed: int, full: IntArray) -> StepResult:
    """A result with the rows that bring nothing between those that were drawn. computed: how many
    these are; full: the rows of the others."""
    every = np.arange(computed + len(full))
    numbers = np.delete(every, full).tolist()
    counts, drafted = np.zeros(len(every), np.uint8), np.zeros(len(every), np.uint8)
    counts[numbers] = np.frombuffer(result.counts, np.uint8) if result.counts else 1
    drafted[numbers] = np.frombuffer(result.drafted, np.uint8) if result.drafted else 0
    return replace(
        result,
        bad_rows=[numbers[row] for row in result.bad_rows],
        logprobs=[SampledLogprobs(numbers[one.row], one.token) for one in result.logprobs],
        failures=[replace(one, row=numbers[one.row]) for one in result.failures],
        banned_rows=[numbers[row] for row in result.banned_rows],
        pooled=[replace(one, row=numbers[one.row]) for one in result.pooled],
        counts=counts.tobytes(),
        drafted=drafted.tobytes() if result.drafted else b"",
    )
