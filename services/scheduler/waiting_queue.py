"""The sequences that wait for a slot, in the order in which they start."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.services.scheduler.lanes import Lanes
from penstock.services.scheduler.policy import SchedulingPolicy
from penstock.services.scheduler.sequence import QueuePlace, Sequence

SUSPECT, RESUMED, NEW = 0, 1, 2
"""Ranks: a step that died is cleared up first, then comes what has been running before."""


class WaitingQueue:
    """Ordered by rank, then by the policy's lanes and keys, then by number (arrival here)."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._ranks: list[Lanes[Sequence]] = [
            Lanes(policy.lane_key) for _ in (SUSPECT, RESUMED, NEW)
        ]
        self.num_requests = 0
        """Requests with a waiting sequence."""
        self.num_prompt_tokens = 0
        """Their prompts, each once."""

    def __len__(self) -> int:
        return sum(map(len, self._ranks))

    def __iter__(self) -> Iterator[Sequence]:
        for lanes in self._ranks:
            yield from lanes

    @property
    def has_suspect(self) -> bool:
        return len(self._ranks[SUSPECT]) > 0

    def first(self) -> Sequence:
        """The sequence that starts next. Raises ``IndexError`` when nothing waits."""
        for lanes in self._ranks:
            if len(lanes):
                return lanes.first()
        raise IndexError("nothing waits")

    def push(self, *choices: Sequence) -> None:
        """Sequences of one request that begin to wait. All that the policy is asked comes first."""
        first = choices[0]
        request = first.request
        rank = SUSPECT if first.suspect else RESUMED if first.resumed else NEW
        lanes = self._ranks[rank]
        lane = self._policy.lane(request)
        if rank == NEW and lane not in lanes:
            self._policy.on_lane_opened(lane, lanes.floor())
        key = self._policy.key(request)
        places = [QueuePlace(rank, lane, (*key, sequence.number)) for sequence in choices]
        if request.num_waiting == 0:
            self.num_requests += 1
            self.num_prompt_tokens += request.prompt_len
        request.num_waiting += len(choices)
        for sequence, place in zip(choices, places, strict=True):
            lanes.push(lane, place.key, sequence)
            sequence.queue_place = place

    def remove(self, sequence: Sequence) -> None:
        place = sequence.queue_place
        if place is None:
            return
        self._ranks[place.rank].remove(place.lane, place.key)
        sequence.queue_place = None
        request = sequence.request
        request.num_waiting -= 1
        if request.num_waiting == 0:
            self.num_requests -= 1
            self.num_prompt_tokens -= request.prompt_len

    def check(self) -> None:
        """Raises ``RuntimeError`` when a waiting sequence holds anything."""
        requests = {}
        for sequence in self:
            requests[sequence.request.id] = sequence
            if sequence.running or sequence.blocks or sequence.finished:
                raise RuntimeError("a waiting sequence runs, holds blocks or has ended")
        if len(requests) != self.num_requests:
            raise RuntimeError(f"{len(requests)} requests wait, counted {self.num_requests}")
        tokens = sum(sequence.request.prompt_len for sequence in requests.values())
        if tokens != self.num_prompt_tokens:
            raise RuntimeError(f"{tokens} prompt tokens wait, counted {self.num_prompt_tokens}")
