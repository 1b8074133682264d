"""The side of the frontend that talks to the other processes."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import socket
import time

import msgspec

from penstock.client.admission import AdmissionController, PipelineLoad, prompt_tokens
from penstock.client.interface import Overloaded, Readiness, ServedModel
from penstock.client.ledger import UNTAKEN_SECONDS, ClientLedger
from penstock.client.parts import Parts
from penstock.client.sink import RowExtras, Sink
from penstock.client.tasks import task_refusal
from penstock.protocol.config.fields import AdmissionConfig
from penstock.protocol.process.participant import Participant
from penstock.protocol.process.trace import ACCEPT, TRACE
from penstock.protocol.tasks import GENERATE
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.mailbox import Mailbox
from penstock.protocol.wire.messages.membership import (
    Identity,
    MetricsAnswer,
    MetricsQuery,
    Peer,
    Phase,
)
from penstock.protocol.wire.messages.requests import Rejected, Work

MAX_OPEN_REQUESTS = 16_384
METRICS_SECONDS = 1.0
SLOW_ROUTER_BYTES = 32 * 1024 * 1024
UNINFORMED_SECONDS = 0.1
"""A request that waits to hear what is served looks again so often."""
GOING_DOWN = "the server is shutting down; try again"


class PipelineGateway:
    """Opens requests in the pipeline and hands their events to sinks."""

    def __init__(
        self,
        mailbox: Mailbox,
        participant: Participant,
        limits: AdmissionConfig = AdmissionConfig(),  # noqa: B008 - it is frozen
    ) -> None:
        self.ledger = ClientLedger(
            mailbox.address,
            mailbox.incarnation,
            participant,
            mailbox.send,
            max(UNTAKEN_SECONDS, limits.restart_wait_s),
        )
        self.is_draining = False
        self.is_closed = False
        """This process ends now; nothing is opened any more."""
        self.admission = AdmissionController(limits)
        self.parts = Parts(participant, limits.restart_wait_s, time.monotonic())
        self._limits = limits
        self._uninformed = 0
        """Requests that wait to hear what is served."""
        self._models: list[ServedModel] = []
        self._longest = 2**31
        """Tokens of the longest prompt that an engine takes."""
        self._mailbox = mailbox
        self._participant = participant
        self._metrics_waiters: list[asyncio.Future[MetricsAnswer]] = []
        self._last_metrics = MetricsAnswer([])

    # --- what the HTTP layer calls

    def open(self, work: Work, sink: Sink) -> int:
        """Send a request on its way; returns its id. While a part of the server is started again
        it waits on its way. Raises ``Overloaded`` when it cannot be sent."""
        now, head = time.monotonic(), work.head
        if self.is_closed:
            raise Overloaded(_unavailable(GOING_DOWN))
        if head.task != GENERATE and (refused := task_refusal(head, self.models())) is not None:
            raise Overloaded(refused)
        # While draining, open connections are still served.
        if not self.parts.look(now) and (reason := self.parts.hopeless(now)):
            raise Overloaded(_unavailable(reason))
        if len(self.ledger.open) >= MAX_OPEN_REQUESTS:
            raise Overloaded(
                _unavailable(f"this frontend has {MAX_OPEN_REQUESTS} requests open; try again")
            )
        if self._mailbox.outbox_bytes(self._participant.router_address) > SLOW_ROUTER_BYTES:
            raise Overloaded(_unavailable("the router does not keep up; try again"))
        # What is too long to be served at all will be told so, not that the server is full.
        tokens = min(prompt_tokens(work.prompt), self._longest)
        refusal = self.admission.refusal(
            len(self.ledger.open), head.tenant, tokens, head.time_left, now, random.random()
        )
        if refusal is not None:
            raise Overloaded(refusal)
        if work.params.seed is None:
            params = msgspec.structs.replace(work.params, seed=secrets.randbits(63))
            work = msgspec.structs.replace(work, params=params)
        began = time.monotonic_ns() if TRACE.on else 0
        waiting = _UntilFirstRow(self, sink)
        request_id = waiting.request_id = self.ledger.submit(work, waiting, now)
        if request_id in self.ledger.open:  # else it was refused at once
            self.admission.entered(request_id, head.tenant, tokens)
        if began:
            TRACE.add(ACCEPT, began, request_id)
        return request_id

    async def known(self) -> None:
        began = time.monotonic()
        if self.models():
            return
        if self._uninformed >= self._limits.max_waiting_requests:
            reason = f"{self._uninformed} requests are waiting already (--max-waiting-requests)"
            raise Overloaded(_unavailable(self.parts.explain(reason)))
        self._uninformed += 1
        try:
            while not self.models():
                now = time.monotonic()
                self.parts.look(now)
                reason = self.parts.hopeless(now)
                if not reason and self.parts.waited_too_long(began, now):
                    reason = self.parts.too_late()
                if reason or self.is_closed:
                    raise Overloaded(_unavailable(reason or GOING_DOWN))
                await asyncio.sleep(UNINFORMED_SECONDS)
        finally:
            self._uninformed -= 1

    def cancel(self, request_id: int) -> None:
        self.admission.left(request_id)
        self.ledger.cancel(request_id)

    def begun(self, request_id: int, sink: Sink) -> None:
        """The first row is here: the others go straight to ``sink``."""
        self.admission.started(request_id)
        request = self.ledger.open.get(request_id)
        if request is not None:
            request.sink = sink

    def models(self) -> list[ServedModel]:
        """What the engines serve. An engine that still loads does not know its limits, and no
        request may be judged by them: while all do, the models last known."""
        found: dict[str, ServedModel] = {}
        for peer in self._participant.of("scheduler"):
            identity, capacity = peer.identity, peer.capacity
            if identity.model and capacity.max_model_len and identity.model not in found:
                found[identity.model] = ServedModel(
                    identity.model,
                    identity.aliases,
                    capacity.max_model_len,
                    capacity.vocab_size,
                    capacity.tasks,
                )
        self._models = list(found.values()) or self._models
        return self._models

    def ready(self) -> Readiness:
        """Ready when a router, a tokenizer and an engine are, and this process stays."""
        parts = self.parts.states()
        ready = all(phase == Phase.READY for phase in parts.values()) and not self.is_draining
        if self.is_draining:
            parts["frontend"] = Phase.DRAINING
        return Readiness(ready, parts)

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

    def tick(self, now: float) -> None:
        """Resend and compare; tell the admission controller what the membership says, and the
        others what is open here. Call it a few times a second."""
        self._end_waiting(now)
        self.ledger.tick(now)
        participant, requests = self._participant, self.ledger.open
        engines = participant.of("scheduler", ready_only=True)
        choices = sum(request.open_choices for request in requests.values())
        longest = max((peer.capacity.max_model_len for peer in engines), default=0)
        self._longest = longest or self._longest
        slots = participant.others.slots or sum(peer.capacity.max_num_seqs for peer in engines)
        load = PipelineLoad(
            slots=slots * len(requests) / choices if choices else float(slots),
            kv_tokens=sum(p.capacity.num_blocks * p.capacity.block_size for p in engines),
            frontends=1 + len(participant.of("frontend")),
            others=participant.others,
        )
        self.admission.look(load, len(requests), now)
        participant.status.load = len(requests)
        participant.status.demand = self.admission.demand(len(requests))

    def _end_waiting(self, now: float) -> None:
        """End what has waited too long, or in vain, for a part of the server to come back."""
        if self.parts.look(now):
            return
        if reason := self.parts.hopeless(now):
            self.ledger.end_waiting(lambda began: True, reason)
        else:
            parts = self.parts
            self.ledger.end_waiting(
                lambda began: parts.waited_too_long(began, now), parts.too_late()
            )

    def peers_gone(self, gone: dict[int, Peer], now: float) -> None:
        self.parts.lost(gone.values())
        self.ledger.peers_gone(gone, now)

    def end_all(self) -> None:
        """This process ends: whatever is open is told so, and nothing more is opened."""
        self.is_closed = True
        self.ledger.end_all(GOING_DOWN)

    def handle(self, sender: int, message: Message, now: float) -> bool:
        if isinstance(message, MetricsAnswer):
            self._last_metrics = message
            waiters, self._metrics_waiters = self._metrics_waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(message)
            return True
        return self.ledger.handle(sender, message, now)


class _UntilFirstRow:
    """The sink of a request without its first token: the admission controller hears what comes."""

    __slots__ = ("_gateway", "_sink", "request_id")

    def __init__(self, gateway: PipelineGateway, sink: Sink) -> None:
        self.request_id = 0
        self._gateway = gateway
        self._sink = sink

    def on_accepted(self, prompt_tokens: int) -> None:
        self._gateway.admission.counted(self.request_id, prompt_tokens)
        self._sink.on_accepted(prompt_tokens)

    def on_row(self, choice: int, text: str, tokens: int, extras: RowExtras | None = None) -> None:
        self._gateway.begun(self.request_id, self._sink)
        self._sink.on_row(choice, text, tokens, extras)

    def on_rejected(self, rejected: Rejected) -> None:
        self._gateway.admission.left(self.request_id)
        self._sink.on_rejected(rejected)


def _unavailable(message: str) -> Rejected:
    return Rejected(0, 0, 503, "overloaded_error", message, retry_after=1.0)
