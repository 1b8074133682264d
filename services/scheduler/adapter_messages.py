"""What a scheduler and others tell each other of adapters: frontends that load and unload them, and
its workers, who read them and bring them in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.protocol.process.metrics import Registry
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.administration import (
    LOAD_ADAPTER,
    UNLOAD_ADAPTER,
    AdapterPlace,
    Ask,
    Told,
)
from penstock.protocol.wire.messages.steps import AdapterBrought, AdapterLoaded, Attached
from penstock.services.scheduler.core import SchedulerCore
from penstock.services.scheduler.engine_adapters import EngineAdapters

if TYPE_CHECKING:
    from penstock.services.scheduler.service import SchedulerService


class AdapterMessages:
    """Of one engine. Those that are loaded are its ``EngineAdapters``; which of them are on the
    device its core's ``AdapterPlaces`` say."""

    def __init__(self, service: SchedulerService, ranks: int) -> None:
        self._service = service
        self._loaded = EngineAdapters(ranks, service.group.send)

    def attached(self, engine: Attached, now: float) -> frozenset[str]:
        """Workers have attached. Returns the digests of what they have loaded."""
        self._loaded.attached(engine.adapters, now)
        return self._loaded.digests

    def asked(self, asked: Ask, core: SchedulerCore | None, now: float) -> Told:
        """The answer to a frontend; empty to what it cannot be asked. core: ``None``: the engine
        cannot be asked yet, or no more."""
        answer = b""
        if core is not None and asked.what == LOAD_ADAPTER:
            place = msgspec.msgpack.decode(asked.about, type=AdapterPlace)
            answer = msgspec.msgpack.encode(self._loaded.load(place))
        elif core is not None and asked.what == UNLOAD_ADAPTER:
            answer = msgspec.msgpack.encode(self._loaded.unload(asked.about.decode(), now))
            self._offer(core, now)
        return Told(asked.number, answer)

    def handle(self, sender: int, message: Message, now: float) -> bool:
        """Take what a worker says. Returns whether it is about this."""
        core = self._service.core
        if core is None or not self._service.group.has(sender):
            return False
        if isinstance(message, AdapterLoaded):
            self._loaded.answered(sender, message, now)
            self._offer(core, now)
        elif isinstance(message, AdapterBrought):
            core.adapters.answered(sender, message, now)
        else:
            return False
        return True

    def tick(self, core: SchedulerCore, now: float, metrics: Registry) -> None:
        """Give back what nobody has any more, and report."""
        if self._loaded.sweep(core.not_done_by, now):
            self._offer(core, now)
        if not core.offers.places:
            return
        counters = core.adapters.counters
        metrics.set("adapters_loaded", len(self._loaded.digests))
        metrics.set("adapters_resident", core.adapters.num_resident)
        for name, value in (
            ("adapters_brought_total", counters.brought),
            ("adapters_evicted_total", counters.evicted),
            ("adapters_not_brought_total", counters.failed),
        ):
            metrics.counter(name).value = float(value)

    def send(self, core: SchedulerCore) -> None:
        """What workers are to bring in. What does not reach one is asked for again."""
        if core.adapters.to_workers:
            for message in core.adapters.to_workers:
                self._service.group.send(message)
            core.adapters.to_workers.clear()

    def _offer(self, core: SchedulerCore, now: float) -> None:
        """What is loaded has changed."""
        status, digests = self._service.status, self._loaded.digests
        core.offers = core.offers._replace(adapters=digests)
        core.adapters.offered(digests, now)
        status.capacity = msgspec.structs.replace(status.capacity, adapters=self._loaded.adapters)
