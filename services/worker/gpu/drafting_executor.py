"""Executes steps in which decode rows have drafts, on a CUDA device.

Each step is launched while the one before it runs. The host guesses from the tokens that it knows
how texts go on; the device takes a step's drafts out of these guesses, and advances a slot by those
that are what was drawn (``guessed_drafts``). The host hears of both when the step is over; until
then it knows where a slot stands at least and at most. Where waiting for the tokens under way is
expected to bring more, since the guesses behind them are not likely enough, it waits.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch
from msgspec.structs import replace

from penstock.services.worker.gpu.draft_draws import DraftDraws
from penstock.services.worker.gpu.drafted_rows import DraftedRows
from penstock.services.worker.gpu.executor import GpuExecutor
from penstock.services.worker.gpu.graph_sizes import DRAFTED_ROWS
from penstock.services.worker.gpu.in_flight import DraftsInFlight, InFlight
from penstock.services.worker.planned_step import PlannedStep
from penstock.services.worker.speculation.drafting import with_drafts
from penstock.services.worker.speculation.verification import (
    Verified,
    first_rows,
    renumbered,
    with_counts,
)

if TYPE_CHECKING:
    from penstock.protocol.wire.messages.steps import StepPlan, StepResult
    from penstock.services.worker.speculation.drafting import Drafting, Guess

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
        self._under_way = np.zeros(self.capacity.max_num_seqs, np.int64)
        """Steps whose tokens for each slot are not known yet."""
        self._waited = False
        """Whether the present launch has waited for a step."""
        self._pause = 0.0
        """Seconds between the end of a step that was waited for and the launch of the next."""
        with torch.inference_mode():
            self._draws = DraftDraws(self._state, self.sampler, self.decoder.space)
            self._draws.warm_up()
            most = min(self.capacity.max_num_seqs, DRAFTED_ROWS[-1])
            self._drafted = DraftedRows(self._state, most, self.capacity.block_size)
            self._drafted.warm_up(self.decoder.space.result, self._draws.result)
            for graphs in (self.graphs, self.adapted):
                if graphs is not None:
                    graphs.take_drafts(self._drafted)

    def launch(self, plan: StepPlan) -> None:
        if self.drafting is None:
            super().launch(plan)
            return
        self._waited = False
        self._take_those_over(wait=False)
        super().launch(plan)
        if self._waited:
            flight = self._flight[-1]
            flight.pause = time.perf_counter() - self._last_end
            self._pause += _WEIGHT * (flight.pause - self._pause)
            if flight.drafts is None:
                self.drafting.wasted(flight.rows, flight.pause)

    def _take_those_over(self, *, wait: bool) -> None:
        """Take the tokens of steps that are over. wait: for all of them."""
        for flight in self._flight:
            if not self._is_over(flight, wait):
                return

    def _launch(self, plan: StepPlan, step: PlannedStep, launched: float) -> InFlight:
        drafting = self.drafting
        if drafting is None:
            return super()._launch(plan, step, launched)
        self._begin(plan, drafting)
        guesses = self._guesses(step, drafting)
        if guesses:
            flight = self._launch_drafts(plan, step, guesses, launched)
        else:
            flight = super()._launch(plan, step, launched)
            flight.computed = step
        self._under_way[step.sampled] += 1
        return flight

    def _begin(self, plan: StepPlan, drafting: Drafting) -> None:
        """A plan has changed the slots."""
        drafting.begin(plan)
        if plan.full:
            self._born.fill(plan.step)
            self._under_way.fill(0)
        self._born[plan.gone] = plan.step
        slots = self.slots
        for new in plan.added:
            self._born[new.slot], self._under_way[new.slot] = plan.step, 0
            if slots.asks[new.slot] or slots.logprobs[new.slot] >= 0:
                drafting.leave(new.slot)

    def _guesses(self, step: PlannedStep, drafting: Drafting) -> list[Guess]:
        """Those of the drafts that pay; waits for what is under way where that pays more."""
        if not drafting.budget.may_look(len(step.decoding)):
            return []
        found = drafting.guess(step, self.slots, self._under_way, self._pause)
        if found is None:
            self._waited = True
            self._take_those_over(wait=True)
            found = drafting.guess(step, self.slots, self._under_way, self._pause)
        drafting.budget.looked(bool(found))
        return (found or [])[: self._drafted.most_guesses]

    def _launch_drafts(
        self, plan: StepPlan, step: PlannedStep, guesses: list[Guess], launched: float
    ) -> InFlight:
        """Rows without drafts get what they get in any step."""
        counts = np.zeros(len(step.decoding), np.int64)
        counts[[one.row for one in guesses]] = [one.drafts for one in guesses]
        shown = [one.draft.tokens[: one.drafts] for one in guesses]
        drafted = with_drafts(step, self.slots, counts, shown)
        drafts = drafted.drafts
        if drafts is None:
            raise ValueError("the step has no drafts")
        ring, rows, every = self._next_ring(), len(step.decoding), len(drafted.decoding)
        padded = self.graphs.drafted_rows(every)
        self._state.update(step, np.arange(rows), ring)
        later, ahead = self._drafted.place(step.decoding, guesses, padded, ring)
        owners = np.concatenate((step.decoding, later))
        graphs = self._graphs_of(PlannedStep(owners, [], owners), ring)
        graphs.run_drafted(padded)
        host, space = self._results[ring], self.decoder.space
        drawn, failures, openings = self._allow(step, ring)
        failures = failures + self.slots.unreadable_rows(step)
        self._recall(graphs, step, 0)
        graphs.run_head(every)
        self._choose(graphs, step, rows, openings, made=True)
        host.copy_(space.result, non_blocking=True)
        logprobs = self._logprobs.begin(step, [])
        more = self._draws.draw(
            space.logits[rows:every], later, ahead, ring, limited=self.sampler.needed(later),
        )  # fmt: skip
        outcome = self._drafted.accept(space.result, self._draws.result, ring)
        self.slots.pending[step.decoding] += counts
        return InFlight(
            plan.epoch, plan.step, rows, host, self._event(timed=False), launched, drawn,
            self._noted(step), failures, logprobs, computed=drafted,
            drafts=DraftsInFlight(drafts, np.flatnonzero(drafts.ahead), guesses, more, outcome),
        )  # fmt: skip

    def _is_over(self, flight: InFlight, wait: bool) -> bool:
        known, before = flight.is_over, self._last_end
        if not super()._is_over(flight, wait):
            return False
        drafting, step = self.drafting, flight.computed
        if known or drafting is None or step is None:
            return True
        if flight.drafts is None:
            self._take(flight, step, drafting)
        else:
            self._take_drafted(flight.drafts, flight, step, drafting)
        costs = drafting.budget.costs if flight.drafts is None else drafting.budget.drafted_costs
        if flight.launched <= before or costs.seconds(1) is None:  # else the device has idled
            drafting.measured(step, flight.seconds, flight.pause)
        return True

    def _take(self, flight: InFlight, step: PlannedStep, drafting: Drafting) -> None:
        """Show what drafts the tokens of a step without any."""
        tokens = flight.result.numpy()[0, : flight.rows]
        own = self._born[step.sampled] <= flight.step
        slots, tokens = step.sampled[own], tokens[own]
        self._under_way[slots] -= 1
        self.slots.last_token[slots] = tokens
        drafting.drew(slots, tokens)

    def _take_drafted(
        self, drafts: DraftsInFlight, flight: InFlight, step: PlannedStep, drafting: Drafting
    ) -> None:
        first = first_rows(drafts.rows)
        slots, most = step.decoding[first], np.diff(first, append=len(step.decoding)) - 1
        verified, live = self._verified(flight, drafts, first)
        drafts.verified = verified
        drafts.drafted = np.zeros(len(slots), np.int64)
        rows = [one.row for one in drafts.guesses]
        drafts.drafted[rows] = np.maximum(live, 0)
        own = self._born[slots] <= flight.step
        mine, counts = slots[own], verified.counts[own]
        every = np.split(verified.tokens, np.cumsum(verified.counts)[:-1])
        parts = [every[at].tolist() for at in np.flatnonzero(own)]
        known = self.slots.last_token[mine].tolist()
        last = [part[-1] if part else token for part, token in zip(parts, known, strict=True)]
        self._under_way[mine] -= 1
        self.slots.pending[mine] -= most[own]
        self.slots.took(mine, counts - 1, np.array(last, np.int64))  # one is counted already
        drafting.took(mine.tolist(), parts)
        kept = np.flatnonzero(own[rows]).tolist()
        drafting.settled(
            [drafts.guesses[at] for at in kept], [int(live[at]) for at in kept],
            [int(verified.counts[rows[at]]) for at in kept],
        )  # fmt: skip
        for slot in mine[counts == 0].tolist():
            drafting.leave(slot)

    @staticmethod
    def _verified(
        flight: InFlight, drafts: DraftsInFlight, first: np.ndarray[tuple[int], np.dtype[np.int64]]
    ) -> tuple[Verified, np.ndarray[tuple[int], np.dtype[np.int64]]]:
        """What the step brings, and what has become of each guess: ``Outcome.live``."""
        drawn = np.empty((2, len(drafts.rows.ahead)), np.int64)
        drawn[:, first] = flight.result.numpy()[:, : flight.rows]
        drawn[:, drafts.later] = drafts.more.numpy()[:, : len(drafts.later)]
        brought, live = drafts.outcome.numpy()[:2, : len(drafts.guesses)].astype(np.int64)
        counts = np.ones(len(first), np.int64)
        counts[[one.row for one in drafts.guesses]] = brought
        begins = np.cumsum(counts) - counts
        chosen = np.repeat(first - begins, counts) + np.arange(int(counts.sum()))
        bad = np.where(counts > 0, drawn[1][first], 0)
        return Verified(drawn[0][chosen], counts, chosen, bad), live

    def _result(self, flight: InFlight) -> StepResult:
        result, step = super()._result(flight), flight.computed
        if step is None:
            return result
        drafts = flight.drafts
        if drafts is not None and drafts.verified is not None and drafts.drafted is not None:
            result = with_counts(result, drafts.verified, drafts.drafted)
        return result if step.full is None else renumbered(result, flight.rows, step.full)
