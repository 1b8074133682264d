"""The router's process."""

from __future__ import annotations

import time

from penstock import __version__
from penstock.protocol.config import Config
from penstock.protocol.process.async_service import AsyncService
from penstock.protocol.process.metrics import Registry
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.membership import (
    Beat,
    Died,
    Goodbye,
    Hello,
    MetricsAnswer,
    MetricsQuery,
    Phase,
)
from penstock.protocol.wire.messages.requests import Cancel, Enqueue, Submit
from penstock.services.router.dispatch import Dispatcher
from penstock.services.router.roster import Roster

SERVICES = ("frontend", "tokenizer", "router", "scheduler", "worker")
PHASES = (Phase.STARTING, Phase.LOADING, Phase.READY, Phase.ASLEEP, Phase.DRAINING)


class RouterService(AsyncService):
    """Members, beats, requests. It is a member of its own roster like everybody else."""

    name = "router"

    def __init__(self, config: Config) -> None:
        super().__init__(config, watch_disconnects=True)
        self.metrics = Registry()
        self.metrics.set("build_info", 1, __version__)
        mailbox = self.mailbox
        self.roster = Roster(
            mailbox.incarnation, mailbox.send, mailbox.send_last, mailbox.forget, self._note
        )
        waits = config.admission
        self.dispatcher = Dispatcher(
            *(self.roster, mailbox.send, time.monotonic(), waits.restart_wait_s, waits.wake_wait_s),
            config.cluster.max_local_prefill_length,
        )
        self.roster.held = self.dispatcher.held.counts

    def _note(self, level: str, text: str) -> None:
        getattr(self.log, level)(text)

    async def start(self) -> None:
        self.set_phase(Phase.READY)

    def handle(self, sender: int, message: Message, now: float) -> None:
        """The roster hears also those who were declared lost: it tells them so."""
        match message:
            case Beat():
                self.roster.beat(message, now)
            case Hello():
                self.roster.hello(message, now)
            case _:
                super().handle(sender, message, now)

    def on_message(self, sender: int, message: Message, now: float) -> None:
        match message:
            case Submit() | Enqueue():
                self.dispatcher.request(message, now)
            case Cancel():
                self.dispatcher.cancel(sender, message, now)
            case Goodbye():
                self.roster.goodbye(message.incarnation)
            case Died():
                self.roster.died(message.pid, message.host)
            case MetricsQuery():
                self.mailbox.send(message.reply_to, MetricsAnswer(self.roster.metrics()))
            case _:
                self.metrics.inc("dropped_messages_total", "unexpected")

    def after_messages(self, now: float) -> None:
        if self.roster.publish(now) and len(self.dispatcher.held):
            self.dispatcher.tick(now)  # what waits for an engine goes to it at once

    def _count_members(self) -> None:
        """Services and phases of which there is nobody count zero: alerts ask for them."""
        phases = self.roster.phases()
        for service in SERVICES:
            for phase in PHASES:
                self.metrics.set("processes", phases[service, phase], service, phase)
            lost = self.metrics.counter("processes_lost_total", service)
            lost.value = float(self.roster.lost_of[service])

    def on_tick(self, now: float) -> None:
        for address in self.mailbox.disconnected():
            self.roster.disconnected(address, now)
        self.roster.tick(now)
        self.dispatcher.tick(now)
        self.roster.publish(now)
        self.metrics.set("queue_depth", len(self.dispatcher.held), "router")
        self.metrics.set("queue_age_seconds", self.dispatcher.held.age(now), "router", "")
        self._count_members()
        for chosen_by, count in self.dispatcher.placement.placed_by.items():
            self.metrics.counter("requests_placed_total", chosen_by).value = float(count)
        self.report(self.metrics)


def run(config: Config) -> int:
    """Run the router until SIGTERM. Returns the exit code."""
    return RouterService(config).run()
