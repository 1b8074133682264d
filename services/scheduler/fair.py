"""The policy ``fair``: every tenant gets the same share of the engine while it wants it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from penstock.services.scheduler.policy import SchedulingPolicy
from penstock.services.scheduler.sequence import QueueKey, Request, Sequence

PREFILL_WEIGHT = 1.0
DECODE_WEIGHT = 2.0
"""What a token counts, as in the paper: a decoded one keeps the engine busy for longer."""
MAX_TENANTS = 65_536
"""Tenants whose service is remembered; past it, the one that came back longest ago is forgotten
and goes on as a newcomer."""


class FairByTenant(SchedulingPolicy):
    """The tenant that was served least starts its next request; within a tenant by arrival.

    This is the *virtual token counter* of Sheng et al., *Fairness in Serving Large Language
    Models* (OSDI 2024, arXiv:2401.00588), a form of start-time fair queueing (Goyal et al., 1996)
    that needs no guess about the output: each tenant has a counter of tokens computed for it, and
    the smallest counter goes first. A tenant that begins to wait is lifted to the smallest counter
    of those who wait (when nobody waits, to the one that was admitted last), so that idleness
    earns nothing. Work-conserving: a counter only orders, it never holds anyone back.

    Tokens from the prefix cache and tokens computed anew after a preemption cost a tenant nothing.
    """

    name = "fair"

    def __init__(
        self, prefill_weight: float = PREFILL_WEIGHT, decode_weight: float = DECODE_WEIGHT
    ) -> None:
        if not (prefill_weight > 0 and decode_weight > 0):
            raise ValueError(
                f"the weights must be above 0, got {prefill_weight} and {decode_weight}"
            )
        self._prefill_weight = prefill_weight
        self._decode_weight = decode_weight
        self._served: dict[str, float] = {}
        """Weighted tokens by tenant; the one whose lane opened longest ago first."""
        self._level = 0.0
        """Largest counter at which a tenant was given a prefill."""
        self._decoding: list[Sequence] = []
        self._charges: list[tuple[str, float]] = []
        """What a step with the rows of ``_decoding`` costs each tenant."""

    def key(self, request: Request) -> QueueKey:
        return (request.arrival,)

    def lane(self, request: Request) -> str:
        return request.head.tenant

    def lane_key(self, lane: str) -> float:
        return self._served.get(lane, self._level)

    def on_lane_opened(self, lane: str, floor: float | None) -> None:
        level = self._level if floor is None else floor
        self._served[lane] = max(self._served.pop(lane, level), level)
        if len(self._served) > MAX_TENANTS:
            del self._served[next(iter(self._served))]

    def on_prefill(self, sequence: Sequence, count: int) -> None:
        tenant = sequence.request.head.tenant
        served = self.lane_key(tenant)
        self._level = max(self._level, served)
        self._served[tenant] = served + self._prefill_weight * count

    def on_decode(self, decoding: list[Sequence]) -> None:
        if decoding is not self._decoding:
            rows = Counter([sequence.request.head.tenant for sequence in decoding])
            self._decoding = decoding
            self._charges = [(tenant, self._decode_weight * n) for tenant, n in rows.items()]
        for tenant, cost in self._charges:
            self._served[tenant] = self.lane_key(tenant) + cost

    def victim(self, running: Iterable[Sequence]) -> Sequence:
        """The latest arrival of the tenant that was served most."""
        return max(running, key=self._served_and_late)

    def _served_and_late(self, sequence: Sequence) -> tuple[float, float, int]:
        request = sequence.request
        return (self.lane_key(request.head.tenant), request.arrival, sequence.number)
