"""The sequences that wait for a slot, in the order in which they start."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from penstock.services.scheduler.lanes import Lanes
from penstock.services.scheduler.ordered_queue import OrderedQueue
from penstock.services.scheduler.policy import SchedulingPolicy
from penstock.services.scheduler.sequence import QueuePlace, Sequence

SUSPECT, RESUMED, NEW, PUT_OFF = 0, 1, 2, 3
"""Ranks: a step that died is cleared up first, then comes what has been running before. What is put
off does not start before its time."""
LOADING = "loading"
"""Where those are put off whose KV blocks are being loaded, …"""
ADAPTER = "adapter"
"""… and those whose adapter is in no place of the device."""
GRAMMAR = ""
"""The others."""


class WaitingQueue:
    """Ordered by rank, then by the policy's lanes and keys, then by number (arrival here)."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._ranks: list[Lanes[Sequence]] = [
            Lanes(policy.lane_key) for _ in (SUSPECT, RESUMED, NEW)
        ]
        self._put_off: OrderedQueue[Sequence] = OrderedQueue()
        self._num_put_off = {GRAMMAR: 0, LOADING: 0, ADAPTER: 0}
        self.num_requests = 0
        """Requests with a waiting sequence; of a batch each of these counts as one."""
        self.num_prompt_tokens = 0
        """Their prompts, each once."""

    def __len__(self) -> int:
        """Sequences that may start."""
        return sum(map(len, self._ranks))

    def __iter__(self) -> Iterator[Sequence]:
        """All, those that are put off last."""
        for lanes in self._ranks:
            yield from lanes
        yield from self._put_off

    @property
    def num_put_off(self) -> int:
        return len(self._put_off)

    @property
    def num_for_adapters(self) -> int:
        """How many of those wait for their adapter."""
        return self._num_put_off[ADAPTER]

    @property
    def next_time(self) -> float:
        """When the first of those that are put off may start. Raises ``IndexError`` for none."""
        return self._put_off.first_key()[0]

    def by_reason(self) -> dict[str, int]:
        """How many sequences wait, by why they do."""
        suspect, resumed, new = map(len, self._ranks)
        return {
            "new": new,
            "resumed": resumed,
            "grammar": self._num_put_off[GRAMMAR],
            "blocks": self._num_put_off[LOADING],
            "adapter": self._num_put_off[ADAPTER],
            "suspect": suspect,
        }

    def num_before(self, place: QueuePlace) -> int:
        """How many start before what waits there, see ``Lanes``; not for what is put off."""
        earlier = sum(map(len, self._ranks[: place.rank]))
        return earlier + self._ranks[place.rank].num_before(place.lane, place.key)

    def put_off(self, sequence: Sequence, until: float, lane: str = GRAMMAR) -> QueuePlace:
        """Let a sequence wait, and not start before ``until``, monotonic seconds. ``lane``: what
        for."""
        self._enter(sequence)
        self._num_put_off[lane] += 1
        place = QueuePlace(PUT_OFF, lane, (until, sequence.number))
        self._put_off.push(place.key, sequence)
        sequence.queue_place = place
        return place

    def wake(self, now: float) -> None:
        """Let those start that were put off until now."""
        while len(self._put_off) and self.next_time <= now:
            sequence = self._put_off[0]
            self.remove(sequence)
            self.push(sequence)

    @property
    def has_suspect(self) -> bool:
        return len(self._ranks[SUSPECT]) > 0

    def oldest_arrival(self) -> float | None:
        """Of all that were never started, when the first one's request arrived: also of those that
        wait for their adapter, or for KV blocks that are loaded."""
        put_off = (one for one in self._put_off if not one.resumed and not one.suspect)
        never_started = itertools.chain(self._ranks[NEW], put_off)
        return min((one.request.arrival for one in never_started), default=None)

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
        self._enter(*choices)
        for sequence, place in zip(choices, places, strict=True):
            lanes.push(lane, place.key, sequence)
            sequence.queue_place = place

    def _enter(self, *choices: Sequence) -> None:
        request = choices[0].request
        if request.num_prompts > 1:
            self.num_requests += len(choices)
            self.num_prompt_tokens += sum(sequence.prompt_len for sequence in choices)
        elif request.num_waiting == 0:
            self.num_requests += 1
            self.num_prompt_tokens += request.prompt_len
        request.num_waiting += len(choices)

    def remove(self, sequence: Sequence) -> None:
        place = sequence.queue_place
        if place is None:
            return
        if place.rank == PUT_OFF:
            self._put_off.remove(place.key)
            self._num_put_off[place.lane] -= 1
        else:
            self._ranks[place.rank].remove(place.lane, place.key)
        sequence.queue_place = None
        request = sequence.request
        request.num_waiting -= 1
        if request.num_prompts > 1 or request.num_waiting == 0:
            self.num_requests -= 1
            self.num_prompt_tokens -= sequence.prompt_len

    def check(self) -> None:
        """Raises ``RuntimeError`` when a waiting sequence holds anything."""
        requests: dict[tuple[int, int], Sequence] = {}
        for sequence in self:
            own = sequence.choice if sequence.request.num_prompts > 1 else -1
            requests[sequence.request.id, own] = sequence
            if sequence.running or sequence.kv.capacity or sequence.finished:
                raise RuntimeError("a waiting sequence runs, holds blocks or has ended")
        if len(requests) != self.num_requests:
            raise RuntimeError(f"{len(requests)} requests wait, counted {self.num_requests}")
        tokens = sum(sequence.prompt_len for sequence in requests.values())
        if tokens != self.num_prompt_tokens:
            raise RuntimeError(f"{tokens} prompt tokens wait, counted {self.num_prompt_tokens}")
