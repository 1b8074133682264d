"""The side of the frontend that talks to the other processes."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time

import msgspec

from penstock.protocol.codec import Message
from penstock.protocol.mailbox import Mailbox
from penstock.protocol.messages.membership import (
    Identity,
    MetricsAnswer,
    MetricsQuery,
    Peer,
    Phase,
)
from penstock.protocol.messages.requests import Rejected, Work
from penstock.protocol.ownership.frontend import FrontendLedger, Sink
from penstock.protocol.participant import Participant
from penstock.protocol.trace import ACCEPT, TRACE
from penstock.services.frontend.interface import Overloaded, Readiness, ServedModel

MAX_OPEN_REQUESTS = 16_384
METRICS_SECONDS = 1.0
SLOW_ROUTER_BYTES = 32 * 1024 * 1024


class PipelineGateway:
    """Opens requests in the pipeline and hands their events to sinks."""

    def __init__(self, mailbox: Mailbox, participant: Participant) -> None:
        self.ledger = FrontendLedger(
            mailbox.address, mailbox.incarnation, participant, mailbox.send
        )
        self.is_draining = False
        self._mailbox = mailbox
        self._participant = participant
        self._metrics_waiters: list[asyncio.Future[MetricsAnswer]] = []
        self._last_metrics = MetricsAnswer([])

    # --- what the HTTP layer calls

    def open(self, work: Work, sink: Sink) -> int:
        """Send a request on its way; returns its id. Raises ``Overloaded`` when it cannot be."""
        state = self._parts()  # while draining, open connections are still served
        if any(phase != Phase.READY for phase in state.values()):
            parts = ", ".join(f"{name}: {text}" for name, text in state.items())
            raise Overloaded(_unavailable(f"the server is not ready ({parts}); try again"))
        if len(self.ledger.open) >= MAX_OPEN_REQUESTS:
            raise Overloaded(
                _unavailable(f"this frontend has {MAX_OPEN_REQUESTS} requests open; try again")
            )
        if self._mailbox.outbox_bytes(self._participant.router_address) > SLOW_ROUTER_BYTES:
            raise Overloaded(_unavailable("the router does not keep up; try again"))
        if work.params.seed is None:
            params = msgspec.structs.replace(work.params, seed=secrets.randbits(63))
            work = msgspec.structs.replace(work, params=params)
        began = time.monotonic_ns() if TRACE.on else 0
        request_id = self.ledger.submit(work, sink, time.monotonic())
        if began:
            TRACE.add(ACCEPT, began, request_id)
        return request_id

    def cancel(self, request_id: int) -> None:
        self.ledger.cancel(request_id)

    def models(self) -> list[ServedModel]:
        found: dict[str, ServedModel] = {}
        for peer in self._participant.of("scheduler"):
            identity, capacity = peer.identity, peer.capacity
            if identity.model and identity.model not in found:
                found[identity.model] = ServedModel(
                    identity.model, identity.aliases, capacity.max_model_len, capacity.vocab_size
                )
        return list(found.values())

    def ready(self) -> Readiness:
        """Ready when a router, a tokenizer and an engine are, and this process stays."""
        parts = self._parts()
        ready = all(phase == Phase.READY for phase in parts.values()) and not self.is_draining
        if self.is_draining:
            parts["frontend"] = Phase.DRAINING
        return Readiness(ready, parts)

    def _parts(self) -> dict[str, str]:
        parts = {
            "router": _state(self._participant.of("router")),
            "tokenizer": _state(self._participant.of("tokenizer")),
            "engine": _state(self._participant.of("scheduler")),
        }
        if not self._participant.of("router") and self._participant.joined:
            parts["router"] = Phase.READY  # lost for the moment; requests wait for the next one
        return parts

    def draining(self) -> bool:
        return self.is_draining

    async def metrics(self) -> MetricsAnswer:
        """The router's snapshot of all processes; the last known one when it does not answer."""
        waiter: asyncio.Future[MetricsAnswer] = asyncio.get_running_loop().create_future()
        self._metrics_waiters.append(waiter)
        self._mailbox.send(self._participant.router_address, MetricsQuery(self._mailbox.address))
        try:
            return await asyncio.wait_for(waiter, METRICS_SECONDS)
        except TimeoutError:
            return self._last_metrics
        finally:
            if waiter in self._metrics_waiters:  # nobody answered, or the asker has left
                self._metrics_waiters.remove(waiter)

    def members(self) -> list[Peer]:
        """The living processes, this one among them."""
        participant, status = self._participant, self._participant.status
        own = Peer(
            participant.service,
            self._mailbox.address,
            participant.incarnation,
            Identity(os.getpid(), socket.gethostname()),
            status.phase,
            status.note,
            status.capacity,
            status.load,
        )
        return [own, *participant.peers.values()]

    # --- what the process calls

    def handle(self, sender: int, message: Message, now: float) -> bool:
        if isinstance(message, MetricsAnswer):
            self._last_metrics = message
            waiters, self._metrics_waiters = self._metrics_waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(message)
            return True
        return self.ledger.handle(sender, message, now)


def _state(peers: list[Peer]) -> str:
    """``ready`` when one is; else what the first one is doing."""
    if not peers:
        return "absent"
    if any(peer.phase == Phase.READY for peer in peers):
        return Phase.READY
    return f"{peers[0].phase} {peers[0].note}".strip()


def _unavailable(message: str) -> Rejected:
    return Rejected(0, 0, 503, "overloaded_error", message, retry_after=1.0)
