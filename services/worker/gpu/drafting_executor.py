"""Executes steps in which decode rows have drafts, on a CUDA device.

A step without drafts is launched while the one before it runs, as ever. Texts then lack the tokens
that are under way; where they say that drafts would pay all the same, those tokens are waited for,
and the step is launched with drafts. How many tokens it brings must be known before the next one,
so its end is waited for, too. What both waits cost is measured as part of such steps.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch
from msgspec.structs import replace

from penstock.kernels.sampling import NOT_FINITE
from penstock.services.worker.gpu.chunk_rows import ChunkRows
from penstock.services.worker.gpu.draft_rows import DraftDraws, lay_out
from penstock.services.worker.gpu.executor import GpuExecutor
from penstock.services.worker.gpu.in_flight import DraftsInFlight, InFlight
from penstock.services.worker.speculation.verification import (
    Draws,
    Verified,
    accept,
    first_rows,
    renumbered,
    with_counts,
    without,
)

if TYPE_CHECKING:
    from penstock.protocol.wire.messages.steps import StepPlan, StepResult
    from penstock.services.worker.planned_step import DraftRows, IntArray, PlannedStep
    from penstock.services.worker.speculation.drafting import Drafting

_WEIGHT = 0.2
"""Of the newest pause in their mean."""


class DraftingGpuExecutor(GpuExecutor):
    """A ``GpuExecutor`` whose rows may bring several tokens: what was drafted and drawn alike.

    Without ``drafting`` it is a ``GpuExecutor``. Rows that ask for more than a temperature and
    limits, or for logprobs, have no drafts. Rejected drafts leave K and V behind the last accepted
    position, which nothing attends to, and which the next step writes anew.
    """

    drafting: Drafting | None = None

    def speculate(self, drafting: Drafting) -> None:
        """From the next plan on, which must be full, rows may have drafts."""
        self.drafting, self.draft_counts = drafting, drafting.counts
        self.slots.row_tokens = 1 + drafting.most
        self.capacity = replace(self.capacity, max_row_tokens=1 + drafting.most)
        self._born = np.zeros(self.capacity.max_num_seqs, np.int64)
        """The step from which on each slot's tokens are those of its sequence."""
        self._waited = False
        """Whether the present launch has waited for a step."""
        self._pause = 0.0
        """Seconds between the end of a step with drafts and the launch of the next."""
        with torch.inference_mode():
            self._draws = DraftDraws(self._state, self.sampler, self.decoder.space)
            self._draws.warm_up()
            self.decoder.head_of_all(self.graphs.mixed_rows(2, 1), 2)

    def launch(self, plan: StepPlan) -> None:
        if self.drafting is None:
            super().launch(plan)
            return
        begun, self._waited = time.perf_counter(), False
        if self._flight and self._flight[-1].drafts is not None:
            self._wait_for_all()  # where its slots stand is not known before
        super().launch(plan)
        flight = self._flight[-1]
        flight.launched, flight.waited = begun, self._waited
        if self._waited and flight.drafts is None:
            pause = time.perf_counter() - self._last_end
            self._pause += _WEIGHT * (pause - self._pause)
            self.drafting.wasted(flight.rows, pause)

    def _wait_for_all(self) -> None:
        self._waited = True
        for flight in self._flight:
            self._is_over(flight, wait=True)

    def _launch(self, plan: StepPlan, step: PlannedStep, launched: float) -> InFlight:
        drafting = self.drafting
        if drafting is None:
            return super()._launch(plan, step, launched)
        self._begin(plan, drafting)
        drafted = self._with_drafts(step, drafting)
        if drafted.drafts is None:
            flight = super()._launch(plan, step, launched)
        else:
            flight = self._launch_drafts(plan, step, drafted.drafts, launched)
        flight.computed = drafted
        return flight

    def _begin(self, plan: StepPlan, drafting: Drafting) -> None:
        """A plan has changed the slots."""
        drafting.begin(plan)
        if plan.full:
            self._born.fill(plan.step)
        self._born[plan.gone] = plan.step
        slots = self.slots
        for new in plan.added:
            self._born[new.slot] = plan.step
            if slots.asks[new.slot] or slots.logprobs[new.slot] >= 0:
                drafting.leave(new.slot)

    def _with_drafts(self, step: PlannedStep, drafting: Drafting) -> PlannedStep:
        """The step with the drafts that pay; waits for what is under way where they seem to."""
        if not drafting.budget.may_look(len(step.decoding)):
            return step
        under_way = sum(not self._is_over(flight, wait=False) for flight in self._flight)
        drafting.budget.lead_seconds = self._pause if under_way else 0.0
        if under_way:
            if not drafting.pays(step, self.slots, under_way):
                drafting.budget.looked(False)
                return step
            self._wait_for_all()
        drafted = drafting.draft(step, self.slots)
        drafting.budget.looked(drafted.drafts is not None)
        return drafted

    def _launch_drafts(
        self, plan: StepPlan, step: PlannedStep, drafts: DraftRows, launched: float
    ) -> InFlight:
        """step: the one without drafts. Its rows without drafts get what they get in any step."""
        laid, ring, rows = lay_out(step, drafts), self._next_ring(), len(step.sampled)
        graphs = self._graphs_of(laid.step, ring)
        padded = graphs.mixed_rows(laid.num_rows, ChunkRows.tiles_of(laid.step))
        self.chunks.send(laid.step, padded, self._chunk_buffers[ring], every_row=True)
        self._state.update(laid.step, laid.sample_rows, ring)
        graphs.run_mixed(padded, len(laid.step.decoding))
        host, space = self._results[ring], self.decoder.space
        drawn, failures, openings = self._allow(step, ring)
        failures = failures + self.slots.unreadable_rows(step)
        self._recall(graphs, step, 0)
        every = len(laid.sample_rows)
        graphs.decoder.head_of_all(padded, every)
        self._choose(graphs, step, rows, openings, made=True)
        host.copy_(space.result, non_blocking=True)
        logprobs = self._logprobs.begin(step, [])
        more = self._draws.draw(
            space.logits[rows:every], laid.slots, laid.ahead, ring,
            limited=self.sampler.needed(laid.slots),
        )  # fmt: skip
        return InFlight(
            plan.epoch, plan.step, rows, host, self._event(timed=False), launched, drawn,
            self._noted(step), failures, logprobs,
            drafts=DraftsInFlight(drafts, laid.later, more),
        )  # fmt: skip

    def _is_over(self, flight: InFlight, wait: bool) -> bool:
        known, before = flight.is_over, self._last_end
        if not super()._is_over(flight, wait):
            return False
        if not known and self.drafting is not None and flight.computed is not None:
            if flight.drafts is None:
                steady = flight.launched <= before and not flight.waited
                self._take(flight, flight.computed, self.drafting, steady=steady)
            else:
                self._take_drafted(flight.drafts, flight, flight.computed, self.drafting)
        return True

    def _take(
        self, flight: InFlight, step: PlannedStep, drafting: Drafting, *, steady: bool
    ) -> None:
        """Show what drafts the tokens of a step without any. steady: it was launched while the one
        before it ran."""
        tokens = flight.result.numpy()[0, : flight.rows]
        own = self._born[step.sampled] <= flight.step
        slots, tokens = step.sampled[own], tokens[own]
        self.slots.last_token[slots] = tokens
        drafting.drew(slots, tokens)
        if steady or drafting.budget.costs.seconds(1) is None:
            drafting.measured(step, flight.seconds)

    def _take_drafted(
        self, drafts: DraftsInFlight, flight: InFlight, step: PlannedStep, drafting: Drafting
    ) -> None:
        first = first_rows(drafts.rows)
        slots, verified = step.decoding[first], self._verified(flight, drafts, first)
        last, counts = verified.last, verified.counts
        again = (verified.bad == NOT_FINITE) & (np.diff(first, append=len(step.decoding)) > 1)
        if again.any():  # perhaps of a draft alone
            last = np.where(again, drafts.rows.tokens[first], last)
            verified = without(verified, again)
            counts = verified.counts
        drafts.verified = verified
        self.slots.took(slots, counts - 1, last)  # one is counted already
        self._state.correct(slots[counts != 1])
        parts = np.split(verified.tokens, np.cumsum(counts)[:-1])
        drafting.took(slots.tolist(), [part.tolist() for part in parts])
        drafting.measured(step, flight.seconds)
        for slot in slots[again].tolist():
            drafting.leave(slot)

    @staticmethod
    def _verified(flight: InFlight, drafts: DraftsInFlight, first: IntArray) -> Verified:
        rows, later = drafts.rows, drafts.later
        both = np.empty((2, len(rows.ahead)), np.int64)
        both[:, first] = flight.result.numpy()[:, : flight.rows]
        both[:, later] = drafts.more.numpy()[:, : len(later)]
        return accept(rows, Draws(both[0], both[1]))

    def _result(self, flight: InFlight) -> StepResult:
        result, step = super()._result(flight), flight.computed
        if step is None:
            return result
        if flight.drafts is not None and flight.drafts.verified is not None:
            result = with_counts(result, flight.drafts.rows, flight.drafts.verified)
        return result if step.full is None else renumbered(result, flight.rows, step.full)
