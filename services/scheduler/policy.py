"""Scheduling policies: which waiting request starts next, and who gives way for want of memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Protocol

from penstock.services.scheduler.sequence import QueueKey, Request, Sequence


class SchedulingPolicy(Protocol):
    """An order over waiting requests and a choice of victims.

    Derive from this class and write ``key``; all else has a default. A policy sees the whole
    request (arrival, priority, tenant, lengths) and has no clock: the order between two waiting
    requests must not depend on how late it is. Whoever wants ageing puts the arrival into the
    key, see ``ShortestJobFirst``.

    All methods are called in the scheduler's loop, between two steps of the engine, so each must
    be quick; what they raise ends the scheduler's process.
    """

    name: str
    uses_prefix_cache: bool = False
    """Whether ``key`` reads ``Request.num_cached``, which is 0 otherwise: to find it out, prompts
    are hashed when they come, not when they start."""

    @abstractmethod
    def key(self, request: Request) -> QueueKey:
        """The request with the smallest key starts first; of equal keys the one that came first.

        Asked when a sequence begins to wait; finite numbers, as many for every request.
        """

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        """The running sequence to preempt: here the one that would start last.

        ``running`` is in order of admission, not empty.
        """
        return max(running, key=lambda sequence: (*self.key(sequence.request), sequence.number))

    def lane(self, request: Request) -> str:
        """The lane that a request waits in; always the same for one request.

        Keys order the requests of one lane; lanes are compared by ``lane_key`` each time there is
        room in the batch. So a lane may fall back while its requests wait. Here there is one.
        """
        return ""

    def lane_key(self, lane: str) -> float:
        """The lane with the smallest goes first; of equal ones the one whose first request has
        the smaller key. It may only grow while requests wait in the lane."""
        return 0.0

    def on_lane_opened(self, lane: str, floor: float | None) -> None:
        """A first new request is about to wait in a lane where none waits.

        ``floor`` is the smallest ``lane_key`` of the lanes where new requests wait; ``None``:
        there are none.
        """
        return

    def on_prefill(self, sequence: Sequence, count: int) -> None:
        """``count`` known tokens of a sequence were planned that it had not computed before.

        Called while a step is planned, so it counts before the next sequence is chosen. What is
        computed anew after a preemption or a failure is left out.
        """
        return

    def on_decode(self, decoding: list[Sequence]) -> None:
        """A step was planned in which each of these computes one token.

        Once a step, not once a token. As long as the rows stay the same so does the list.
        """
        return

    def on_finished(self, sequence: Sequence) -> None:
        """A sequence found its stop token or its limit; its output is complete. Not called
        where none was to be generated."""
        return


class FirstComeFirstServed(SchedulingPolicy):
    """In order of the client's arrival; the latest arrival gives way."""

    name = "fcfs"

    def key(self, request: Request) -> QueueKey:
        return (request.arrival,)


class Priority(SchedulingPolicy):
    """Lower ``priority`` first, then by arrival; the latest of the least urgent gives way.

    Whoever is less urgent waits as long as more urgent requests do.
    """

    name = "priority"

    def key(self, request: Request) -> QueueKey:
        return (request.head.priority, request.arrival)
