"""Failures: of steps, of rows, of workers.

A failed step rolls back: all that ran goes back to waiting, and what the step and those planned
behind it wrote leaves the prefix cache. Sequences in it get a *strike*. Those that have never
produced a token, and those that failed twice without a new one, are *suspects* and run alone. The
third strike without a new token ends a sequence with an error, so that a poisonous one takes
nobody along.

Of several ranks one may have missed older steps, too, which rank 0 has answered. So there a failed
step empties the prefix cache. What can be found was then written since the last full plan, and a
rank that has missed a plan since executes nothing before the next full one.
"""

from __future__ import annotations

from penstock.protocol.wire.messages.steps import TOO_EARLY, RowFailure, StepFailed
from penstock.services.scheduler.endings import (
    MOST_PUT_OFF,
    NEVER_COMPILED,
    NOT_A_NUMBER,
    outgrown,
    put_off_seconds,
    row_failed,
    struck_out,
)
from penstock.services.scheduler.in_flight import StepsInFlight
from penstock.services.scheduler.open_sequences import OpenSequences
from penstock.services.scheduler.planned_step import Step
from penstock.services.scheduler.sequence import Sequence

SUSPECT_STALLS = 2
MAX_STRIKES = 3
"""Failed steps without a new token in between, after which a sequence ends with an error."""


class FailureHandler:
    """Decides who is blamed, who is retried, and who ends."""

    def __init__(
        self, sequences: OpenSequences, in_flight: StepsInFlight, several_ranks: bool
    ) -> None:
        self._sequences = sequences
        self._in_flight = in_flight
        self._several_ranks = several_ranks

    # Steps and workers.

    def step_failed(self, failed: StepFailed) -> bool:
        """A step of this epoch raised. Returns whether that says something new.

        Answers come in order: where an older step is unanswered, its plan or result got lost, and
        nobody is blamed for that, nor where a rank says that it missed a plan. A failure of a step
        that was answered already (its plan came twice, say) also means that the worker waits for a
        full plan. One from before the last full plan means nothing, nor does a second one before
        the next.
        """
        in_flight = self._in_flight
        if not in_flight.matters(failed.step):
            return False
        died = in_flight.find(failed.step)
        to_blame = died is not None and died is in_flight.steps[0] and not failed.missed
        self._roll_back([died] if died is not None and to_blame else [], failed.reason)
        return True

    def worker_ended(self) -> None:
        """What was in flight may be what ended the worker."""
        if (tier := self._sequences.planner.tier) is not None:
            tier.lost_worker()
        self._roll_back(list(self._in_flight.steps), "the worker ended")

    def refit(self, max_sequence_len: int) -> None:
        """The next worker holds so many tokens of a sequence; all of them wait. Those that no
        longer fit end with an error."""
        for sequence in self._sequences.requests.sequences():
            sequence.max_len = min(sequence.wanted_len, max_sequence_len)
            if len(sequence.tokens) >= max_sequence_len:
                self._sequences.end(sequence, outgrown(sequence))

    def _roll_back(self, died: list[Step], reason: str) -> None:
        """Forget all unanswered steps; ``died`` are those that may be to blame for it."""
        sequences, planner = self._sequences, self._sequences.planner
        involved = dict.fromkeys(planner.batch.sequences.values())
        involved |= dict.fromkeys(s for step in self._in_flight.steps for s in step.sequences())
        blamed = dict.fromkeys(s for step in died for s in step.sequences())
        if unanswered := self._in_flight.clear():
            planner.kv.forget_since(unanswered[0].number)
        for sequence in involved:
            if sequence.finished:
                continue
            sequence.in_flight = 0
            if sequence in blamed:
                sequence.strikes += 1
                sequence.trusted = False
                sequence.suspect = not sequence.proven or sequence.strikes >= MAX_STRIKES - 1
            if sequence.strikes < MAX_STRIKES:
                sequences.return_to_queue(sequence)
            else:
                sequences.end(sequence, struck_out(sequence, reason))
        if self._several_ranks:  # last: who leaves a slot has its blocks named
            planner.kv.forget_all()

    # Rows.

    def bad_row(self, sequence: Sequence) -> None:
        """The logits of a row were not finite: what it computed must not be used again.

        If it began with blocks that others computed, those may be to blame, and it gets another
        chance with blocks of its own; the others find their own bad rows.
        """
        planner = self._sequences.planner
        planner.kv.distrust(sequence.kv)
        if planner.tier is not None:
            planner.tier.distrust(sequence.kv.digests)
        sequence.strikes += 1
        if sequence.num_hits and sequence.strikes < MAX_STRIKES:
            sequence.trusted = False
            self._in_flight.forget(sequence)
            self._sequences.return_to_queue(sequence)
            return
        self._sequences.end(sequence, NOT_A_NUMBER)

    def failed_row(self, sequence: Sequence, failure: RowFailure, now: float) -> None:
        """A row that has no token: it ends, or waits a moment for its grammar. Its K and V stay in
        the prefix cache, up to the token that it did not get."""
        sequences = self._sequences
        if failure.status != TOO_EARLY:
            sequences.end(sequence, row_failed(failure))
        elif sequence.times_put_off >= MOST_PUT_OFF:
            sequences.end(sequence, NEVER_COMPILED)
        else:
            self._in_flight.forget(sequence)
            sequences.leave(sequence)
            sequences.waiting.put_off(sequence, now + put_off_seconds(sequence.times_put_off))
            sequence.times_put_off += 1
            sequence.trusted = False
