"""Open requests and their sequences: where they wait, and how they end."""

from __future__ import annotations

from collections.abc import Callable

from penstock.services.scheduler.endings import Ending, by_output, overdue
from penstock.services.scheduler.planner import Planner
from penstock.services.scheduler.policy import SchedulingPolicy
from penstock.services.scheduler.registry import RequestRegistry
from penstock.services.scheduler.sequence import Request, Sequence
from penstock.services.scheduler.token_rows import TokenRows
from penstock.services.scheduler.waiting_queue import WaitingQueue


class OpenSequences:
    """Takes sequences from one place to the next: the queue, a slot, their end."""

    planner: Planner
    """The planner of this epoch; the core sets it."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self.policy = policy
        self.requests = RequestRegistry()
        self.waiting = WaitingQueue(policy)
        self.rows = TokenRows()
        self.on_fault: Callable[[Request, Ending], None] = lambda request, ending: None
        """Hears of each sequence that ends by a fault of the server, for the log."""
        self.on_started: Callable[[Sequence], None] = lambda sequence: None
        """Hears of each sequence that runs for the first time, …"""
        self.on_first_token: Callable[[Sequence], None] = lambda sequence: None
        """… of each that has its first token here, …"""
        self.on_closed: Callable[[Sequence], None] = lambda sequence: None
        """… and of each that is over, whatever ended it."""

    def register(self, request: Request, sequences: list[Sequence]) -> None:
        """Let sequences wait, those that their output already ends excepted. The request is open
        when the policy has said where they stand."""
        endings = [(s, ending) for s in sequences if (ending := by_output(s)) is not None]
        for sequence in sequences:
            self.planner.make_holder(sequence)
        ended = [sequence for sequence, _ in endings]
        waiting = [sequence for sequence in sequences if sequence not in ended]
        request.open = {sequence.choice: sequence for sequence in waiting}
        if self.policy.uses_prefix_cache:
            asked = sequences if request.num_prompts > 1 else sequences[:1]
            hits = (min(self.planner.num_hits(one), one.prompt_len) for one in asked)
            request.num_cached = sum(hits)
        if waiting:
            self.waiting.push(*waiting)
        request.open |= {sequence.choice: sequence for sequence in ended}
        self.requests.add(request)
        for sequence, ending in endings:
            self.end(sequence, ending)

    def started(self, sequence: Sequence) -> None:
        """A sequence runs for the first time."""
        self.on_started(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence from its slot or its place in the queue. It is to go on soon."""
        if sequence.running:
            self.planner.batch.release(sequence)
        self.waiting.remove(sequence)
        sequence.resumed = True
        sequence.request.retained = False  # what its step would have computed is found no more

    def return_to_queue(self, sequence: Sequence) -> None:
        """Let a sequence wait, wherever it is, in the place that is due to it now."""
        self.leave(sequence)
        self.waiting.push(sequence)

    def expire(self, now: float) -> None:
        """End what has passed its deadline."""
        while (request := self.requests.first_overdue(now)) is not None:
            for sequence in list(request.open.values()):
                self.end(sequence, overdue(sequence))

    def finish(self, sequence: Sequence) -> None:
        """Its output is complete, and its last row is on the way."""
        self.policy.on_finished(sequence)
        self.close(sequence)

    def end(self, sequence: Sequence, ending: Ending) -> None:
        """End a sequence with a row of its own."""
        if ending.is_fault:
            self.on_fault(sequence.request, ending)
        self.rows.end(sequence, *ending)
        self.close(sequence)

    def drop(self, request: Request) -> None:
        """Close all sequences of a request."""
        for sequence in list(request.open.values()):
            self.close(sequence)

    def close(self, sequence: Sequence) -> None:
        """Take a sequence from wherever it is. Its blocks serve the next plan."""
        if sequence.running:
            self.planner.batch.release(sequence)
        self.waiting.remove(sequence)
        sequence.finished = True
        self.on_closed(sequence)
        request = sequence.request
        del request.open[sequence.choice]
        if request.release:
            self._let_go(sequence)
        if not request.open:
            self.requests.remove(request)

    def _let_go(self, sequence: Sequence) -> None:
        """Its part of the cache is not wanted again; the prompt is when no other choice has it."""
        request = sequence.request
        begin = sequence.prompt_len if request.open else 0
        self.planner.kv.let_go(sequence.kv, begin, shared=not request.head.cache_salt)
