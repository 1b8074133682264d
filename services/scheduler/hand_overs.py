"""Requests that a prefill engine hands over to engines that decode.

What its steps compute goes to the keeper at once. A sequence decodes here, as anywhere else, until
the keeper has told everybody that its blocks are there, and an engine has room for it; then its
owner sends it on with the tokens so far. Where there is no keeper, no room there or nobody to take
it, it stays until there is. What came back is handed over again, ``MOST_HAND_OVERS`` times in all:
it may be what ends engines that decode.
"""

from __future__ import annotations

import socket
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.protocol.ownership.scheduler import SchedulerLedger
from penstock.protocol.process.metrics import Registry
from penstock.protocol.process.participant import Ended
from penstock.protocol.wire.messages.hand_overs import DecodeRoom
from penstock.protocol.wire.messages.membership import Peer
from penstock.protocol.wire.messages.steps import Attached
from penstock.services.scheduler.kv_tier import KVTier
from penstock.services.scheduler.prefill_budget import PrefillBudget
from penstock.services.scheduler.sequence import Request, Sequence

if TYPE_CHECKING:
    from penstock.services.scheduler.service import SchedulerService

LEAST_LEFT = 4
"""What may have no more tokens than so many ends sooner where it is."""
MOST_HAND_OVERS = 3
"""A request that was handed over so often stays with whoever has it."""
CLAIM_SECONDS = 0.5
"""So long after a request was handed over, what its engine says of its room may be older."""


@dataclass(slots=True, eq=False)
class _Computed:
    """A request whose every choice has a token."""

    request: Request
    at_hand: dict[Sequence, int] = field(default_factory=dict)
    """How many of the first blocks of each choice others can load, when it was last looked at."""


@dataclass(slots=True)
class _Claim:
    """What was handed over lately will take of the room of an engine."""

    until: float
    """Monotonic seconds."""
    taker: int
    """Its incarnation: where the request is likely to go."""
    need: DecodeRoom


class HandOvers:
    """Of one prefill engine."""

    def __init__(self, service: SchedulerService, tier: KVTier, budget: PrefillBudget) -> None:
        self._participant, self._config = service.participant, service.config
        self._own = service.identity()
        self._host = socket.gethostname()
        self._tier, self._budget = tier, budget
        self._computed: dict[int, _Computed] = {}
        """By the number of the request."""
        self._rooms: dict[int, DecodeRoom] = {}
        """What other engines said, by incarnation."""
        self._claims: deque[_Claim] = deque()
        """Oldest first."""
        self._count = self._blocks = 0

    def had_first_token(self, sequence: Sequence) -> None:
        """A sequence has its first token here."""
        request = sequence.request
        if request.has_task or request.reads_logits:  # what reads logits is computed anew elsewhere
            return
        if request.head.hand_overs >= MOST_HAND_OVERS:
            return
        if all(one.proven for one in request.open.values()):
            self._computed[request.id] = _Computed(request)

    def told(self, sender: int, room: DecodeRoom) -> None:
        """Another engine says what it could take over."""
        self._rooms[sender] = room

    def send(self, ledger: SchedulerLedger, now: float) -> None:
        """Give back what others should go on with now."""
        if self._computed and (numbers := self._take(now)):
            ledger.hand_over(numbers, prefilled=True)

    def _take(self, now: float) -> frozenset[int]:
        for number, one in list(self._computed.items()):
            if not one.request.open:
                del self._computed[number]
        if not self._computed or not self._tier.is_open or not (takers := self._takers()):
            return frozenset()
        rooms = self._rooms_now(takers, now)
        found = []
        for number, one in self._computed.items():
            need = _need(one.request, self._tier.block_size)
            suits = [p for p in takers if _can_take(p, one.request) and _holds(rooms, p, need)]
            if not suits or not self._is_ready(one):
                continue
            # The router chooses the one that is the emptiest by its slots.
            taker = max(suits, key=lambda peer: rooms[peer.incarnation].sequences).incarnation
            self._claims.append(_Claim(now + CLAIM_SECONDS, taker, need))
            rooms[taker] = _less(rooms[taker], need)
            found.append(number)
        for number in found:
            one = self._computed.pop(number)
            self._count += 1
            self._blocks += len(
                {name for each, count in one.at_hand.items() for name in each.kv.digests[:count]}
            )
        return frozenset(found)

    def _rooms_now(self, takers: list[Peer], now: float) -> dict[int, DecodeRoom]:
        """What each can take over, by incarnation. Who has not said so yet is taken for empty."""
        while self._claims and self._claims[0].until <= now:
            self._claims.popleft()
        rooms = {
            peer.incarnation: self._rooms.get(peer.incarnation)
            or DecodeRoom(peer.capacity.max_num_seqs, peer.capacity.num_blocks)
            for peer in takers
        }
        for claim in self._claims:
            if (room := rooms.get(claim.taker)) is not None:
                rooms[claim.taker] = _less(room, claim.need)
        return rooms

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
            if not tier.keeps(names[:at]):  # it has waited for so long that some are gone
                one.at_hand[sequence] = 0
                return False
        return True

    def _takers(self) -> list[Peer]:
        """Other engines that are ready, decode and share the keeper. While there are any, no step
        is shortened for what decodes here."""
        engine, host = self._own.engine, self._host
        found = [
            peer
            for peer in self._participant.of("scheduler", ready_only=True, model=self._own.model)
            if (other := peer.identity).role != "prefill"
            and other.host == host
            and other.engine != engine
        ]
        self._budget.is_unbounded = bool(found)
        return found

    def tick(self, metrics: Registry) -> None:
        """A few times a second."""
        self._takers()
        if gone := self._rooms.keys() - self._participant.peers.keys():
            for incarnation in gone:
                del self._rooms[incarnation]
        metrics.counter("hand_overs_total").value = float(self._count)
        metrics.counter("hand_over_bytes_total").value = float(self._blocks * self._tier.slot_bytes)


def _need(request: Request, block_size: int) -> DecodeRoom:
    """What a request takes of an engine that goes on with it, its prompt once."""
    sequences = request.open.values()
    blocks = max(one.prompt_len for one in sequences) // block_size
    for one in sequences:
        blocks += 1 + len(one.tokens) // block_size - one.prompt_len // block_size
    return DecodeRoom(len(sequences), blocks)


def _holds(rooms: dict[int, DecodeRoom], peer: Peer, need: DecodeRoom) -> bool:
    room = rooms[peer.incarnation]
    return room.sequences >= need.sequences and room.blocks >= need.blocks


def _less(room: DecodeRoom, need: DecodeRoom) -> DecodeRoom:
    return DecodeRoom(room.sequences - need.sequences, room.blocks - need.blocks)


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
    if role != "both" and not engine.kv_space:
        raise Ended(
            f"--role {role} does not go with an engine whose worker keeps no KV blocks: start that "
            "one with the same --kv-tier flags"
        )
