"""The drafts of an executor's steps that a model or a head makes, and when it makes none."""

from __future__ import annotations

import numpy as np

from penstock.services.worker.planned_step import DraftRows, IntArray, PlannedStep
from penstock.services.worker.speculation.drafting import Drafting, Fitting, Forced
from penstock.services.worker.speculation.model_drafter import ModelDrafter
from penstock.services.worker.speculation.proposer import GRAMMAR, Draft
from penstock.services.worker.speculation.step_costs import Candidate, DraftBudget, StepCosts

CAPITAL_SECONDS = 2.0
"""What drafts may lose before they rest: to keep keys and values of a prompt is lost ahead of any
gain. As much at most is kept of what they gain."""
GRANTED_SHARE = 0.01
"""Of the time of all steps, which drafts may lose besides. After a rest they begin again with half
the capital."""


class Ledger:
    """Bounds what drafts cost where they do not pay, whatever was expected of them."""

    def __init__(self) -> None:
        self.rests = False
        self._left = CAPITAL_SECONDS

    def add(self, seconds: float, saved: float) -> None:
        """A step took so many seconds, and would have taken ``saved`` more without drafts."""
        self._left = min(CAPITAL_SECONDS, self._left + GRANTED_SHARE * seconds + saved)
        if self._left < 0:
            self.rests = True
        elif self._left >= CAPITAL_SECONDS / 2:
            self.rests = False


class ModelDrafting(Drafting):
    """``Drafting`` with a drafter: the number of drafts is chosen before they are made.

    While drafts rest, nothing is kept for them; sequences that began before or meanwhile have none
    any more.
    """

    def __init__(self, drafter: ModelDrafter, most: int, budget: DraftBudget) -> None:
        super().__init__(drafter, most, budget)
        self.drafter, self.ledger = drafter, Ledger()
        self._making = budget.pass_costs = StepCosts()

    def _propose(self, slot: int, most: int, forced: Forced, fitting: Fitting) -> Draft | None:
        if tokens := forced(slot, most):
            return Draft(tokens, GRAMMAR, len(tokens))
        return self.drafter.propose(slot, most)

    def _made_of(
        self, decoding: IntArray, chosen: list[Candidate], fitting: Fitting
    ) -> list[Candidate]:
        if not chosen:
            return chosen
        wanted = np.zeros(len(decoding), np.int64)
        for one in chosen:
            if one.draft.source == self.drafter.source:
                wanted[one.row] = one.wanted
        drafted, made = self.drafter.draft(decoding, wanted), []
        for one in chosen:
            if wanted[one.row]:
                tokens = fitting(int(decoding[one.row]), drafted[one.row])
                one = one._replace(draft=one.draft._replace(tokens=tokens), wanted=len(tokens))
            if one.wanted:
                made.append(one)
        return made

    def computed(self, step: PlannedStep) -> None:
        if self.drafter.live.any():
            self.drafter.keep(step)

    def verified(self, step: PlannedStep, drafts: DraftRows, counts: IntArray) -> None:
        self.drafter.settle(step.decoding, drafts, counts - 1)

    def measured(self, step: PlannedStep, seconds: float, drafting: float = 0.0) -> float:
        making, passes = self.drafter.spent()
        if step.drafts is not None and passes:
            slots = int((step.drafts.ahead == 0).sum())
            self._making.observe(slots, making / (passes + 1))
        saved = super().measured(step, seconds, making)
        self.ledger.add(seconds, saved)
        if self.ledger.rests and not self.drafter.rests:
            self.drafter.clear()
        self.drafter.rests = self.ledger.rests
        return saved
