"""The side of the frontend that talks to the other processes."""

from __future__ import annotations

import asyncio
import functools
import os
import random
import secrets
import socket
import time
from collections import Counter
from collections.abc import Sequence

import msgspec

from penstock.client.admission import prompt_tokens
from penstock.client.first_row import UntilFirstRow
from penstock.client.gateway_interface import Overloaded, Readiness, ServedModel
from penstock.client.ledger import UNTAKEN_SECONDS, ClientLedger
from penstock.client.model_state import ModelState, is_up
from penstock.client.parts import Parts
from penstock.client.peer_questions import PeerQuestions
from penstock.client.pipeline_metrics import PipelineMetrics
from penstock.client.refusals import UNAVAILABLE, Shed
from penstock.client.served_engines import ServedAdapters, ServedEngines, asleep_models
from penstock.client.sink import Sink
from penstock.client.tasks import repeat_refusal, task_refusal
from penstock.protocol.config.fields import AdmissionConfig
from penstock.protocol.process.metrics import Registry
from penstock.protocol.process.participant import Participant
from penstock.protocol.process.trace import ACCEPT, TRACE
from penstock.protocol.tasks import GENERATE, OF_TOKENIZERS
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.mailbox import Mailbox
from penstock.protocol.wire.messages.administration import Told
from penstock.protocol.wire.messages.membership import (
    Identity,
    MetricsAnswer,
    MetricsQuery,
    Peer,
    Phase,
)
from penstock.protocol.wire.messages.requests import Work, prompts_of

MAX_OPEN_REQUESTS = 16_384
"""For one model; each prompt of a batch counts as one."""
SLOW_ROUTER_BYTES = 32 * 1024 * 1024
SILENT = frozenset({"launcher", "observer"})
"""Members that answer no questions which are put to all."""
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
        expected: Sequence[str] = (),
    ) -> None:
        """``expected``: models without which the server is not ready, though they never were."""
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
        self._limits = limits
        self._expected = expected
        self._any = Parts(participant, limits.restart_wait_s, time.monotonic())
        """The parts of all models together, where none is known yet."""
        self._states: dict[str, ModelState] = {}
        self._uninformed = 0
        """Requests that wait to hear what is served."""
        self._reported: set[str] = set()
        """Models whose waits are told."""
        self._models: dict[str, ServedModel] = {}
        self._adapted = ServedAdapters()
        self._engines = ServedEngines(limits.restart_wait_s)
        self._mailbox = mailbox
        self._participant = participant
        self._questions = PeerQuestions(mailbox.address, mailbox.send)
        question = MetricsQuery(mailbox.address)
        self._metrics = PipelineMetrics(
            participant, lambda: mailbox.send(participant.router_address, question)
        )
        self._uninformed_refused = 0
        """Requests that were refused while they waited so, since they were last reported."""

    # --- what the HTTP layer calls

    def open(self, work: Work, sink: Sink) -> int:
        """Send a request on its way; returns its id. While a part of the server is started again
        it waits on its way. Raises ``Overloaded`` when it cannot be sent."""
        now = time.monotonic()
        work = self._addressed(work)
        head = work.head
        if self.is_closed:
            raise self._unavailable(GOING_DOWN)
        known = self._models.get(head.model)
        # Of a model that is being unloaded only what belongs to a running request still comes.
        leaves = head.model in self._participant.withdrawn
        if not leaves and (head.task != GENERATE or (known is not None and not known.generates)):
            refused = task_refusal(head, self.models())
            if refused is not None:
                raise Overloaded(refused)
        if head.deterministic and known is not None and not leaves:
            refused = repeat_refusal(head, known)
            if refused is not None:
                raise Overloaded(refused)
        state = self._state(head.model, now)
        # While draining, open connections are still served.
        if not state.parts.look(now) and (reason := state.parts.hopeless(now, head.task)):
            raise self._unavailable(reason, state.parts.retry_after(now))
        are_open, prompts = self.ledger.open_of[state.name], prompts_of(work)
        if are_open + len(prompts) > MAX_OPEN_REQUESTS:
            raise self._unavailable(f"this frontend has {are_open} requests open; try again")
        if self._mailbox.outbox_bytes(self._participant.router_address) > SLOW_ROUTER_BYTES:
            raise self._unavailable("the router does not keep up; try again")
        if work.params.seed is None:
            params = msgspec.structs.replace(work.params, seed=secrets.randbits(63))
            work = msgspec.structs.replace(work, params=params)
        if head.task in OF_TOKENIZERS:  # it waits for no engine
            return self.ledger.submit(work, sink, now)
        # What is too long to be served at all will be told so, not that the server is full.
        tokens = sum(min(prompt_tokens(prompt), state.longest) for prompt in prompts)
        refusal = state.admission.refusal(
            are_open, head.tenant, tokens, head.time_left, now, random.random(), len(prompts)
        )
        if refusal is not None:
            again = max(refusal.retry_after or 0.0, state.parts.retry_after(now))
            raise Overloaded(msgspec.structs.replace(refusal, retry_after=again))
        began = time.monotonic_ns() if TRACE.on else 0
        waiting = UntilFirstRow(self.begun, state.admission, sink)
        request_id = waiting.request_id = self.ledger.submit(work, waiting, now)
        if request_id in self.ledger.open:  # else it was refused at once
            state.admission.entered(request_id, head.tenant, tokens, len(prompts))
        if began:
            TRACE.add(ACCEPT, began, request_id)
        return request_id

    def _addressed(self, work: Work) -> Work:
        """With the name of the model that computes it: of the first one where none is named, and of
        an adapter's own. Raises ``Overloaded`` for what an adapter does not do."""
        head = work.head
        if not head.model and (models := self.models()):
            head = msgspec.structs.replace(head, model=models[0].name)
        if (adapted := self._adapted.get(head.model)) is not None:
            if head.task != GENERATE and (refused := task_refusal(head, [adapted])) is not None:
                raise Overloaded(refused)
            adapter = adapted.adapters[0]
            head = msgspec.structs.replace(
                head,
                model=adapted.parent,
                adapter=adapter.digest,
                virtual_tokens=adapter.virtual_tokens,
            )
        return work if head is work.head else msgspec.structs.replace(work, head=head)

    async def known(self, name: str = "") -> None:
        began = time.monotonic()
        if self._unknown_parts(name, began) is None:
            return
        try:
            await self._informed(name, began)
        except Overloaded:
            self._uninformed_refused += 1
            raise

    async def _informed(self, name: str, began: float) -> None:
        if self._uninformed >= self._limits.max_waiting_requests:
            reason = f"{self._uninformed} requests are waiting already (--max-waiting-requests)"
            raise self._unavailable(self._any.explain(reason))
        self._uninformed += 1
        try:
            while (parts := self._unknown_parts(name, now := time.monotonic())) is not None:
                parts.look(now)
                reason = parts.hopeless(now)
                if not reason and parts.waited_too_long(began, now):
                    reason = parts.too_late(now)
                if reason or self.is_closed:
                    raise self._unavailable(reason or GOING_DOWN)
                await asyncio.sleep(UNINFORMED_SECONDS)
        finally:
            self._uninformed -= 1

    def _unknown_parts(self, name: str, now: float) -> Parts | None:
        """The parts of what must be heard of before ``name`` can be judged, if anything must."""
        models = self.models()
        if not name:
            return None if models else self._any
        if any(name in (model.name, *model.aliases) for model in models):
            return None
        silent = (one for one in self._participant.served if one not in self._models)
        return next((self._state(one, now).parts for one in silent), None)

    def _state(self, name: str, now: float) -> ModelState:
        state = self._states.get(name)
        if state is None:
            state = self._states[name] = ModelState(self._participant, self._limits, name, now)
        return state

    def cancel(self, request_id: int) -> None:
        request = self.ledger.open.get(request_id)
        if request is not None:
            self._states[request.model].admission.left(request_id)
            self.ledger.cancel(request_id)

    def begun(self, request_id: int, sink: Sink) -> None:
        """Nothing of it waits any more: further rows go straight to ``sink``."""
        request = self.ledger.open.get(request_id)
        if request is not None:
            request.sink = sink

    def models(self) -> list[ServedModel]:
        """What the engines serve, models first, then adapters. An engine that still loads does not
        know its limits, and no request may be judged by them: while all of a model do, what was
        last known of it."""
        return [*self._models.values(), *self._adapted.values()]

    def _look_engines(self, now: float) -> None:
        peers = self._participant.of("scheduler")
        self._engines.look(peers, now)
        there = {*self._participant.served, *(peer.identity.model for peer in peers)}
        there.difference_update(self._participant.withdrawn)
        known = asleep_models(self._participant.sleepers) | self._models | self._engines.models()
        order = {name: place for place, name in enumerate(self._expected)}
        names = sorted(there & known.keys(), key=lambda name: (order.get(name, len(order)), name))
        self._models = {name: self._resting(known[name]) for name in names}
        self._adapted.look(self._models.values())

    def _resting(self, model: ServedModel) -> ServedModel:
        """The same, with where it stands if it sleeps."""
        sleeper = self._participant.sleepers.get(model.name)
        state = sleeper.state if sleeper is not None else ""
        return model if model.sleep == state else msgspec.structs.replace(model, sleep=state)

    def ready(self, name: str = "") -> Readiness:
        now = time.monotonic()
        withdrawn = self._participant.withdrawn
        expected = [one for one in self._expected if one not in withdrawn]
        if (adapted := self._adapted.get(name)) is not None:
            name = adapted.parent
        names = [name] if name else dict.fromkeys([*expected, *self._participant.served])
        models = {one: self._state(one, now) for one in names}
        lacking = {one: state.what_lacks() for one, state in models.items()}
        if len(models) == 1:
            (parts,) = (state.parts.states() for state in models.values())
        else:
            parts = self._any.states()
        states = [*parts.values(), *lacking.values()]
        ready = all(is_up(one, alone=bool(name)) for one in states)
        ready = ready and not self.is_draining
        if self.is_draining:
            parts["frontend"] = Phase.DRAINING
        return Readiness(ready, parts, lacking)

    def draining(self) -> bool:
        return self.is_draining

    async def metrics(self) -> MetricsAnswer:
        """The router's snapshot of all processes; the last whole one while it does not answer, or
        has not heard from all of them. Raises ``TimeoutError`` where none is known."""
        return await self._metrics.newest()

    async def ask(self, service: str, what: str, about: bytes) -> list[bytes]:
        """The answers of all other processes of a service, or of all services, that have one."""
        participant = self._participant
        addresses = [
            peer.address
            for peer in participant.peers.values()
            if (peer.service == service or (not service and peer.service not in SILENT))
            and peer.address != self._mailbox.address
        ]
        if not service:
            addresses.append(participant.router_address)
        return await self._questions.ask(dict.fromkeys(addresses), what, about)

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
        self._look_models(now)
        self._end_waiting(now)
        self.ledger.tick(now)
        status, open_of = self._participant.status, self.ledger.open_of
        choices: Counter[str] = Counter()
        for request in self.ledger.open.values():
            choices[request.model] += request.open_choices
        status.load = len(self.ledger.open)
        status.demands = [
            state.look(open_of[name], choices[name], now) for name, state in self._states.items()
        ]

    def _look_models(self, now: float) -> None:
        """A state for each model that is served; none for one that is withdrawn."""
        self._any.look(now)
        self._look_engines(now)  # what is there now is remembered when it is gone
        served = self._participant.served
        for name in served:
            self._state(name, now)
        for name in list(self._states):
            if name not in served and not self.ledger.open_of[name]:
                del self._states[name]

    def _end_waiting(self, now: float) -> None:
        """End what has waited too long, or in vain, for a part of its model to come back."""
        for name, state in self._states.items():
            parts = state.parts
            if parts.look(now):
                continue
            again = parts.retry_after(now)
            if reason := parts.hopeless(now):
                self.ledger.end_waiting(name, lambda began: True, reason, again)
            else:
                is_over = functools.partial(parts.waited_too_long, now=now)
                self.ledger.end_waiting(name, is_over, parts.too_late(now), again)

    def _unavailable(self, message: str, retry_after: float = 1.0) -> Overloaded:
        return Overloaded(Shed(0, 0, 503, "overloaded_error", message, retry_after=retry_after))

    def report(self, metrics: Registry) -> None:
        """Tell how long requests would wait, and what was refused unseen or begun again."""
        metrics.inc("requests_shed_total", UNAVAILABLE, amount=self._uninformed_refused)
        self._uninformed_refused = 0
        continuations = metrics.counter("continuations_total", "frontend")
        continuations.value = float(self.ledger.continuations)
        waits = {name: state.admission.estimated_wait for name, state in self._states.items()}
        for name in self._reported - waits.keys():
            metrics.remove("estimated_wait_seconds", name)  # it is no longer served
        for name, wait in waits.items():
            metrics.set("estimated_wait_seconds", wait, name)
        self._reported = set(waits)

    def peers_gone(self, gone: dict[int, Peer], now: float) -> None:
        """The membership has changed; these have left it, if any have."""
        self._look_engines(now)
        for parts in (self._any, *(state.parts for state in self._states.values())):
            parts.lost(gone.values())
        self.ledger.peers_gone(gone, now)

    def end_all(self) -> None:
        """This process ends: whatever is open is told so, and nothing more is opened."""
        self.is_closed = True
        self.ledger.end_all(GOING_DOWN)

    def handle(self, sender: int, message: Message, now: float) -> bool:
        if isinstance(message, MetricsAnswer):
            self._metrics.arrived(message)
            return True
        if isinstance(message, Told):
            self._questions.told(message)
            return True
        return self.ledger.handle(sender, message, now)
