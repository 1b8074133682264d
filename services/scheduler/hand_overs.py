"""Requests that a prefill engine hands over to engines that decode.

What its steps compute goes to the keeper at once. A sequence decodes here, as anywhere else, until
the keeper has told everybody that its blocks are there; then its owner sends it on with the tokens
so far. Where there is no keeper, no room there or nobody to take it, it stays.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.protocol.ownership.scheduler import SchedulerLedger
from penstock.protocol.process.metrics import Registry
from penstock.protocol.process.participant import Ended
from penstock.protocol.wire.messages.membership import Peer
from penstock.protocol.wire.messages.steps import Attached
from penstock.services.scheduler.kv_tier import KVTier
from penstock.services.scheduler.sequence import Request, Sequence

if TYPE_CHECKING:
    from penstock.services.scheduler.service import SchedulerService

LEAST_LEFT = 4
"""What may have no more tokens than so many ends sooner where it is."""


@dataclass(slots=True, eq=False)
class _Computed:
    """A request whose every choice has a token."""

    request: Request
    at_hand: dict[Sequence, int] = field(default_factory=dict)
    """How many of the first blocks of each choice others can load, when it was last looked at."""


class HandOvers:
    """Of one prefill engine."""

    def __init__(self, service: SchedulerService, tier: KVTier) -> None:
        self._participant, self._config = service.participant, service.config
        self._own = service.identity()
        self._host = socket.gethostname()
        self._tier = tier
        self._computed: dict[int, _Computed] = {}
        """By the number of the request."""
        self._count = self._blocks = 0

    def had_first_token(self, sequence: Sequence) -> None:
        """A sequence has its first token here."""
        request = sequence.request
        if request.has_task or request.reads_logits:  # what reads logits is computed anew elsewhere
            return
        if request.head.prefilled:  # it came back: it may be what ends engines that decode
            return
        if all(one.proven for one in request.open.values()):
            self._computed[request.id] = _Computed(request)

    def send(self, ledger: SchedulerLedger) -> None:
        """Give back what others should go on with now."""
        if self._computed and (numbers := self._take()):
            ledger.hand_over(numbers, prefilled=True)

    def _take(self) -> frozenset[int]:
        for number, one in list(self._computed.items()):
            if not one.request.open:
                del self._computed[number]
        if not self._computed or not self._tier.is_open or not (takers := self._takers()):
            return frozenset()
        found = [
            number
            for number, one in self._computed.items()
            if self._is_ready(one) and any(_can_take(peer, one.request) for peer in takers)
        ]
        for number in found:
            one = self._computed.pop(number)
            self._count += 1
            self._blocks += len(
                {name for each, count in one.at_hand.items() for name in each.kv.digests[:count]}
            )
        return frozenset(found)

    def _is_ready(self, one: _Computed) -> bool:
        """Whether another engine would find nearly all of it."""
        tier, size = self._tier, self._tier.block_size
        most = max(self._config.cluster.max_local_prefill_length, 2 * size)
        if all(each.max_len - len(each.tokens) <= LEAST_LEFT for each in one.request.open.values()):
            return False
        for sequence in one.request.open.values():
            names, at = sequence.kv.digests, one.at_hand.get(sequence, 0)
            while at < len(names) and tier.is_at_hand(names[at]):
                at += 1
            one.at_hand[sequence] = at
            if at < len(names) and tier.is_due(names[at]):
                return False
            if len(sequence.tokens) // size * size - at * size > most:
                return False
        return True

    def _takers(self) -> list[Peer]:
        """Other engines that are ready, decode and share the keeper."""
        engine, host = self._own.engine, self._host
        return [
            peer
            for peer in self._participant.of("scheduler", ready_only=True, model=self._own.model)
            if (other := peer.identity).role != "prefill"
            and other.host == host
            and other.engine != engine
        ]

    def report(self, metrics: Registry) -> None:
        """A few times a second."""
        metrics.counter("hand_overs_total").value = float(self._count)
        metrics.counter("hand_over_bytes_total").value = float(self._blocks * self._tier.slot_bytes)


def _can_take(peer: Peer, request: Request) -> bool:
    """Whether an engine can go on with a request, as the router sees it: what it refuses comes
    back."""
    capacity, head = peer.capacity, request.head
    if capacity.max_model_len < max(one.max_len for one in request.open.values()):
        return False
    if head.deterministic and not capacity.repeats:
        return False
    return not head.adapter or any(one.digest == head.adapter for one in capacity.adapters)


def check_role(role: str, engine: Attached) -> None:
    """Raises ``Ended`` where an engine of this kind can have no role of its own."""
    reason = ""
    if not engine.kv_space:
        reason = "whose worker keeps no KV blocks: start that one with the same --kv-tier flags"
    elif engine.kv_piece_bytes:
        reason = "whose worker has a GPU: roles are for engines on CPUs"
    if role != "both" and reason:
        raise Ended(f"--role {role} does not go with an engine {reason}")
