"""The scheduler's core: requests and results in, step plans and token batches out.

It has no clock (``now`` is passed in, monotonic seconds), no socket and no tensor.

Plan *k+1* is made before the result of step *k* is back: every running sequence is assumed to
have one token more, except one that ends by its length, which is not planned past it. When the
result shows a stop, the token that step *k+1* draws for that sequence is thrown away.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable

from penstock.protocol.logprobs import PackedLogprobs
from penstock.protocol.wire.messages.engine import StepShape
from penstock.protocol.wire.messages.requests import Rejected, TokenWork
from penstock.protocol.wire.messages.steps import (
    TOO_EARLY,
    RowFailure,
    StepFailed,
    StepPlan,
    StepResult,
)
from penstock.protocol.wire.messages.tokens import EndReason, TokenBatch
from penstock.services.scheduler.admission import (
    Unservable,
    UsableSlots,
    WaitingRoom,
    make_request,
    make_sequences,
    overloaded,
)
from penstock.services.scheduler.block_manager import OnCached, OnEvicted
from penstock.services.scheduler.cached_prefixes import CachedPrefixes
from penstock.services.scheduler.crash_only import crash_only
from penstock.services.scheduler.endings import (
    ALL_BANNED,
    LENGTH,
    MOST_PUT_OFF,
    NEVER_COMPILED,
    NOT_A_NUMBER,
    NOT_POOLED,
    Ending,
    by_output,
    fits_no_longer,
    overdue,
    put_off_seconds,
    row_failed,
    struck_out,
)
from penstock.services.scheduler.in_flight import StepsInFlight
from penstock.services.scheduler.integrity import check_state
from penstock.services.scheduler.limits import TOKEN_BYTES, Limits
from penstock.services.scheduler.outbox import Outbox
from penstock.services.scheduler.planner import Planner, Step
from penstock.services.scheduler.policy import SchedulingPolicy
from penstock.services.scheduler.prefill_pace import PrefillPace
from penstock.services.scheduler.registry import RequestRegistry
from penstock.services.scheduler.sequence import Request, Sequence
from penstock.services.scheduler.stats import Counters, SchedulerStats
from penstock.services.scheduler.waiting_queue import WaitingQueue

Batches = list[tuple[str, TokenBatch]]
"""(owner, batch): at most one batch for each owner."""

SUSPECT_STALLS = 2
MAX_STRIKES = 3
"""Failed steps without a new token in between, after which a sequence ends with an error."""


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
    ) -> None:
        """Plans that may be unanswered: ``max_in_flight``, and ``most_in_flight`` while steps are
        shorter than a round trip to the worker. ``shape``: how its device likes steps."""
        self.limits = limits
        self.epoch = epoch
        self.counters = Counters()
        self._policy = policy
        self._caching = enable_prefix_caching
        self._usable = UsableSlots()
        self._room = WaitingRoom(max_waiting_requests, max_waiting_tokens)
        self._requests = RequestRegistry()
        self._waiting = WaitingQueue(policy)
        self._shape = shape
        self._pace = PrefillPace(shape)
        self.on_fault: Callable[[Request, Ending], None] = lambda request, ending: None
        """Hears of each sequence that ends by a fault of the server, for the log."""
        self.prefixes = CachedPrefixes() if enable_prefix_caching else None
        """What the prefix cache holds, for the router."""
        self._on_cached: OnCached | None = None
        self._on_evicted: OnEvicted | None = None
        self._planner = self._new_planner()
        self._outbox = Outbox()
        self._numbers = itertools.count()
        self._in_flight = StepsInFlight(max_in_flight, most_in_flight, shape)

    # Requests.

    @crash_only
    def add(
        self, request_id: int, attempt: int, owner: str, work: TokenWork, now: float
    ) -> Rejected | None:
        """Take a request with all its choices, or say why not.

        A higher attempt replaces a lower one of the same id, silently; the same or a lower one
        changes nothing. One that an engine had taken before is exempt from the limit on waiting
        requests, and a choice that its output already ends, ends in the next batches. What was
        started again twice without a new token may be what ends engines: it runs alone.
        """
        known = self._requests.get(request_id)
        if known is not None:
            if attempt <= known.attempt:
                return None
            self._drop(known)
        try:
            request = make_request(request_id, attempt, owner, work, now, self.limits)
            sequences = make_sequences(request, work, self.limits, self._numbers)
        except Unservable as error:
            self.counters.rejected_requests += 1
            return error.rejected(request_id, attempt)
        continued = work.head.accepted or any(sequence.num_output for sequence in sequences)
        if not continued:
            waiting = self._waiting
            lack = self._room.lacks(
                waiting.num_requests,
                waiting.num_prompt_tokens,
                request.prompt_len,
                self.limits.kv_tokens,
            )
            if lack:
                self.counters.rejected_requests += 1
                return overloaded(request_id, attempt, lack)
        for sequence in sequences:
            sequence.resumed = continued
            sequence.suspect = work.stalls >= SUSPECT_STALLS
        self._register(request, sequences)
        if not continued:
            self.counters.prompt_tokens += request.prompt_len
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
            self._drop(request)
            return True
        sequence = request.open.get(choice)
        if sequence is None:
            return False
        self._close(sequence)
        return True

    @crash_only
    def cancel_owner(self, owner: str) -> int:
        """Drop all requests of an owner; returns how many there were."""
        requests = self._requests.of(owner)
        for request in requests:
            self._drop(request)
        return len(requests)

    def holder(self, request_id: int) -> tuple[int, str] | None:
        """(attempt, owner) of an open request."""
        request = self._requests.get(request_id)
        return None if request is None else (request.attempt, request.owner)

    def holding(self, owner: str) -> list[tuple[int, int]]:
        """(id, attempt) of every open request of an owner."""
        return [(request.id, request.attempt) for request in self._requests.of(owner)]

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
        self._expire(now)
        return self._outbox.drain()

    # Steps.

    def plan(self, now: float) -> StepPlan | None:
        """Plan the next step.

        ``None`` when nothing can run, as many plans are unanswered as may be, or ``held_for`` says
        that it is too early.
        """
        if self._in_flight.at_limit or self._in_flight.held_for(now):
            return None
        self._expire(now)
        self._waiting.wake(now)
        step = self._planner.plan(self._in_flight.last + 1, now)
        for sequence in self._planner.take_stuck():
            self._end(sequence, LENGTH)
        if step is None:
            return None
        self.counters.steps += 1
        gone = self._planner.batch.take_gone()
        expected = self._pace.prefill_seconds(step.num_prefilled)
        full = self._in_flight.push(step, expected, now)
        return StepPlan(
            epoch=self.epoch,
            step=step.number,
            full=full,
            gone=[] if full else gone,
            added=step.added,
            grown=step.grown,
            chunks=step.chunks,
            prompts=step.shared_prompts,
        )

    def drain(self) -> Batches:
        """Rows of ends that came about without a step, as some do where a request is added."""
        return self._outbox.drain()

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
            return self._outbox.drain()
        counts, num_tokens = result.counts, len(step.rows)
        if counts:
            num_tokens = self._num_counted(counts, num_tokens)
        if step is not in_flight.steps[0] or len(result.tokens) != TOKEN_BYTES * num_tokens:
            return self.fail(StepFailed(self.epoch, step.number, "a result got lost"), now)
        tokens = array("i", result.tokens)
        in_flight.steps.popleft()
        in_flight.took(result.seconds, now)
        self._pace.observe(step.num_decoding, step.num_prefilled, result.seconds)
        for chunk in result.prompt_logprobs:
            if (prefilled := step.prompts.get(chunk.slot)) is not None:
                prefilled.prompt_logprobs.add(chunk.start, chunk.tokens)
        for one in result.pooled:
            if one.row < len(step.rows) and (pooling := step.rows[one.row]) is not None:
                pooling.pooled = one.values
        if counts or result.logprobs or result.bad_rows or result.failures or result.banned_rows:
            generated = self._take_rows(step, result, tokens, now)
        else:
            generated = 0
            for sequence, token in zip(step.rows, tokens, strict=True):
                if sequence is not None and not sequence.finished:
                    sequence.in_flight -= 1
                    generated += self._append(sequence, token, None)
        self.counters.generated_tokens += generated
        return self._outbox.drain()

    def _take_rows(self, step: Step, result: StepResult, tokens: array[int], now: float) -> int:
        """Take a result's rows where more is to be said of them than one token each. Returns how
        many tokens belong to answers."""
        bad = frozenset(result.bad_rows)
        logprobs = {one.row: one.token for one in result.logprobs} if result.logprobs else None
        failures = {one.row: one for one in result.failures} if result.failures else None
        banned = frozenset(result.banned_rows) if result.banned_rows else None
        take: Callable[..., int] = self._extend if result.counts else self._append
        drawn = _split(tokens, result.counts) if result.counts else tokens
        generated = 0
        for row, sequence in enumerate(step.rows):
            if sequence is None or sequence.finished:
                continue
            sequence.in_flight -= 1
            if bad and row in bad:
                self._bad_row(sequence)
                continue
            if failures and row in failures:
                self._failed_row(sequence, failures[row], now)
                continue
            if banned and row in banned:
                self._end(sequence, ALL_BANNED)
                continue
            found = logprobs.get(row) if logprobs else None
            generated += take(sequence, drawn[row], found)
        return generated

    @crash_only
    def fail(self, failed: StepFailed, now: float) -> Batches:
        """A step raised: all that ran goes back to waiting, and the next plan is full.

        What the failed step and those planned with it wrote leaves the prefix cache. Sequences
        that have never produced a token, and those that failed twice without a new one, are
        suspects: they are retried alone. The third failure without a new token is an error.

        Answers come in order: where an older step is unanswered, its plan or result got lost, and
        nobody is blamed for that. A failure of a step that was answered already (its plan came
        twice, say) also means that the worker waits for a full plan. One from before the last full
        plan means nothing.
        """
        if failed.epoch == self.epoch and self._in_flight.matters(failed.step):
            self.counters.failed_steps += 1
            died = self._in_flight.find(failed.step)
            blamed = [died] if died is not None and died is self._in_flight.steps[0] else []
            self._roll_back(blamed, failed.reason)
        else:
            self.counters.ignored_results += 1
        return self._outbox.drain()

    @crash_only
    def worker_gone(self) -> Batches:
        """Every open request waits again; what was in flight counts as a failed step, since it may
        be what ended the worker."""
        self._roll_back(list(self._in_flight.steps), "the worker ended")
        return self._outbox.drain()

    @crash_only
    def restart(self, epoch: int, limits: Limits | None = None) -> Batches:
        """A worker begins a new epoch with an empty cache, perhaps with other limits.

        What is in flight is lost, as with ``worker_gone``. Requests that no longer fit end with
        an error.
        """
        self._roll_back(list(self._in_flight.steps), "the worker ended")
        self.epoch = epoch
        self._in_flight.new_epoch()
        if limits is not None:
            self.limits = limits
            for sequence in self._requests.sequences():
                self._refit(sequence)
        self._planner.kv.forget_all()
        self._planner = self._new_planner()
        for sequence in self._requests.sequences():
            self._planner.make_holder(sequence)
        return self._outbox.drain()

    # Looking in.

    def follow_cache(self, on_cached: OnCached, on_evicted: OnEvicted) -> None:
        """Tell of every block that enters the prefix cache or leaves it, from now on and over all
        epochs. Both are called in the step loop and must be quick."""
        self._on_cached, self._on_evicted = on_cached, on_evicted
        self._planner.kv.follow(on_cached, self._evicted)

    @crash_only
    def stats(self) -> SchedulerStats:
        blocks = self._planner.kv.blocks
        return SchedulerStats(
            running=len(self._planner.batch),
            waiting=len(self._waiting) + self._waiting.num_put_off,
            waiting_requests=self._waiting.num_requests,
            open_requests=len(self._requests),
            blocks_total=blocks.num_blocks,
            blocks_used=blocks.num_used,
            blocks_cached=blocks.num_cached,
            blocks_free=blocks.num_free,
            counters=self.counters,
        )

    @crash_only
    def usable_slots(self, now: float) -> int:
        """How many sequences can run at once now. To be asked a few times a second."""
        full_with, self._planner.full_with = self._planner.full_with, 0
        return self._usable.observe(now, full_with, self.limits.max_num_seqs)

    @property
    def idle(self) -> bool:
        """No request is open and no plan unanswered."""
        return not len(self._requests) and not self._in_flight.steps

    @property
    def awaits_results(self) -> bool:
        """Whether a plan is unanswered."""
        return bool(self._in_flight.steps)

    @crash_only
    def check(self) -> None:
        """Compare all counts with each other: O(blocks and all that is open). For tests, and for
        pauses. Raises ``CoreFailed``."""
        check_state(self._planner, self._waiting, self._requests, self._in_flight.steps)

    # Inside.

    def _register(self, request: Request, sequences: list[Sequence]) -> None:
        """Let sequences wait, those that their output already ends excepted. The request is open
        when the policy has said where they stand."""
        endings = [(s, ending) for s in sequences if (ending := by_output(s)) is not None]
        for sequence in sequences:
            self._planner.make_holder(sequence)
        ended = [sequence for sequence, _ in endings]
        waiting = [sequence for sequence in sequences if sequence not in ended]
        request.open = {sequence.choice: sequence for sequence in waiting}
        if self._policy.uses_prefix_cache:
            hits = self._planner.num_hits(sequences[0])
            request.num_cached = min(hits, request.prompt_len)
        if waiting:
            self._waiting.push(*waiting)
        request.open |= {sequence.choice: sequence for sequence in ended}
        self._requests.add(request)
        for sequence, ending in endings:
            self._end(sequence, ending)

    def _new_planner(self) -> Planner:
        planner = Planner(
            self.limits,
            self._policy,
            self._caching,
            self._waiting,
            self.counters,
            self._pace,
            self._shape,
            self.prefixes,
        )
        planner.kv.follow(self._on_cached, self._evicted)
        return planner

    def _evicted(self, digest: bytes) -> None:
        if self.prefixes is not None:
            self.prefixes.evicted(digest)
        if self._on_evicted is not None:
            self._on_evicted(digest)

    def _append(self, sequence: Sequence, token: int, logprobs: PackedLogprobs | None) -> bool:
        """Take one sampled token; the body of the loop over a result's rows. Returns whether it
        belongs to the answer."""
        tokens = sequence.tokens
        tokens.append(token)
        known = len(tokens)
        if not sequence.trusted:
            sequence.trust()
        if token in sequence.request.stop_ids:
            self._outbox.token(sequence, token, EndReason.STOP, token, logprobs)
            self._finish(sequence)
        elif known >= sequence.max_len:
            if known > sequence.max_len:  # only its prompt was wanted
                tokens.pop()
                self._end_of_prompt(sequence)
                return False
            self._outbox.token(sequence, token, EndReason.LENGTH, None, logprobs)
            self._finish(sequence)
        else:
            self._outbox.token(sequence, token, None, None, logprobs)
        return True

    def _num_counted(self, counts: bytes, rows: int) -> int:
        """Tokens of a result with counts; -1 for counts that its rows cannot have."""
        most = self.limits.max_row_tokens
        return sum(counts) if len(counts) == rows and 1 < most >= max(counts) else -1

    def _extend(
        self,
        sequence: Sequence,
        tokens: array[int],
        logprobs: PackedLogprobs | None,
    ) -> int:
        """``_append`` for a row of any number of tokens. The first end in their order wins; what
        comes after it is dropped. Returns how many belong to the answer."""
        if sequence.decoding:
            sequence.num_computed -= self.limits.max_row_tokens - len(tokens)
        room = sequence.max_len - len(sequence.tokens)
        if room <= 0:  # only its prompt was wanted
            self._end_of_prompt(sequence)
            return 0
        if not tokens:
            self._planner.kv.compute_again(sequence.kv)
            return 0
        kept, stop = tokens[:room], None
        for at, token in enumerate(kept):
            if token in sequence.request.stop_ids:
                kept, stop = kept[: at + 1], token
                break
        sequence.tokens.extend(kept)
        if not sequence.trusted:
            sequence.trust()
        reason = EndReason.STOP if stop is not None else None
        if reason is None and len(kept) == room:
            reason = EndReason.LENGTH
        found = logprobs.first(len(kept)) if logprobs is not None else None
        self._outbox.tokens(sequence, kept, reason, stop, found)
        if reason is not None:
            self._finish(sequence)
        return len(kept)

    def _end_of_prompt(self, sequence: Sequence) -> None:
        """All that was wanted of a sequence has been computed."""
        if sequence.request.has_task and sequence.pooled is None:
            self._end(sequence, NOT_POOLED)
            return
        self._outbox.end_of_prompt(sequence)
        self._close(sequence)

    def _finish(self, sequence: Sequence) -> None:
        self._policy.on_finished(sequence)
        self._close(sequence)

    def _bad_row(self, sequence: Sequence) -> None:
        """The logits of a row were not finite: what it computed must not be used again.

        If it began with blocks that others computed, those may be to blame, and it gets another
        chance with blocks of its own; the others find their own bad rows.
        """
        self._planner.kv.distrust(sequence.kv)
        sequence.strikes += 1
        if sequence.num_hits and sequence.strikes < MAX_STRIKES:
            sequence.trusted = False
            self._in_flight.forget(sequence)
            self._return_to_queue(sequence)
            return
        self._end(sequence, NOT_A_NUMBER)

    def _failed_row(self, sequence: Sequence, failure: RowFailure, now: float) -> None:
        """A row that has no token: it ends, or waits a moment for its grammar. Its K and V stay in
        the prefix cache, up to the token that it did not get."""
        if failure.status != TOO_EARLY:
            self._end(sequence, row_failed(failure))
        elif sequence.times_put_off >= MOST_PUT_OFF:
            self._end(sequence, NEVER_COMPILED)
        else:
            self._in_flight.forget(sequence)
            self._leave(sequence)
            self._waiting.put_off(sequence, now + put_off_seconds(sequence.times_put_off))
            sequence.times_put_off += 1
            sequence.trusted = False

    def _roll_back(self, died: list[Step], reason: str) -> None:
        """Forget all unanswered steps; ``died`` are those that may be to blame for it."""
        involved = dict.fromkeys(self._planner.batch.sequences.values())
        involved |= dict.fromkeys(s for step in self._in_flight.steps for s in step.sequences())
        blamed = dict.fromkeys(s for step in died for s in step.sequences())
        if unanswered := self._in_flight.clear():
            self._planner.kv.forget_since(unanswered[0].number)
        for sequence in involved:
            if sequence.finished:
                continue
            sequence.in_flight = 0
            if sequence in blamed:
                sequence.strikes += 1
                sequence.trusted = False
                sequence.suspect = not sequence.proven or sequence.strikes >= MAX_STRIKES - 1
            if sequence.strikes < MAX_STRIKES:
                self._return_to_queue(sequence)
            else:
                self._end(sequence, struck_out(sequence, reason))

    def _return_to_queue(self, sequence: Sequence) -> None:
        """Let a sequence wait, wherever it is, in the place that is due to it now."""
        self._leave(sequence)
        self._waiting.push(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Take a sequence from its slot or its place in the queue. It is to go on soon."""
        if sequence.running:
            self._planner.batch.release(sequence)
        self._waiting.remove(sequence)
        sequence.resumed = True

    def _refit(self, sequence: Sequence) -> None:
        """Hold an open, waiting sequence to new limits."""
        sequence.max_len = min(sequence.max_len, self.limits.max_sequence_len)
        if len(sequence.tokens) >= self.limits.max_sequence_len:
            self._end(sequence, fits_no_longer(sequence, self.limits.max_sequence_len))

    def _expire(self, now: float) -> None:
        while (request := self._requests.first_overdue(now)) is not None:
            for sequence in list(request.open.values()):
                self._end(sequence, overdue(sequence))

    def _end(self, sequence: Sequence, ending: Ending) -> None:
        """End a sequence with a row of its own."""
        if ending.is_fault:
            self.on_fault(sequence.request, ending)
        self._outbox.end(sequence, *ending)
        self._close(sequence)

    def _drop(self, request: Request) -> None:
        for sequence in list(request.open.values()):
            self._close(sequence)

    def _close(self, sequence: Sequence) -> None:
        """Take a sequence from wherever it is. Its blocks serve the next plan."""
        if sequence.running:
            self._planner.batch.release(sequence)
        self._waiting.remove(sequence)
        sequence.finished = True
        request = sequence.request
        del request.open[sequence.choice]
        if not request.open:
            self._requests.remove(request)


def _split(tokens: array[int], counts: bytes) -> list[array[int]]:
    """The tokens of each row."""
    rows: list[array[int]] = []
    start = 0
    for count in counts:
        rows.append(tokens[start : start + count])
        start += count
    return rows
