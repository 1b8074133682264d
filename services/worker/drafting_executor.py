"""Executes steps in which decode rows have drafts, on the CPU."""

from __future__ import annotations

import time

import numpy as np
import torch
from msgspec.structs import replace

from penstock.kernels.sampling.choose import bad_rows
from penstock.protocol.logprobs import PackedLogprobs
from penstock.protocol.wire.messages.steps import (
    RowFailure,
    SampledLogprobs,
    StepPlan,
    StepResult,
)
from penstock.services.worker.drawn_rows import Drawn, causes
from penstock.services.worker.model_executor import Hidden, ModelExecutor
from penstock.services.worker.slots import DraftRows, IntArray, PlannedStep
from penstock.services.worker.speculation.drafting import Drafting
from penstock.services.worker.speculation.verification import (
    Draws,
    Verified,
    accept,
    accept_in_turn,
    first_rows,
    renumbered,
)
from penstock.services.worker.step_logprobs import asking_rows

GRAMMAR_FAILED = -1
"""Among the reasons why a row has no token: ``Draws.bad``."""


class DraftingExecutor(ModelExecutor):
    """A ``ModelExecutor`` whose rows may bring several tokens: what was drafted and drawn alike.

    Without ``drafting`` it is a ``ModelExecutor``. Rejected drafts leave K and V behind the last
    accepted position, which nothing attends to, and which the next step writes anew.
    """

    drafting: Drafting | None = None

    def speculate(self, drafting: Drafting) -> None:
        """From the next plan on, which must be full, rows may have drafts."""
        self.drafting, self.draft_counts = drafting, drafting.counts
        self.slots.row_tokens = 1 + drafting.most
        self.capacity = replace(self.capacity, max_row_tokens=1 + drafting.most)

    def hidden(self, step: PlannedStep) -> Hidden:
        hidden = super().hidden(step)
        if self.drafting is not None and step.drafts is None:
            self.drafting.computed(step)
        return hidden

    def _compute(self, plan: StepPlan, step: PlannedStep, begun: float) -> StepResult:
        drafting = self.drafting
        if drafting is None:
            return super()._compute(plan, step, begun)
        drafting.begin(plan)
        grammars = self.grammars
        drafted = drafting.draft(step, self.slots, grammars.forced, grammars.fitting)
        result = None
        if drafted.drafts is not None:
            result = self._compute_drafted(plan, step, drafted, begun, drafting)
        if result is None:
            result = super()._compute(plan, step, begun)
            tokens = np.frombuffer(result.tokens, "<i4").tolist()
            drafting.took(step.sampled.tolist(), [[token] for token in tokens])
        drafting.measured(drafted, result.seconds)
        if step.full is None:
            return result
        return renumbered(result, len(result.counts) or len(step.sampled), step.full)

    def _compute_drafted(
        self,
        plan: StepPlan,
        step: PlannedStep,
        drafted: PlannedStep,
        begun: float,
        drafting: Drafting,
    ) -> StepResult | None:
        """step: the one without drafts. ``None``: numbers are not finite, perhaps of a draft alone,
        and rows meet those of the drafts behind them; the step is to be computed without."""
        drafts = drafted.drafts
        if drafts is None:
            raise ValueError("the step has no drafts")
        self._start_masks(step)
        hidden = self.hidden(drafted)
        logits = self.row_logits(drafted, hidden)[: len(drafted.sampled)]
        if bool(bad_rows(logits).any()):
            self._take_back(drafted, drafts)
            return None
        verified, failures = self._verify(step, drafted, drafts, logits)
        drafting.verified(step, drafts, verified.counts)
        self.slots.took(step.decoding, verified.counts, verified.last)
        parts = np.split(verified.tokens, np.cumsum(verified.counts)[:-1])
        drafting.took(step.decoding.tolist(), [part.tolist() for part in parts])
        not_finite, banned = causes(verified.bad)
        rows = first_rows(drafts)
        numbers = np.diff(rows, append=len(drafts.ahead)) - 1
        return StepResult(
            plan.epoch,
            plan.step,
            verified.tokens.astype("<i4").tobytes(),
            not_finite,
            time.perf_counter() - begun,
            self._token_logprobs(step, verified, logits),
            [],
            [*failures, *self.slots.unreadable_rows(step)],
            banned,
            counts=verified.counts.astype(np.uint8).tobytes(),
            drafted=numbers.astype(np.uint8).tobytes(),
        )

    def _verify(
        self, step: PlannedStep, drafted: PlannedStep, drafts: DraftRows, logits: torch.Tensor
    ) -> tuple[Verified, list[RowFailure]]:
        """Draw, and take what agrees. logits: [rows of ``drafted``, V]."""
        if not self.slots.asks[step.sampled].any():
            drawn = self._draw(logits, drafted.sampled, drafts.ahead, self.grammars.wait)
            return accept(drafts, Draws(drawn.tokens, drawn.bad)), []
        failures: list[RowFailure] = []

        def draw(rows: IntArray, at: IntArray, place: int) -> Draws:
            some = logits.index_select(0, torch.from_numpy(rows).to(logits.device))
            if place and len(following := self.grammars.following(at)):
                self.grammars.start(at, following)
            drawn = self._draw(some, at, place, self.grammars.wait)
            failed = [] if drawn.masks is None else drawn.masks.failures
            bad = drawn.bad.copy()
            bad[[failure.row for failure in failed]] = GRAMMAR_FAILED
            if place:
                self._took(*_good(some, drawn, np.flatnonzero(bad == 0)))
            else:
                failures.extend(failed)
                self._took(some, drawn)
            return Draws(drawn.tokens, bad)

        return accept_in_turn(step, drafts, draw), failures

    def _take_back(self, drafted: PlannedStep, drafts: DraftRows) -> None:
        """Leave nothing of a step's drafts that a later row may meet: a weight of 0 times a NaN
        would still be NaN."""
        self.grammars.drop()
        rows = np.flatnonzero(drafts.ahead > 0)
        self._inputs.clear(drafted.decoding[rows], drafts.positions[rows])

    def _token_logprobs(
        self, step: PlannedStep, verified: Verified, logits: torch.Tensor
    ) -> list[SampledLogprobs]:
        """Logprobs of all tokens that slots which ask for them were brought."""
        if not len(asking_rows(self.slots, step.sampled)):
            return []
        owners = np.repeat(np.arange(len(step.sampled)), verified.counts)
        rows = torch.from_numpy(verified.rows).to(logits.device)
        found = self._logprobs(logits.index_select(0, rows), step.sampled[owners], verified.tokens)
        by_row: dict[int, list[PackedLogprobs]] = {}
        for one in found:
            by_row.setdefault(int(owners[one.row]), []).append(one.token)
        return [SampledLogprobs(row, joined(parts)) for row, parts in by_row.items()]


def _good(logits: torch.Tensor, drawn: Drawn, rows: IntArray) -> tuple[torch.Tensor, Drawn]:
    """Some rows of what was drawn."""
    masks = drawn.masks
    if masks is not None:
        masks = masks._replace(rows=np.flatnonzero(np.isin(rows, masks.rows)))
    at, num_output, tokens, bad, _ = drawn
    some = logits.index_select(0, torch.from_numpy(rows).to(logits.device))
    return some, Drawn(at[rows], num_output[rows], tokens[rows], bad[rows], masks)


def joined(parts: list[PackedLogprobs]) -> PackedLogprobs:
    """Of several tokens, each with as many of the likeliest."""
    return PackedLogprobs(parts[0].most, b"".join(part.entries for part in parts))
