"""The scheduler's conversation with the keeper of its host, and with its worker about copies."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from penstock.protocol.process.metrics import Registry
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.kv_tier import (
    KVCopied,
    TierGot,
    TierKeys,
    TierLent,
    TierOpened,
)
from penstock.protocol.wire.messages.membership import Peer
from penstock.protocol.wire.messages.steps import Attached
from penstock.services.scheduler.core import SchedulerCore
from penstock.services.scheduler.kv_tier import AHEAD
from penstock.services.scheduler.tier_stores import KeptBlocks
from penstock.services.scheduler.worker_group import WorkerGroup

if TYPE_CHECKING:
    from penstock.services.scheduler.service import SchedulerService

OPEN_SECONDS = 2.0
"""A keeper that has not answered is asked again after so long."""
KEEPER_SECONDS = 5.0
"""An engine takes requests without a keeper that has not answered within this."""
_FROM_KEEPER = (TierOpened, TierKeys, TierGot, TierLent)


class Keeping:
    """Finds the keeper, passes messages on, and reports."""

    def __init__(
        self,
        service: SchedulerService,
        core: SchedulerCore,
        engine: Attached,
        group: WorkerGroup,
        now: float,
    ) -> None:
        self._mailbox, self._log = service.mailbox, service.log
        self._participant, self._group = service.participant, group
        self._host = socket.gethostname()
        self._keeper: Peer | None = None
        self._ask_at = 0.0
        self._wait_until = now + KEEPER_SECONDS
        self._refused = ""
        self._said_alone = False
        """Whether the log has it that there is no keeper."""
        is_prefill = service.config.scheduler.role == "prefill"
        after = AHEAD if is_prefill else service.config.cache.kv_tier_store_after
        self.tier = core.keep_blocks(_blocks_of(engine), after, service.mailbox.address)
        self._find(now)

    def attached(self, engine: Attached, now: float) -> None:
        """Another worker is about to begin. Blocks of other weights, another type or another layout
        have a space of their own."""
        tier = self.tier
        if (blocks := _blocks_of(engine)) == tier.blocks:
            return
        self._log.warning("the next worker finds none of the KV blocks that are kept: it differs")
        tier.change_space(blocks)
        self._keeper, self._refused = None, ""
        self._ask_at, self._wait_until = now, now + KEEPER_SECONDS
        self._find(now)

    def awaits_keeper(self, now: float) -> bool:
        """Whether the engine is about to hear what is kept: who came earlier would find nothing."""
        open_or_refused = self.tier.is_open or bool(self.tier.refused)
        return bool(self.tier.space) and not open_or_refused and now < self._wait_until

    def handle(self, sender: int, message: Message, now: float) -> bool:
        """Returns whether the message is about this."""
        if isinstance(message, _FROM_KEEPER):
            if self._keeper is not None and sender == self._keeper.incarnation:
                self.tier.take(message, now)
            return True
        if isinstance(message, KVCopied):
            if message.failure:
                self._log.warning("blocks were not copied", reason=message.failure)
            self.tier.take(message, now)
            return True
        return False

    def peers_gone(self, gone: dict[int, Peer]) -> None:
        if self._keeper is not None and self._keeper.incarnation in gone:
            self._keeper, self._refused = None, ""
            self.tier.lost_keeper()

    def send(self) -> None:
        """What there is to say; copies go ahead of the next plan."""
        tier = self.tier
        if tier.to_worker:
            for copies in tier.to_worker:
                self._group.send_first(copies)
            tier.to_worker.clear()
        if tier.to_keeper:
            for message in tier.to_keeper:
                if self._keeper is not None:
                    self._mailbox.send(self._keeper.address, message)
            tier.to_keeper.clear()

    def tick(self, now: float, metrics: Registry) -> None:
        self._find(now)
        self.tier.tick(now)
        self.send()
        counters = self.tier.counters
        for name, value in (
            ("kv_tier_query_blocks_total", counters.queried),
            ("kv_tier_hit_blocks_total", counters.hits),
            ("kv_tier_read_bytes_total", counters.hits * self.tier.slot_bytes),
            ("kv_tier_stored_bytes_total", counters.stored * self.tier.slot_bytes),
            ("kv_tier_missed_stores_total", counters.missed_stores),
            ("kv_tier_loads_total", counters.loads),
            ("kv_tier_load_seconds_total", counters.load_seconds),
            ("kv_tier_failed_loads_total", counters.failed_loads),
            ("kv_tier_slow_loads_total", counters.slow),
        ):
            metrics.counter(name).value = float(value)

    def _find(self, now: float) -> None:
        """Speak to the keeper of this host, as long as there is none that has answered."""
        if self.tier.is_open or now < self._ask_at or not self.tier.space:
            return
        if self.tier.refused:
            if self.tier.refused != self._refused:
                self._refused = self.tier.refused
                self._log.error("KV blocks are not kept", reason=self._refused)
            return
        keepers = self._participant.of("keeper")
        here = [one for one in keepers if one.identity.host == self._host]
        if here:
            self._ask_at = now + OPEN_SECONDS
            self._keeper = here[-1]
            self._mailbox.send(self._keeper.address, self.tier.opening())
        elif now >= self._wait_until and not self._said_alone:
            self._said_alone = True
            self._log.warning(
                f"no KV blocks are kept: there is no keeper on this host ({self._host}); "
                "`penstock serve` starts one, containers of one process have none"
            )


def _blocks_of(engine: Attached) -> KeptBlocks:
    return KeptBlocks(engine.kv_space, engine.kv_slot_bytes, engine.kv_piece_bytes)
