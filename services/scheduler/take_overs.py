"""An engine that goes on with what prefill engines have computed: it says what room it has, and
gives back what has waited for its turn too long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.protocol.ownership.scheduler import SchedulerLedger
from penstock.protocol.process.metrics import Registry
from penstock.protocol.wire.messages.hand_overs import DecodeRoom
from penstock.services.scheduler.core import SchedulerCore
from penstock.services.scheduler.hand_overs import MOST_HAND_OVERS
from penstock.services.scheduler.limits import Limits
from penstock.services.scheduler.stats import SchedulerStats

if TYPE_CHECKING:
    from penstock.services.scheduler.service import SchedulerService

TURN_SECONDS = 1.0
"""A request that was handed over waits for its turn no longer, if it may go on elsewhere."""
TELL_SECONDS = 1.0
"""What has not changed is told again after so long."""


class TakeOvers:
    """Of one engine that is no prefill engine."""

    def __init__(self, service: SchedulerService, core: SchedulerCore) -> None:
        self._participant, self._send = service.participant, service.mailbox.send
        self._model, self._core = service.identity().model, core
        self._told: dict[int, tuple[DecodeRoom, float]] = {}
        """What prefill engines were told, and when, by incarnation."""
        self._returned = 0

    def tick(self, ledger: SchedulerLedger, metrics: Registry, now: float) -> None:
        """A few times a second, while there is a worker."""
        found = self._participant.of("scheduler", model=self._model)
        prefill = [peer for peer in found if peer.identity.role == "prefill"]
        if not prefill:
            return
        late = self._core.not_begun(now - TURN_SECONDS, MOST_HAND_OVERS)
        if late and self._participant.of("scheduler", ready_only=True, model=self._model):
            self._returned += len(late)
            ledger.hand_over(frozenset(late), prefilled=True)
        metrics.counter("hand_overs_returned_total").value = float(self._returned)
        room, told = room_of(self._core.stats(), self._core.limits), self._told
        self._told = {
            peer.incarnation: told[peer.incarnation] for peer in prefill if peer.incarnation in told
        }
        for peer in prefill:
            last, when = self._told.get(peer.incarnation, (None, 0.0))
            is_news = last != room or now - when >= TELL_SECONDS
            if is_news and self._send(peer.address, room):
                self._told[peer.incarnation] = room, now


def room_of(stats: SchedulerStats, limits: Limits) -> DecodeRoom:
    """What an engine could take over beside what runs and waits. Each running sequence may ask for
    another block at once."""
    blocks = stats.blocks_total - stats.blocks_used - stats.running
    blocks -= limits.blocks_for(stats.waiting_tokens) + stats.waiting
    sequences = limits.max_num_seqs - stats.running - stats.waiting
    return DecodeRoom(max(0, sequences), max(0, blocks))
