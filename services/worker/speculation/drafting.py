"""The drafts of an executor's steps: made ahead of a step, counted behind it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from penstock.protocol.wire.messages.steps import StepPlan
from penstock.services.worker.slot_history import history
from penstock.services.worker.slots import DraftRows, IntArray, PlannedStep, SlotTable
from penstock.services.worker.speculation.proposer import GRAMMAR, Draft, SpeculativeProposer
from penstock.services.worker.speculation.step_costs import Acceptance, Candidate, DraftBudget

Forced = Callable[[int, int], list[int]]
Fitting = Callable[[int, list[int]], list[int]]

Parts = tuple[IntArray, Sequence[IntArray] | IntArray]
MOST_DRAWN = 256
"""Steps whose tokens are shown to a proposer at once, at most: many cost less than one by one."""


class Guess(NamedTuple):
    """What may follow the text of a slot that steps under way go on with."""

    row: int
    """Of the step."""
    slot: int
    draft: Draft
    known: int
    """Position of the last token that is known: the draft goes on behind it."""
    drafts: int
    """That the step has behind the tokens under way."""


def _nothing_forced(slot: int, most: int) -> list[int]:
    return []


def _all_fitting(slot: int, tokens: list[int]) -> list[int]:
    return tokens


class DraftCounts:
    """Tokens drafted and accepted, by source and by their place in the draft."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.drafted: dict[str, list[int]] = {}
        self.accepted: dict[str, list[int]] = {}
        self.saved_seconds = 0.0
        """What all steps with drafts would have taken longer without them, by the measured steps
        without."""

    def add(self, source: str, drafted: int, accepted: int) -> None:
        for counts, number in ((self.drafted, drafted), (self.accepted, accepted)):
            by_place = counts.setdefault(source, [0] * self._most)
            for place in range(number):
                by_place[place] += 1


class Drafting:
    """Proposes drafts for decode rows and learns which pay.

    A step with prefill has none: its rows are many already.
    """

    def __init__(self, proposer: SpeculativeProposer, most: int, budget: DraftBudget) -> None:
        """most: drafts of one row."""
        self.most = most
        self.counts = DraftCounts(most)
        self._proposer = proposer
        self.budget = budget
        self._rows: dict[int, Acceptance] = {}
        """Of the slots that may have drafts."""
        self._made: list[tuple[int, Draft, int]] = []
        """Slot, draft and how many of its tokens the step has …"""
        self._accepted = 0
        """… and how many of them all were accepted."""
        self._drawn: list[tuple[IntArray, IntArray]] = []
        """Slots and tokens that the proposer was not shown yet."""

    def begin(self, plan: StepPlan) -> None:
        """A plan changes the slots."""
        if plan.full or plan.gone or plan.added:
            self._show()
        if plan.full:
            self._proposer.clear()
            self._rows.clear()
            self._made = []  # of a step that nobody has heard of
        for slot in plan.gone:
            self.leave(slot)
        self._proposer.next_step()
        for new in plan.added:
            if not new.corpus:
                continue
            known = history(new, plan.prompts)
            text = np.concatenate((known.prompt, known.output))
            self._proposer.begin(new.slot, text, len(known.prompt), new.corpus)
            self._rows[new.slot] = Acceptance()

    def leave(self, slot: int) -> None:
        """Nothing is drafted any more for the sequence in a slot."""
        if self._rows.pop(slot, None) is not None:
            self._proposer.forget(slot)

    def guess(
        self,
        step: PlannedStep,
        slots: SlotTable,
        under_way: IntArray,
        pause: float,
        forced: Forced = _nothing_forced,
        fitting: Fitting = _all_fitting,
    ) -> list[Guess] | None:
        """Drafts for a step that is launched now, while others are under way. under_way: by slot,
        steps that bring it a token or more; pause: see ``DraftBudget.choose``; forced, fitting: see
        ``draft``. ``None``: it pays more to wait for these steps, and to guess again."""
        if not self._may_have(step):
            return []
        decoding = step.decoding
        known = slots.position - under_way
        candidates = self._candidates(step, slots, forced, fitting, under_way)
        if not candidates:
            return []
        counts = self.budget.choose(len(decoding), candidates, pause)
        if counts is None:
            return None
        guesses = []
        for one, count in zip(candidates, counts, strict=True):
            if count:
                slot = int(decoding[one.row])
                guesses.append(Guess(one.row, slot, one.draft, int(known[slot]), count))
        return guesses

    def settled(self, guesses: Sequence[Guess], live: Sequence[int], counts: Sequence[int]) -> None:
        """What has become of guesses, behind ``took``. live: drafts that a step has computed, less
        than 0: its text had gone on otherwise; counts: tokens that the slot got."""
        self._accepted = 0
        for one, computed, count in zip(guesses, live, counts, strict=True):
            accepted = max(0, count - 1)
            if one.slot in self._rows and computed:
                self.budget.observe(one.draft, abs(computed), accepted, self._rows[one.slot])
            self.counts.add(one.draft.source, max(0, computed), accepted)
            self._accepted += accepted

    def wasted(self, rows: int, seconds: float) -> None:
        """A step of so many rows without drafts was launched so much later for their sake."""
        self.budget.learn(rows, -seconds)

    def draft(
        self,
        step: PlannedStep,
        slots: SlotTable,
        forced: Forced = _nothing_forced,
        fitting: Fitting = _all_fitting,
    ) -> PlannedStep:
        """The step with the drafts that pay, which may be none. forced: what a slot's grammar
        leaves no choice of, up to so many tokens; fitting: what of a draft its grammar allows."""
        self._made = []
        if not self._may_have(step):
            return step
        decoding = step.decoding
        candidates = self._candidates(step, slots, forced, fitting)
        wanted = self.budget.choose(len(decoding), candidates) if candidates else None
        if wanted is None:
            return step
        both = zip(candidates, wanted, strict=True)
        chosen = [one._replace(wanted=count) for one, count in both if count]
        counts = np.zeros(len(decoding), np.int64)
        for one in self._made_of(decoding, chosen, fitting):
            counts[one.row] = one.wanted
            self._made.append((int(decoding[one.row]), one.draft, one.wanted))
        return with_drafts(step, slots, counts, [d.tokens[:n] for _, d, n in self._made])

    def _made_of(
        self, decoding: IntArray, chosen: list[Candidate], fitting: Fitting
    ) -> list[Candidate]:
        """The drafts of rows of which some tokens are wanted; those that are promises alone are
        made now."""
        return chosen

    def computed(self, step: PlannedStep) -> None:
        """The layers of a step without drafts are computed; nothing is drawn yet."""

    def verified(self, step: PlannedStep, drafts: DraftRows, counts: IntArray) -> None:
        """The rows of a step with drafts are drawn. step: the one without; counts: tokens that each
        slot gets, one at least."""

    def _may_have(self, step: PlannedStep) -> bool:
        if not self._rows or step.chunks or not len(step.decoding):
            return False
        self._show()
        return True

    def _candidates(
        self,
        step: PlannedStep,
        slots: SlotTable,
        forced: Forced,
        fitting: Fitting,
        under_way: IntArray | None = None,
    ) -> list[Candidate]:
        """The rows that have a draft. under_way: see ``guess``; ``None``: nothing is."""
        decoding = step.decoding
        found, room = [], np.minimum(slots.room(decoding) - 1, self.most).tolist()
        least = [0] * len(decoding) if under_way is None else under_way[decoding].tolist()
        pending = slots.pending[decoding].tolist()
        for row, slot in enumerate(decoding.tolist()):
            acceptance = self._rows.get(slot)
            if acceptance is None or room[row] < 1:
                continue
            depth = least[row] + pending[row]
            draft = self._propose(slot, room[row] + depth, forced, fitting)
            most = 0 if draft is None else min(room[row], len(draft.tokens) - least[row])
            if draft is not None and most > 0:
                share = self.budget.share(draft, acceptance)
                found.append(Candidate(row, draft, share, most, depth))
        return found

    def _propose(self, slot: int, most: int, forced: Forced, fitting: Fitting) -> Draft | None:
        if tokens := forced(slot, most):
            return Draft(tokens, GRAMMAR, len(tokens))
        draft = self._proposer.propose(slot, most)
        if draft is None:
            return None
        tokens = fitting(slot, draft.tokens)
        return draft._replace(tokens=tokens) if tokens else None

    def took(self, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        """What a step brought to each of these slots."""
        self._show()
        proposer, rows, made = self._proposer, self._rows, self._made
        brought = dict(zip(slots, tokens, strict=True)) if made else {}
        self._accepted, self._made = 0, []
        for slot, draft, count in made:
            accepted = max(0, len(brought[slot]) - 1)
            self.budget.observe(draft, count, accepted, rows[slot])
            self.counts.add(draft.source, count, accepted)
            self._accepted += accepted
        for slot, more in zip(slots, tokens, strict=True):
            if slot in rows:
                proposer.took(slot, more)

    def drew(self, slots: IntArray, tokens: IntArray) -> None:
        """``took`` for one token each of a step without drafts, shown when it matters."""
        if not (self._rows and len(slots)):  # nothing is drafted, or all have left
            return
        self._drawn.append((slots, tokens))
        if len(self._drawn) == MOST_DRAWN:
            self._show()

    def _show(self) -> None:
        """Show the proposer what was drawn."""
        if not self._drawn:
            return
        drawn, self._drawn = self._drawn, []
        slots = drawn[0][0]
        if all(each is slots for each, _ in drawn):  # as mostly
            every: Parts = slots, np.array([tokens for _, tokens in drawn]).T
        else:
            every = _by_slot(*(np.concatenate(each) for each in zip(*drawn, strict=True)))
        for slot, tokens in zip(every[0].tolist(), every[1], strict=True):
            if slot in self._rows:
                self._proposer.took(slot, array("i", tokens.astype(np.int32).tobytes()))

    def measured(self, step: PlannedStep, seconds: float, drafting: float = 0.0) -> float:
        """How long a step took, of which so many seconds went by to make drafts. Returns what
        drafts have saved of it, less than 0: lost."""
        rows = len(step.decoding)
        self.budget.passed(seconds)
        if step.chunks or not rows:
            return -drafting
        if step.drafts is None:
            self.budget.costs.observe(rows, seconds - drafting)
            return -drafting
        self.budget.drafted_costs.observe(rows, seconds - drafting)
        slots = int((step.drafts.ahead == 0).sum())
        alone = self.budget.costs.seconds(slots) or seconds
        saved = alone * (1 + self._accepted / slots) - seconds
        self.counts.saved_seconds += saved
        self.budget.learn(slots, saved)
        return saved


def _by_slot(slots: IntArray, tokens: IntArray) -> tuple[IntArray, Sequence[IntArray]]:
    """Each slot once, and its tokens in their order."""
    order = np.argsort(slots, kind="stable")
    slots, tokens = slots[order], tokens[order]
    first = np.flatnonzero(np.diff(slots, prepend=-1))
    return slots[first], np.split(tokens, first[1:])


def with_drafts(
    step: PlannedStep, slots: SlotTable, counts: IntArray, drafts: Sequence[Sequence[int]]
) -> PlannedStep:
    """A step without chunks whose decode rows have so many drafts each. drafts: of the rows that
    have any."""
    if not drafts:
        return step
    decoding = np.repeat(step.decoding, counts + 1)
    first = np.cumsum(counts + 1) - counts - 1
    ahead = np.arange(len(decoding)) - np.repeat(first, counts + 1)
    tokens = slots.last_token[decoding]
    tokens[ahead > 0] = np.concatenate([np.asarray(draft, np.int64) for draft in drafts])
    positions = slots.position[decoding] + slots.pending[decoding] + ahead
    rows = DraftRows(tokens, positions, ahead)
    return step._replace(decoding=decoding, sampled=decoding, drafts=rows)
