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

from penstock.kernels.gpu.guessed_drafts import GUESSED
from penstock.services.worker.gpu.draft_draws import DraftDraws, RowMasks
from penstock.services.worker.gpu.drafted_rows import DraftedRows
from penstock.services.worker.gpu.executor import GpuExecutor
from penstock.services.worker.gpu.graph_sizes import DRAFTED_ROWS
from penstock.services.worker.gpu.in_flight import DraftsInFlight, InFlight
from penstock.services.worker.gpu.logprob_rows import RowsOfDrafts
from penstock.services.worker.gpu.sent import sent
from penstock.services.worker.planned_step import IntArray, PlannedStep
from penstock.services.worker.speculation.drafting import with_drafts
from penstock.services.worker.speculation.verification import (
    Verified,
    first_rows,
    renumbered,
    with_counts,
)

if TYPE_CHECKING:
    from penstock.protocol.wire.messages.steps import (
        RowFailure,
        SlotAdjustments,
        StepPlan,
        StepResult,
    )
    from penstock.services.worker.speculation.drafting import Drafting, Guess

_WEIGHT = 0.2
"""Of the newest pause in their mean."""
_FIRST_PAUSE = 2.0
"""What the first pause is taken to be, as a multiple of a launch's time."""
_BESIDE = 0.2
"""What looking costs while the device is busy, as a share of its time: other work waits."""
_MEASURED_EVERY = 4
"""Of steps without drafts one is measured: the host has little time beside the shortest ones."""


class DraftingGpuExecutor(GpuExecutor):
    """A ``GpuExecutor`` whose rows may bring several tokens: what was drafted and drawn alike.

    Without ``drafting`` it is a ``GpuExecutor``. Rows that ask for what depends on the order of the
    drafts ahead (bad words, DRY, Mirostat, …) have no drafts; of what a grammar allows behind each
    draft the host makes a mask while the layers are computed. Rejected drafts leave K and V behind
    the last accepted position, which nothing attends to, and which the next step writes anew.
    """

    drafting: Drafting | None = None

    def speculate(self, drafting: Drafting) -> None:
        """From the next plan on, which must be full, rows may have drafts."""
        self.drafting, self.draft_counts = drafting, drafting.counts
        self.slots.row_tokens = 1 + drafting.most
        self.capacity = replace(self.capacity, max_row_tokens=1 + drafting.most)
        self._born = np.zeros(self.capacity.max_num_seqs, np.int64)
        """The step from which on each slot's tokens are those of its sequence."""
        self._changed = 0
        """The last step that slots came or went with."""
        self._waited = False
        """Whether the present launch has waited for a step."""
        self._launched_at = self._launching = 0.0
        """When the last launch was done, and how long the last one without waiting took."""
        self._ended: torch.cuda.Event | None = None
        """Of the last step that is known to be over."""
        self._looked = 0.0
        """Seconds that looking for drafts took in the present launch."""
        self._pause = 0.0
        """Seconds between the end of a step that was waited for and the launch of the next; 0: none
        was measured."""
        with torch.inference_mode():
            self._draws = DraftDraws(self._state, self.sampler, self.decoder.space)
            self._draws.warm_up()
            for first in (0, 1):  # where the logits begin
                logits = self.decoder.space.logits[first : first + 1]
                self._logprobs.of_drafts(logits, np.zeros(1, np.int64), self._draws.result[0])
            most = min(self.capacity.max_num_seqs, DRAFTED_ROWS[-1])
            self._drafted = DraftedRows(self._state, most, self.capacity.block_size)
            results = self.decoder.space.result, self._draws.result
            self._drafted.warm_up(*results, self.sampler.slots)
            for graphs in (self.graphs, self.adapted):
                if graphs is not None:
                    graphs.take_drafts(self._drafted)

    def launch(self, plan: StepPlan) -> None:
        if self.drafting is None:
            super().launch(plan)
            return
        self._waited, self._looked, idle = False, 0.0, self._has_idled()
        if any(flight.drafts is not None for flight in self._flight):
            self._take_those_over(wait=False)  # slots may have more room than was sure
        super().launch(plan)
        flight, self._launched_at = self._flight[-1], time.perf_counter()
        flight.idle = idle
        if self._looked:
            waits = self._runs_dry()
            self.drafting.budget.looked(self._looked * (1.0 if waits else _BESIDE))
            flight.pause = self._looked if waits else 0.0
        if self._waited:
            flight.pause = self._launched_at - self._last_end
            expected = self._expected_pause()
            self._pause = expected + _WEIGHT * (min(flight.pause, 2 * expected) - expected)
            if flight.drafts is None:
                self.drafting.wasted(flight.rows, flight.pause)
        else:
            self._launching = self._launched_at - flight.launched

    def _has_idled(self) -> bool:
        """Whether the device has had nothing to do for longer than a step, and not because the host
        was launching one."""
        alone = 0.0 if self.drafting is None else self.drafting.budget.costs.seconds(1) or 0.0
        if time.perf_counter() - self._launched_at <= alone:
            return False
        event = self._flight[-1].event if self._flight else None
        return event is None or bool(event.query())  # type: ignore[no-untyped-call]

    def _runs_dry(self) -> bool:
        """Whether the device has come to the end of what was launched before the last step: else
        the host has taken nothing from it."""
        event = self._flight[-2].event if len(self._flight) > 1 else None
        return event is None or bool(event.query())  # type: ignore[no-untyped-call]

    def _expected_pause(self) -> float:
        return self._pause or _FIRST_PAUSE * self._launching

    def _event(self, timed: bool) -> torch.cuda.Event | None:
        return super()._event(timed or self.drafting is not None)

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
        return flight

    def _begin(self, plan: StepPlan, drafting: Drafting) -> None:
        """A plan has changed the slots."""
        drafting.begin(plan)
        if plan.full:
            self._born.fill(plan.step)
        if plan.full or plan.gone or plan.added:
            self._changed = plan.step
            self._born[plan.gone] = plan.step
        slots = self.slots
        for new in plan.added:
            self._born[new.slot] = plan.step
            if slots.asks[new.slot] and reads_order(slots.adjustments[new.slot]):
                drafting.leave(new.slot)

    def _under_way(self) -> IntArray:
        """By slot, the steps whose tokens for it are not known yet."""
        steps = np.zeros(self.capacity.max_num_seqs, np.int64)
        for flight in self._flight:
            if not flight.is_over and flight.computed is not None:
                slots = flight.computed.sampled
                steps[slots[self._born[slots] <= flight.step]] += 1
        return steps

    def _guesses(self, step: PlannedStep, drafting: Drafting) -> list[Guess]:
        """Those of the drafts that pay; waits for what is under way where that pays more."""
        budget, rows = drafting.budget, len(step.decoding)
        if step.chunks or not rows or not budget.may_look(rows):
            return []
        began = time.perf_counter()
        self._take_those_over(wait=False)
        pause, both = self._expected_pause(), (self.grammars.forced, self._fitting)
        found = drafting.guess(step, self.slots, self._under_way(), pause, *both)
        self._looked = time.perf_counter() - began
        if found is None:
            self._waited = True
            self._take_those_over(wait=True)
            found = drafting.guess(step, self.slots, self._under_way(), pause, *both)
        return (found or [])[: self._drafted.most_guesses]

    def _fitting(self, slot: int, tokens: list[int]) -> list[int]:
        """The first of these tokens, as many as a slot's grammar allows; none where the answer may
        begin to follow it in their midst."""
        return self.grammars.fitting(slot, tokens) if self.grammars.guides(slot) else []

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
        (drawn, failures, openings), masks = self._allow_drafts(step, guesses, ring)
        failures = failures + self.slots.unreadable_rows(step)
        self._recall(graphs, step, 0)
        graphs.run_head(every)
        self._choose(graphs, step, rows, openings, made=True)
        host.copy_(space.result, non_blocking=True)
        logprobs = self._logprobs.begin(step, [])
        read = self._drafted.tokens[rows:every] if self._penalises(guesses) else None
        more = self._draws.draw(
            space.logits[rows:every], later, ahead, ring, limited=self.sampler.needed(later),
            adjusted=bool(self.slots.asks[later].any()), masks=masks, penalised=read,
        )  # fmt: skip
        likely = None
        if (self.slots.logprobs[later] >= 0).any():
            drawn_later = self._draws.result[0]
            likely = self._logprobs.of_drafts(space.logits[rows:every], later, drawn_later)
        outcome = self._drafted.accept(space.result, self._draws.result, ring)
        if read is not None:
            self._drafted.count(space.result, self._draws.result, self.sampler.slots)
        self.slots.drafted(step.decoding, counts)
        return InFlight(
            plan.epoch, plan.step, rows, host, self._event(timed=False), launched, drawn,
            self._noted(step), failures, logprobs, computed=drafted,
            drafts=DraftsInFlight(
                drafts, np.flatnonzero(drafts.ahead), guesses, more, outcome, likely
            ),
        )  # fmt: skip

    def _penalises(self, guesses: list[Guess]) -> bool:
        """Whether a slot with drafts asks for penalties."""
        asked = (self.slots.adjustments[one.slot] for one in guesses if self.slots.asks[one.slot])
        return any(one is not None and one.penalised for one in asked)

    def _allow_drafts(
        self, step: PlannedStep, guesses: list[Guess], ring: int
    ) -> tuple[tuple[dict[int, int], list[RowFailure], dict[int, int]], RowMasks | None]:
        """``_allow``, and the masks of drafts' rows: of those that the device places, as the host
        knows them by now."""
        following = self.grammars.following(step.sampled)
        if not any(one.row in following for one in guesses):
            return self._allow(step, ring), None
        self._take_those_over(wait=True)
        drafts: list[list[int]] = [[] for _ in step.sampled]
        later, first = [list[int]() for _ in step.sampled], 0
        for one in guesses:
            since = int(self.slots.position[one.slot]) - one.known
            drafts[one.row] = one.draft.tokens[since : min(GUESSED, since + one.drafts)]
            later[one.row] = list(range(first, first + len(drafts[one.row])))
            first += one.drafts
        shown = [drafts[row] for row in following.tolist()]
        sizes = np.array([1 + len(each) for each in shown])
        slots, begins = step.sampled[following], np.cumsum(sizes) - sizes
        host = self._mask_buffer(ring)[: int(sizes.sum())]
        masks = self.grammars.fill(step.sampled, following, host.numpy(), shown)
        words = host.to(self._device, non_blocking=True)
        self.sampler.allow(slots, words.index_select(0, sent(begins, self._device)))
        drawn = dict(zip(slots.tolist(), following.tolist(), strict=True))
        rows = np.array([row for at in following.tolist() for row in later[at]], np.int64)
        if not len(rows):
            return (drawn, masks.failures, masks.openings), None
        behind = sent(np.delete(np.arange(len(host)), begins), self._device)
        of_drafts = RowMasks(rows, words.index_select(0, behind))
        return (drawn, masks.failures, masks.openings), of_drafts

    def _feed(self, flight: InFlight) -> None:
        if flight.drafts is not None and flight.drawn:
            verified, _ = self._outcome(flight, flight.drafts)
            parts = np.split(verified.tokens, np.cumsum(verified.counts)[:-1])
            brought = [parts[row] for row in flight.drawn.values()]
            slots = np.repeat(list(flight.drawn), [len(tokens) for tokens in brought])
            self.grammars.took(slots, np.concatenate(brought))
            flight.drawn = {}
        super()._feed(flight)

    def _is_over(self, flight: InFlight, wait: bool) -> bool:
        known = flight.is_over
        if not super()._is_over(flight, wait):
            return False
        drafting, step = self.drafting, flight.computed
        if known or drafting is None or step is None:
            return True
        before, self._ended = self._ended, flight.event
        if flight.drafts is not None:
            self._take_drafted(flight.drafts, flight, step, drafting)
        else:
            self._take(flight, step, drafting)
            if not flight.step % _MEASURED_EVERY:
                drafting.budget.passed((_MEASURED_EVERY - 1) * flight.seconds)
            elif not flight.pause:
                return True
        if not flight.idle or drafting.budget.costs.seconds(1) is None:
            seconds = flight.seconds
            if before is not None and flight.event is not None and not flight.idle:
                # The host may hear of several ends at once.
                seconds = 1e-3 * before.elapsed_time(flight.event)
            drafting.measured(step, seconds, flight.pause)
        return True

    def _take(self, flight: InFlight, step: PlannedStep, drafting: Drafting) -> None:
        """Show what drafts the tokens of a step without any."""
        slots, tokens = step.sampled, flight.result.numpy()[0, : flight.rows].copy()
        if flight.step < self._changed:
            own = self._born[slots] <= flight.step
            slots, tokens = slots[own], tokens[own]
        drafting.drew(slots, tokens)

    def _take_drafted(
        self, drafts: DraftsInFlight, flight: InFlight, step: PlannedStep, drafting: Drafting
    ) -> None:
        first = first_rows(drafts.rows)
        slots, most = step.decoding[first], np.diff(first, append=len(step.decoding)) - 1
        verified, live = self._outcome(flight, drafts)
        drafts.drafted = np.zeros(len(slots), np.int64)
        rows = [one.row for one in drafts.guesses]
        drafts.drafted[rows] = np.maximum(live, 0)
        own = self._born[slots] <= flight.step
        mine, counts = slots[own], verified.counts[own]
        every = np.split(verified.tokens, np.cumsum(verified.counts)[:-1])
        parts = [every[at].tolist() for at in np.flatnonzero(own)]
        self.slots.pending[mine] -= most[own]
        self.slots.brought(mine, counts - 1)  # one is counted already
        drafting.took(mine.tolist(), parts)
        kept = np.flatnonzero(own[rows]).tolist()
        drafting.settled(
            [drafts.guesses[at] for at in kept], [int(live[at]) for at in kept],
            [int(verified.counts[rows[at]]) for at in kept],
        )  # fmt: skip
        for slot in mine[counts == 0].tolist():
            drafting.leave(slot)

    @staticmethod
    def _outcome(flight: InFlight, drafts: DraftsInFlight) -> tuple[Verified, IntArray]:
        """What a step that is over brings, and what has become of each guess: ``Outcome.live``."""
        if drafts.verified is not None and drafts.live is not None:
            return drafts.verified, drafts.live
        first = first_rows(drafts.rows)
        drawn = np.empty((2, len(drafts.rows.ahead)), np.int64)
        drawn[:, first] = flight.result.numpy()[:, : flight.rows]
        drawn[:, drafts.later] = drafts.more.numpy()[:, : len(drafts.later)]
        brought, live = drafts.outcome.numpy()[:2, : len(drafts.guesses)].astype(np.int64)
        counts = np.ones(len(first), np.int64)
        counts[[one.row for one in drafts.guesses]] = brought
        begins = np.cumsum(counts) - counts
        chosen = np.repeat(first - begins, counts) + np.arange(int(counts.sum()))
        bad = np.where(counts > 0, drawn[1][first], 0)
        drafts.drawn = drawn[0]
        drafts.verified, drafts.live = Verified(drawn[0][chosen], counts, chosen, bad), live
        return drafts.verified, live

    def _result(self, flight: InFlight) -> StepResult:
        result, step = super()._result(flight), flight.computed
        if step is None:
            return result
        drafts = flight.drafts
        if drafts is not None and drafts.verified is not None and drafts.drafted is not None:
            result = with_counts(result, drafts.verified, drafts.drafted)
            if drafts.logprobs is not None and drafts.drawn is not None and flight.logprobs:
                first = first_rows(drafts.rows)
                tokens = drafts.drawn.astype(np.int32)
                rows = RowsOfDrafts(tokens, first, drafts.later, drafts.logprobs)
                every = flight.logprobs.of_drafts(rows, drafts.verified)
                result = replace(result, logprobs=every)
        return result if step.full is None else renumbered(result, flight.rows, step.full)


def reads_order(asked: SlotAdjustments | None) -> bool:
    """Whether what a slot asks for depends on the order of the tokens that came before, but for its
    grammar."""
    return asked is not None and bool(asked.repeats or asked.stages or asked.bad_words)
