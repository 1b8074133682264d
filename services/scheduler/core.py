"""The scheduler's core: requests and results in, step plans and token batches out.

It has no clock (``now`` is passed in, monotonic seconds), no socket and no tensor.

Plan *k+1* is made before the result of step *k* is back: every running sequence is assumed to
have one token more, except one that ends by its length, which is not planned past it. When the
result shows a stop, the token that step *k+1* draws for that sequence is thrown away.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from penstock.protocol.wire.messages.engine import StepShape
from penstock.protocol.wire.messages.requests import Rejected, TokenWork
from penstock.protocol.wire.messages.steps import StepFailed, StepPlan, StepResult
from penstock.protocol.wire.messages.tokens import TokenBatch
from penstock.services.scheduler.adapter_places import AdapterPlaces
from penstock.services.scheduler.admission import (
    Offers,
    Unservable,
    UsableSlots,
    WaitingRoom,
    make_request,
    make_sequences,
    overloaded,
)
from penstock.services.scheduler.cache_shares import DEFAULT_SHARES, CacheShares
from penstock.services.scheduler.cached_prefixes import CachedPrefixes
from penstock.services.scheduler.crash_only import crash_only
from penstock.services.scheduler.endings import LENGTH, Ending
from penstock.services.scheduler.failures import SUSPECT_STALLS, FailureHandler
from penstock.services.scheduler.in_flight import StepsInFlight
from penstock.services.scheduler.integrity import check_state
from penstock.services.scheduler.kv_tier import KVTier
from penstock.services.scheduler.limits import Limits
from penstock.services.scheduler.open_sequences import OpenSequences
from penstock.services.scheduler.planned_step import Step
from penstock.services.scheduler.planner import Planner
from penstock.services.scheduler.policy import SchedulingPolicy
from penstock.services.scheduler.prefill_budget import PrefillBudget
from penstock.services.scheduler.progress import ProgressOf
from penstock.services.scheduler.results import ResultReader
from penstock.services.scheduler.sequence import Request, Sequence
from penstock.services.scheduler.stats import Counters, SchedulerStats, snapshot
from penstock.services.scheduler.tier_stores import KeptBlocks

Batches = list[tuple[str, TokenBatch]]
"""(owner, batch): at most one batch for each owner."""


class SchedulerCore:
    """Queues, KV blocks and step plans of one engine.

    After whatever a method raises nothing may be called any more. From those that handlers of
    messages and ticks call it is ``CoreFailed``; who calls ``plan`` and ``apply``, which cost no
    more than they must, ends by himself.
    """

    def __init__(
        self,
        limits: Limits,
        epoch: int,
        policy: SchedulingPolicy,
        enable_prefix_caching: bool,
        max_waiting_requests: int,
        max_in_flight: int = 2,
        most_in_flight: int = 2,
        max_waiting_tokens: int | None = None,
        shape: StepShape = StepShape(),  # noqa: B008 - it is frozen
        num_ranks: int = 1,
        engine: str = "",
        offers: Offers | None = None,
        shares: CacheShares = DEFAULT_SHARES,
    ) -> None:
        """Plans that may be unanswered: ``max_in_flight``, and ``most_in_flight`` while steps are
        shorter than a round trip to the worker. ``shape``: how its device likes steps.
        ``num_ranks``: workers that execute each plan. ``engine``: its name, for who asks where a
        request ran. ``offers``: what the worker can do. ``shares``: of the prefix cache."""
        self.limits = limits
        self.offers = offers or Offers()
        self.epoch = epoch
        self.counters = Counters()
        self._policy = policy
        self._caching = enable_prefix_caching
        self._usable = UsableSlots()
        self._room = WaitingRoom(max_waiting_requests, max_waiting_tokens)
        own = self._sequences = OpenSequences(policy)
        self._requests, self._waiting, self._rows = own.requests, own.waiting, own.rows
        self._rows.engine = engine
        self.progress = ProgressOf(self._requests, self._waiting, engine)
        self._shape, self._shares = shape, shares
        self.prefill_budget = PrefillBudget(shape)
        self.on_step: Callable[[Step, float], None] = lambda step, seconds: None
        """Hears of each executed step, and of its time in the worker."""
        self.prefixes = CachedPrefixes() if enable_prefix_caching else None
        """What the prefix cache holds, for the router."""
        self._tier: KVTier | None = None
        self._numbers = itertools.count()
        least = max(max_in_flight, limits.micro_batches + 1)
        self._in_flight = StepsInFlight(least, most_in_flight, shape, limits.micro_batches)
        self._failures = FailureHandler(self._sequences, self._in_flight, num_ranks > 1)
        self._results = ResultReader(self._sequences, self._failures)
        self.adapters = AdapterPlaces(self._sequences, self._in_flight, num_ranks)
        self._new_planner()

    # Requests.

    @crash_only
    def add(
        self, request_id: int, attempt: int, owner: str, work: TokenWork, now: float
    ) -> Rejected | None:
        """Take a request with all its choices, or say why not.

        A higher attempt replaces a lower one of the same id, silently; the same or a lower one
        changes nothing. One that this or another engine had taken before is exempt from the limit
        on waiting requests, and a choice that its output already ends, ends in the next batches.
        What was started again twice without a new token may be what ends engines: it runs alone.
        """
        known = self._requests.get(request_id)
        if known is not None:
            if attempt <= known.attempt:
                return None
            self._sequences.drop(known)
        if reason := self.offers.lacks(work.head):
            self.counters.rejected_requests += 1
            return overloaded(request_id, attempt, reason)
        try:
            request = make_request(request_id, attempt, owner, work, now, self.limits)
            sequences = make_sequences(request, work, self.limits, self._numbers)
        except Unservable as error:
            self.counters.rejected_requests += 1
            return error.rejected(request_id, attempt)
        if not self._caching:
            request.retain, request.release = [], False  # nobody finds what they are about
        has_output = any(sequence.num_output for sequence in sequences)
        continued = known is not None or work.head.accepted or has_output
        if not continued:
            waiting = self._waiting
            lack = self._room.lacks(
                *(waiting.num_requests, waiting.num_prompt_tokens, request.prompt_len),
                *(self.limits.kv_tokens, request.num_prompts),
            )
            if lack:
                self.counters.rejected_requests += 1
                return overloaded(request_id, attempt, lack)
        for sequence in sequences:
            sequence.resumed = continued
            sequence.suspect = work.stalls >= SUSPECT_STALLS
        self._sequences.register(request, sequences)
        if not continued:
            self.counters.prompt_tokens += request.prompt_len - work.head.virtual_tokens
        return None

    @crash_only
    def cancel(
        self, request_id: int, attempt: int, owner: str | None = None, choice: int = -1
    ) -> bool:
        """Drop an open request, or one choice of it, without a word to its owner.

        ``attempt`` must be the request's or higher; ``owner`` must be its owner, or ``None``.
        Returns whether anything was dropped.
        """
        request = self._requests.get(request_id)
        if request is None or attempt < request.attempt:
            return False
        if owner is not None and owner != request.owner:
            return False
        if choice < 0:
            self._sequences.drop(request)
            return True
        sequence = request.open.get(choice)
        if sequence is None:
            return False
        self._sequences.close(sequence)
        return True

    def holder(self, request_id: int) -> tuple[int, str] | None:
        """(attempt, owner) of an open request."""
        request = self._requests.get(request_id)
        return None if request is None else (request.attempt, request.owner)

    def max_output(self, request_id: int) -> int:
        """Tokens that a choice of an open request may have, at most; 0 for any other."""
        request = self._requests.get(request_id)
        return 0 if request is None else request.max_output

    def holding(self, owner: str) -> list[tuple[int, int]]:
        """(id, attempt) of every open request of an owner."""
        return [(request.id, request.attempt) for request in self._requests.of(owner)]

    def not_done_by(self, offers: Offers) -> list[int]:
        """Ids of the open requests that want anything else."""
        return [one.id for one in self._requests if offers.lacks(one.head)]

    def not_begun(self, before: float, most: int) -> list[int]:
        """Ids of those that came before then by a hand-over, less than their ``most``-th one, and
        wait for their turn: no choice has run, and none waits for blocks."""
        return self._requests.not_begun(before, most)

    def failures(self, request_id: int) -> int:
        """Steps that failed with an open request since its last token, over all its choices."""
        request = self._requests.get(request_id)
        return 0 if request is None else max(s.strikes for s in request.open.values())

    def owners(self) -> list[str]:
        """Owners with open requests."""
        return self._requests.owners()

    @crash_only
    def expire(self, now: float) -> Batches:
        """End what has passed its deadline, and hand out all ends that came about between steps.

        To be called a few times a second, also when the engine is idle.
        """
        self._sequences.expire(now)
        self._planner.kv.lapse(now)
        return self._rows.drain()

    # Steps.

    def plan(self, now: float) -> StepPlan | None:
        """Plan the next step.

        ``None`` when nothing can run, as many plans are unanswered as may be, or ``held_for`` says
        that it is too early.
        """
        if self._in_flight.at_limit or self._in_flight.held_for(now):
            return None
        self._sequences.expire(now)
        self._waiting.wake(now)
        self.adapters.look(now)
        step = self._planner.plan(self._in_flight.last + 1, now)
        for sequence in self._planner.take_stuck():
            self._sequences.end(sequence, LENGTH)
        if self._tier is not None:
            self._tier.before_plan()
        if step is None:
            return None
        self.counters.steps += 1
        gone = self._planner.batch.take_gone()
        expected = self.prefill_budget.prefill_seconds(step.num_prefilled)
        full = self._in_flight.push(step, expected, now)
        return StepPlan(
            epoch=self.epoch, step=step.number, full=full, gone=[] if full else gone,
            added=step.added, grown=step.grown, chunks=step.chunks, prompts=step.shared_prompts,
            micro_batch=step.micro_batch,
        )  # fmt: skip

    def drain(self) -> Batches:
        """Rows of ends that came about without a step, as some do where a request is added."""
        return self._rows.drain()

    def held_for(self, now: float) -> float:
        """Seconds until ``plan`` should be asked, because the step under way lasts, or nothing can
        run before what is put off; else 0."""
        if self._in_flight.steps or not self._waiting.num_put_off:
            return self._in_flight.held_for(now)
        return max(0.0, self._waiting.next_time - now)

    def apply(self, result: StepResult, now: float) -> Batches:
        """Take the tokens of a step; returns the rows for their owners.

        Results come in the order of their plans. Rows of sequences that have ended are dropped. A
        result of another epoch, or of a step that is not awaited, is ignored and counted.
        """
        in_flight = self._in_flight
        step = in_flight.find(result.step) if result.epoch == self.epoch else None
        if step is None:
            self.counters.ignored_results += 1
            return self._rows.drain()
        if step is not in_flight.steps[0] or not self._results.is_whole(step, result):
            return self.fail(StepFailed(self.epoch, step.number, "a result got lost"), now)
        in_flight.steps.popleft()
        in_flight.took(result.seconds, now)
        self.on_step(step, result.seconds)
        self.prefill_budget.observe(step.num_decoding, step.num_prefilled, result.seconds)
        self.counters.generated_tokens += self._results.take(step, result, now)
        if self._tier is not None:
            self._tier.after_step()
        return self._rows.drain()

    @crash_only
    def fail(self, failed: StepFailed, now: float) -> Batches:
        """A step raised: all that ran goes back to waiting, and the next plan is full (see
        ``failures.py``). What says nothing new is ignored and counted."""
        if failed.epoch == self.epoch and self._failures.step_failed(failed):
            self.counters.failed_steps += 1
        else:
            self.counters.ignored_results += 1
        return self._rows.drain()

    @crash_only
    def worker_gone(self) -> Batches:
        """Every open request waits again; what was in flight counts as a failed step, since it may
        be what ended the worker."""
        self._failures.worker_ended()
        return self._rows.drain()

    @crash_only
    def restart(
        self, epoch: int, limits: Limits | None = None, offers: Offers | None = None
    ) -> Batches:
        """A worker begins a new epoch with an empty cache, perhaps with other limits and offers.

        What is in flight is lost, as with ``worker_gone``. Requests that no longer fit fail.
        """
        self._failures.worker_ended()
        self.epoch = epoch
        self._in_flight.new_epoch()
        self.offers = offers or Offers()
        if limits is not None:
            self.limits = limits
            whole = limits.task_prompts == "whole"
            self._failures.refit(limits.max_sequence_len + whole)
        self._planner.kv.forget_all()
        self._new_planner()
        for sequence in self._requests.sequences():
            self._planner.make_holder(sequence)
        return self._rows.drain()

    def keep_blocks(self, blocks: KeptBlocks, after: int, reply_to: str) -> KVTier:
        """Keep blocks outside of KV memory, too, see ``KVTier``; ahead of the first plan."""
        own = self._waiting, self._in_flight, self.prefill_budget
        self._tier = KVTier(blocks, after, reply_to, *own)
        self._new_planner()
        return self._tier

    def follow_faults(self, on_fault: Callable[[Request, Ending], None]) -> None:
        """Tell of each sequence that ends by a fault of the server, for the log."""
        self._sequences.on_fault = on_fault

    def follow_sequences(self, *hear: Callable[[Sequence], None]) -> None:
        """Tell of each sequence that runs for the first time, has its first token, is over."""
        sequences = self._sequences
        sequences.on_started, sequences.on_first_token, sequences.on_closed = hear

    # Looking in.

    @crash_only
    def stats(self) -> SchedulerStats:
        running, blocks = len(self._planner.batch), self._planner.kv.blocks
        return snapshot(running, self._waiting, len(self._requests), blocks, self.counters)

    @crash_only
    def queue_age(self, now: float) -> float:
        """Seconds since the arrival of the oldest request that was never started; 0 when none
        waits. To be asked a few times a second: it looks at all that wait."""
        arrival = self._waiting.oldest_arrival()
        return 0.0 if arrival is None else max(0.0, now - arrival)

    @crash_only
    def usable_slots(self, now: float) -> int:
        """How many sequences can run at once now. To be asked a few times a second."""
        full_with, self._planner.full_with = self._planner.full_with, 0
        return self._usable.observe(now, full_with, self.limits.max_num_seqs)

    @property
    def open_sequences(self) -> int:
        """Sequences that run or wait: the load, as the router weighs it."""
        waiting = self._waiting
        return len(self._planner.batch) + len(waiting) + waiting.num_put_off

    @property
    def idle(self) -> bool:
        """No request is open and no plan unanswered."""
        return not len(self._requests) and not self._in_flight.steps

    @property
    def oldest_unanswered(self) -> int:
        """Number of the oldest step without an answer, or of the next one to be planned."""
        steps = self._in_flight.steps
        return steps[0].number if steps else self._in_flight.last + 1

    @property
    def awaits_results(self) -> bool:
        """Whether a plan is unanswered."""
        return bool(self._in_flight.steps)

    @crash_only
    def check(self) -> None:
        """Compare all counts, in tests and pauses: O(all that is open). Raises ``CoreFailed``."""
        check_state(self._planner, self._waiting, self._requests, self._in_flight.steps)

    # Inside.

    def _new_planner(self) -> None:
        """Plan for the limits of this epoch, with an empty cache."""
        self._planner = self._sequences.planner = Planner(
            self.limits, self._policy, self._caching, self._waiting, self.counters,
            self.prefill_budget, self._shape, self.prefixes, self._sequences.started, self._shares,
        )  # fmt: skip
        self._planner.batch.adapters = self.adapters.begin(self.offers)
        self._results.max_row_tokens = self.limits.max_row_tokens
        if self._tier is not None:
            self._tier.begin(self.epoch, self.limits, self._planner)
        if self.prefixes is not None:
            self.prefixes.begin(self._planner.kv)
