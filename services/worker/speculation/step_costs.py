"""What steps of decode rows cost and how many drafts are accepted, measured as they come; and how
many drafts pay then."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

from penstock.services.worker.speculation.proposer import GRAMMAR, Draft

EXACT_ROWS = 16
"""Steps of up to so many rows are told apart, larger ones by their size to an eighth."""
WEIGHT = 0.2
"""Of the newest step in a mean."""
HELD_UP = 1.25
"""One that took longer than this, as a multiple of the mean, was held up by others and counts as so
much: else a single one would make drafts look cheap for as long as no other step is measured."""
ROW_SHARE = 0.05
"""A row's share of a step of one, as long as nothing else was measured."""
LADDER_ROW_SHARE = 0.01
"""A row's share of the largest measured step where larger ones are padded to sizes of a ladder, as
on GPUs: less than most take, since a size that was taken for too dear is never measured, and one
that was taken for too cheap is known after one step."""
LEAST_GAIN = 0.03
"""Tokens a second must grow by this share, or no drafts are made."""
TRIED_EVERY = 64
"""Once in the time of so many steps one whose drafts would not pay has the first draft of each row:
texts change."""
PRIOR, PRIOR_TRIALS = 0.7, 3.0
"""The share of drafts that are accepted before any was tried, and how many trials it counts as."""
LONG_MATCH, LONG_PRIOR = 9, 0.9
"""The share of those found by so many tokens."""
FORCED_PRIOR = 0.95
"""Of those that a grammar forces: only other tokens of the same text are drawn instead."""
DECAY = 0.97
_MATCHES = (4, 6, 9, 16, 32)
HOST_SHARE, HOST_CREDIT = 0.005, 0.0025
"""Looking for drafts may cost this share of the time of all steps, and what drafts gain; of both it
may save up so many seconds, with which it begins, or owe as many."""
BALANCE_DECAY, MOST_LOST, MOST_SAVED = 0.99, 1.0, 4.0
"""What drafts gain or lose, in steps, is added up, of which a hundredth is forgotten with each step
that has drafts: so where they keep on losing more than 1 % of a step, the balance comes to
``-MOST_LOST``, and they rest. Of what they gain no more than ``MOST_SAVED`` may be lost again: one
step that others held up is no reason to rest where drafts have paid."""
MOST_RESTS = 16
"""A rest is twice as long as the one before, if drafts have gained nothing between them, up to so
many times the first."""
_MOST_OF_ONE = 3.0
"""Steps that one step is taken to have lost at most: it may have been held up by others."""
_FIRST_COST = 1.25
"""What the first step with drafts is taken to cost, as a multiple of one without, where other
kernels compute it."""


class StepCosts:
    """Seconds of steps by their rows."""

    def __init__(self, ladder: Sequence[int] = ()) -> None:
        """ladder: the sizes, ascending, that all steps are padded to; empty: they are not."""
        self._ladder = ladder
        self._seconds: dict[int, float] = {}
        self._known: list[int] = []

    def size(self, rows: int) -> int:
        """Steps of one size are not told apart."""
        if self._ladder:
            return self._ladder[min(bisect_left(self._ladder, rows), len(self._ladder) - 1)]
        if rows <= EXACT_ROWS:
            return rows
        unit = 1 << max(0, rows.bit_length() - 4)
        return -(-rows // unit) * unit

    def observe(self, rows: int, seconds: float) -> None:
        """A step of decode rows alone took so long."""
        size = self.size(rows)
        mean = self._seconds.get(size)
        if mean is None:
            expected = self.seconds(rows) if self._ladder else None
            insort(self._known, size)
            self._seconds[size] = seconds if expected is None else min(seconds, 2 * expected)
        else:
            self._seconds[size] = mean + WEIGHT * (min(seconds, HELD_UP * mean) - mean)

    def seconds(self, rows: int) -> float | None:
        """Of a step with so many rows, from the measured sizes around it; ``None`` before any."""
        known, size = self._known, self.size(rows)
        at = bisect_left(known, size)
        if at < len(known) and known[at] == size:
            return self._seconds[size]
        if not known:
            return None
        if at == 0:
            return self._seconds[known[0]]
        below = known[at - 1]
        base = self._seconds[below]
        if at < len(known):
            above = known[at]
            share = (size - below) / (above - below)
            return base + share * (self._seconds[above] - base)
        if self._ladder:
            return base * (1 + LADDER_ROW_SHARE * (size - below))
        slope = base * ROW_SHARE / (1 + ROW_SHARE * below)
        if at > 1:
            before = known[at - 2]
            slope = max(0.0, (base - self._seconds[before]) / (below - before))
        return base + slope * (rows - below)


class Acceptance:
    """How often drafts are accepted, recent ones counting more."""

    __slots__ = ("accepted", "tried")

    def __init__(self) -> None:
        self.accepted = self.tried = 0.0

    def observe(self, drafted: int, accepted: int) -> None:
        """What follows a rejected draft was not tried."""
        self.accepted = DECAY * self.accepted + accepted
        self.tried = DECAY * self.tried + accepted + (accepted < drafted)

    def share(self, prior: float) -> float:
        return (self.accepted + PRIOR_TRIALS * prior) / (self.tried + PRIOR_TRIALS)


class Candidate(NamedTuple):
    """A row with a draft."""

    row: int
    draft: Draft
    share: float
    """Of its drafts that are likely to be accepted, each if those before it are."""
    most: int
    """Drafts that it may have."""
    depth: int = 0
    """Tokens at the beginning of the draft that are under way, at most: drafts are those behind."""
    wanted: int = 0
    """How many drafts a step gets, once that is decided."""


class DraftBudget:
    """Decides how many drafts of each row a step has: as many as bring the most tokens a second.

    A draft's chance is the product of those up to it, so of all rows' drafts the likeliest come
    first, and each costs what the measured steps of that size say.
    """

    def __init__(
        self,
        most_rows: int,
        *,
        ladder: Sequence[int] = (),
        least_gain: float = LEAST_GAIN,
        tried_every: int = TRIED_EVERY,
    ) -> None:
        """most_rows: decode rows of a step, drafts included, at most; ladder: steps with drafts are
        computed otherwise than those without, padded to these sizes, so that they are measured
        apart; empty: they are computed alike."""
        self.costs = StepCosts()
        """Of steps without drafts."""
        self.drafted_costs = StepCosts(ladder) if ladder else self.costs
        self.pass_costs: StepCosts | None = None
        """Of what makes one more draft of so many rows; ``None``: drafts cost nothing to make."""
        self._most_rows, self._least_gain, self._tried_every = most_rows, least_gain, tried_every
        self._balance, self._rests, self._rest = 0.0, 0, tried_every
        """What drafts have gained lately, in steps; for how many steps there are none; how long the
        next rest is."""
        self._credit = HOST_CREDIT
        """Seconds that looking for drafts may take the host."""
        self._kinds: dict[tuple[str, int], Acceptance] = {}
        self._untried = 0.0
        """Seconds of steps since drafts that would not pay were tried."""

    def share(self, draft: Draft, row: Acceptance) -> float:
        """Of a draft's tokens that are likely to be accepted; row: how its sequence's were."""
        if draft.source == GRAMMAR:
            return self._kind(draft).share(FORCED_PRIOR)
        prior = LONG_PRIOR if draft.match >= LONG_MATCH else PRIOR
        return row.share(self._kind(draft).share(prior))

    def observe(self, draft: Draft, drafted: int, accepted: int, row: Acceptance) -> None:
        self._kind(draft).observe(drafted, accepted)
        if draft.source != GRAMMAR:
            row.observe(drafted, accepted)

    def _kind(self, draft: Draft) -> Acceptance:
        key = draft.source, bisect_left(_MATCHES, draft.match + 1)
        found = self._kinds.get(key)
        if found is None:
            found = self._kinds[key] = Acceptance()
        return found

    def learn(self, rows: int, seconds: float) -> None:
        """What drafts have gained or, below 0, lost at a step of so many rows. Where they keep on
        losing, whatever was expected of them, there are none for a while."""
        alone = self.costs.seconds(rows)
        if self.drafted_costs is self.costs or not alone:
            return
        self._earn(seconds)
        self._balance = BALANCE_DECAY * self._balance + max(seconds / alone, -_MOST_OF_ONE)
        if self._balance < -MOST_LOST:
            self._balance, self._rests = 0.0, self._rest
            self._rest = min(2 * self._rest, MOST_RESTS * self._tried_every)
        elif self._balance >= MOST_LOST:
            self._balance, self._rest = min(self._balance, MOST_SAVED), self._tried_every

    def may_look(self, rows: int) -> bool:
        """Whether drafts are looked for: steps of so many rows have room for some, they do not
        rest, and the host has the time."""
        if self._rests:
            self._rests -= 1
            return False
        has_room = rows < self._most_rows and self.costs.seconds(rows) is not None
        return has_room and self._credit > 0

    def looked(self, seconds: float) -> None:
        """Looking for drafts has cost so much."""
        self._earn(-seconds)

    def passed(self, seconds: float) -> None:
        """A step has taken so long, whatever was in it."""
        self._untried += seconds
        self._earn(HOST_SHARE * seconds)

    def _earn(self, seconds: float) -> None:
        self._credit = max(-HOST_CREDIT, min(HOST_CREDIT, self._credit + seconds))

    def choose(
        self, rows: int, candidates: Sequence[Candidate], pause: float | None = None
    ) -> list[int] | None:
        """How many drafts each candidate gets in a step of ``rows`` decode rows. pause: seconds
        that the device idles where the tokens under way are waited for; ``None``: nobody waits.

        ``None``: it brings more to wait, and to look for drafts anew.
        """
        nothing = [0] * len(candidates)
        alone = self.costs.seconds(rows)
        if alone is None or self._rests:  # first a step without drafts is measured
            return nothing
        least = (1 + self._least_gain) * rows / alone
        chosen, rate = self._best(rows, candidates, alone, 0.0)
        if pause is not None and any(one.depth for one in candidates):
            anew = [one._replace(depth=min(one.depth, 1)) for one in candidates]
            if self._best(rows, anew, alone, pause)[1] > max(rate, least):
                return None
        if rate > least:
            return chosen
        too_soon = self._untried < self._tried_every * alone
        if too_soon or rows + len(candidates) > self._most_rows:
            return nothing
        self._untried = 0.0
        return [1] * len(candidates)

    def _best(
        self, rows: int, candidates: Sequence[Candidate], alone: float, pause: float
    ) -> tuple[list[int], float]:
        """The drafts that bring the most tokens a second, if there are any, and how many these are.
        alone: seconds of the step without drafts; pause: with drafts it takes so much longer."""
        chances: list[tuple[float, int]] = []
        for at, one in enumerate(candidates):
            chance = one.share**one.depth
            for _ in range(one.most):
                chance *= one.share
                chances.append((chance, at))
        chances.sort(key=lambda one: -one[0])
        expected, best, count = float(rows), 0.0, 0
        places, making = [0] * len(candidates), self._making(rows, candidates)
        size, seconds = -1, 0.0
        for number, (chance, at) in enumerate(chances[: max(0, self._most_rows - rows)], 1):
            expected += chance
            places[at] += 1
            padded = self.drafted_costs.size(rows + number)
            if padded != size:
                size, seconds = padded, self._drafted_seconds(padded, alone) + pause
            rate = expected / (seconds + (making * (1 + max(places)) if making else 0.0))
            if rate > best:
                best, count = rate, number
        chosen = [0] * len(candidates)
        for _, at in chances[:count]:
            chosen[at] += 1
        return chosen, best

    def _making(self, rows: int, candidates: Sequence[Candidate]) -> float:
        """Seconds of a pass that makes one more draft of each row; as long is what such a step
        takes to keep what was accepted. Those that a grammar forces are made by no pass."""
        if self.pass_costs is None or all(one.draft.source == GRAMMAR for one in candidates):
            return 0.0
        return self.pass_costs.seconds(rows) or 0.0

    def _drafted_seconds(self, rows: int, alone: float) -> float:
        """Of a step with drafts; alone: of the same step without."""
        known = self.drafted_costs.seconds(rows)
        if known is not None:
            return known or alone
        return _FIRST_COST * alone
