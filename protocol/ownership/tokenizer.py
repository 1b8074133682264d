"""The tokenizer's side: it owns a submission from ``Taken`` on.

It turns the request into tokens (the service does, in threads), sends it to an engine, turns the
engine's tokens into text, finds stop strings, and starts the request again on another engine when
its engine is lost or a message is missing.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable

from penstock.protocol.ownership.guard import NO_EXTRAS, MakeGuard, TokenExtras
from penstock.protocol.ownership.owned_request import (
    HANDED_OVER,
    MakeStream,
    OwnedRequest,
    RowFate,
    read_work,
)
from penstock.protocol.ownership.peers import Peers, Send, disown, incarnation_at, reconcile
from penstock.protocol.ownership.rejections import failed, given_up, going_down, too_long
from penstock.protocol.ownership.text_rows import TextRows, token_extras, whole_answer
from penstock.protocol.ownership.tombstones import (
    GRACE_SECONDS,
    MAX_RESTARTS,
    RECONCILE_SECONDS,
    Tombstones,
)
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.trace_context import log_fields
from penstock.protocol.wire.codec import MAX_WORK_BYTES, Message
from penstock.protocol.wire.messages.membership import Peer
from penstock.protocol.wire.messages.requests import (
    Accepted,
    Cancel,
    Holding,
    Rejected,
    Submit,
    Taken,
    TokenWork,
    Unknown,
    Work,
    submission_of,
)
from penstock.protocol.wire.messages.tokens import Continued, Event, TokenBatch

_log = logging.getLogger("penstock.ownership")


class TokenizerLedger:
    """All submissions that this tokenizer owns.

    ``begin(id, attempt, work)`` must lead to one call of ``encoded``, ``answered`` or ``refuse``.
    """

    def __init__(
        self, address: str, members: Peers, send: Send, begin: Callable[[int, int, Work], None]
    ) -> None:
        self.open: dict[int, OwnedRequest] = {}
        self.stale_rows = 0
        self.continuations = self.redraws = 0
        self.draining = False
        self.on_taken_over: Callable[[float], None] = lambda seconds: None
        """Hears how long each hand-over to another engine took."""
        self._address = address
        self._members = members
        self._send = send
        self._begin = begin
        self._tombstones = Tombstones()
        self._reconcile_at = 0.0

    def handle(self, sender: int, message: Message, now: float) -> bool:
        """Take a message of a request; ``False`` when it is none."""
        match message:
            case TokenBatch():
                self._on_tokens(sender, message, now)
            case Submit():
                self._on_submit(message, now)
            case Accepted():
                self._on_accepted(sender, message)
            case Rejected():
                self._on_rejected(sender, message, now)
            case Cancel():
                self._on_cancel(message, now)
            case Holding():
                self._on_holding(message, now)
            case Unknown():
                self._on_unknown(sender, message, now)
            case Continued():
                for request_id, attempt in zip(message.ids, message.attempts, strict=True):
                    request = self.open.get(request_id)
                    if request and request.attempt == attempt and request.engine == sender:
                        self._count_continuation(request)
            case _:
                return False
        return True

    # --- from the frontend

    def _on_submit(self, submit: Submit, now: float) -> None:
        known = self.open.get(submit.id)
        if known is not None:
            if submission_of(known.attempt) > submission_of(submit.attempt):
                return
            if submission_of(known.attempt) == submission_of(submit.attempt):
                if known.reply_to == submit.reply_to:
                    self._send(submit.reply_to, Taken(submit.id, submit.attempt))
                    if known.accepted:
                        self._tell_accepted(known)
                return
            self._drop(known)
        if self._tombstones.covers(submit.id, submit.attempt):
            return
        if self.draining:
            self._send(submit.reply_to, going_down(submit.id, submit.attempt, "this process"))
            return
        work = read_work(submit)
        if isinstance(work, Rejected):
            self._send(submit.reply_to, work)
            return
        request = self.open[submit.id] = OwnedRequest(submit, work.head, now)
        self._find_frontend(request, now)
        self._send(submit.reply_to, Taken(submit.id, submit.attempt))
        self._begin(submit.id, submit.attempt, work)

    def encoded(
        self,
        request_id: int,
        attempt: int,
        work: TokenWork,
        params: SamplingParams,
        make_stream: MakeStream,
        now: float,
        make_guard: MakeGuard | None = None,
    ) -> None:
        """The service turned the request into tokens; send it to an engine.

        params: resolved. make_stream, make_guard: make what each choice has of these.
        """
        request = self.open.get(request_id)
        if request is None or request.attempt != attempt or request.work is not None:
            return
        try:
            request.encoded(work, params, make_stream, make_guard)
        except Exception:
            self._give_up(request)
            return
        self._enqueue(request, now)

    def answered(self, request_id: int, attempt: int, prompt: bytes, event: Event) -> None:
        """The service did what was asked for: the request ends, and no engine hears of it.

        prompt: int32 ids. What of the answer is lost is asked for again: nothing is kept of it.
        """
        request = self.open.get(request_id)
        if request is None or request.attempt != attempt:
            return
        del self.open[request_id]
        self._send(request.reply_to, Accepted(request_id, attempt, prompt))
        self._send(request.reply_to, whole_answer(request_id, attempt, event))

    def refuse(self, request_id: int, attempt: int, rejected: Rejected) -> None:
        """The service cannot turn the request into tokens: it ends."""
        request = self.open.get(request_id)
        if request is not None and request.attempt == attempt:
            self._reject(request, rejected)

    def _on_cancel(self, message: Cancel, now: float) -> None:
        for request_id, attempt, number in zip(
            message.ids, message.attempts, message.choices, strict=True
        ):
            request = self.open.get(request_id)
            if request is None:
                self._tombstones.bury(request_id, attempt, now)
            elif submission_of(attempt) >= submission_of(request.attempt):
                if number >= 0:
                    self._end_choice(request, number)
                else:
                    self._tombstones.bury(request_id, attempt, now)
                    self._drop(request)

    def _on_holding(self, message: Holding, now: float) -> None:
        """A frontend names what it holds here: tell it what is unknown, drop what it left out."""
        named = dict(zip(message.ids, message.attempts, strict=True))
        for request in list(self.open.values()):
            if request.reply_to != message.reply_to or now - request.began < GRACE_SECONDS:
                continue
            if submission_of(named.get(request.id, 0)) != submission_of(request.attempt):
                self._drop(request)
        unknown = {one: attempt for one, attempt in named.items() if one not in self.open}
        if unknown:
            self._send(message.reply_to, Unknown([*unknown], [*unknown.values()]))

    # --- to and from the engine

    def _on_unknown(self, sender: int, message: Unknown, now: float) -> None:
        failures = message.failures or [1] * len(message.ids)
        cause = "its engine lost its worker" if message.failures else "its engine forgot it"
        cause = HANDED_OVER if message.prefilled else cause
        for request_id, attempt, count in zip(message.ids, message.attempts, failures, strict=True):
            request = self.open.get(request_id)
            if request and request.attempt == attempt and request.engine == sender:
                self._continue(request, now, cause, count)

    def _enqueue(self, request: OwnedRequest, now: float, engine: str = "") -> None:
        if request.work is not None:
            request.router = self._members.router_incarnation
            message = request.enqueue(request.work, self._address, now)
            if (size := len(message.work)) > MAX_WORK_BYTES:
                self._reject(request, too_long(request.id, request.attempt, size, "an engine"))
                return
            self._send(engine or self._members.router_address, message)

    def _continue(self, request: OwnedRequest, now: float, cause: str, failures: int = 1) -> None:
        """Enqueue again, after the tokens that are already here.

        ``failures``: starts that it failed with since its last token; 0: it is not to blame.
        """
        self._cancel_at_engine(request)
        request.stalls += failures
        if (rejected := request.spent(cause)) is not None:
            self._reject(request, rejected)
            return
        if cause is not HANDED_OVER:
            self._count_continuation(request)
        request.lost(now, cause)
        self._enqueue(request, now)

    def _count_continuation(self, request: OwnedRequest) -> None:
        self.continuations += 1
        self._send(request.reply_to, Continued([request.id], [request.attempt]))

    def _redraw(self, request: OwnedRequest, now: float) -> None:
        """Enqueue again, after the tokens that stand, at the engine that has them cached."""
        if self.open.get(request.id) is not request:
            return
        peer = self._members.peers.get(request.engine)
        request.engine, self.redraws = 0, self.redraws + 1
        request.attempt += 1
        self._enqueue(request, now, peer.address if peer else "")

    def _on_accepted(self, sender: int, message: Accepted) -> None:
        request = self.open.get(message.id)
        if request is None or request.attempt != message.attempt:
            self._disown(sender, [message.id], [message.attempt])
            return
        if not self._owns(request, sender):
            self._disown(sender, [message.id], [message.attempt])
            return
        if not request.accepted and request.taken(message.max_tokens):
            self._tell_accepted(request)

    def _tell_accepted(self, request: OwnedRequest) -> None:
        if (work := request.work) is not None:
            told = request.id, request.attempt, work.prompt, work.max_tokens, work.lengths
            self._send(request.reply_to, Accepted(*told))

    def _on_rejected(self, sender: int, message: Rejected, now: float) -> None:
        request = self.open.get(message.id)
        if request is None or request.attempt != message.attempt:
            return
        if request.engine not in (0, sender):
            return
        if message.retry_elsewhere:
            again = request.refusals.next_try(now, started=request.was_accepted)
            if again is not None and request.restarts < MAX_RESTARTS:
                request.put_off(again)
                return
            message = given_up(message, request.refusals, now)
        self._reject(request, message)

    def _disown(self, sender: int, ids: list[int], attempts: list[int]) -> None:
        self.stale_rows += len(ids)
        disown(self._members, self._send, sender, ids, attempts)

    def _on_tokens(self, sender: int, batch: TokenBatch, now: float) -> None:
        tokens = memoryview(batch.tokens).cast("i")
        extras = token_extras(batch)
        offset = 0
        outgoing: defaultdict[str, TextRows] = defaultdict(TextRows)
        again: dict[int, OwnedRequest] = {}
        stale: list[tuple[int, int]] = []
        rows = zip(
            batch.ids, batch.choices, batch.attempts, batch.indices, batch.counts, strict=True
        )
        for row, (request_id, number, attempt, index, count) in enumerate(rows):
            first = offset
            offset += count
            request = self.open.get(request_id)
            if request is None or request.attempt != attempt or not self._owns(request, sender):
                stale.append((request_id, attempt))
                continue
            choice = request.choices.get(number)
            if choice is None or choice.ended or index < choice.received:
                continue
            if index > choice.received:
                self._continue(request, now, "a message was lost")
                continue
            out = outgoing[request.reply_to]
            more = NO_EXTRAS if extras is None else extras.get(row, NO_EXTRAS)
            if more.start is not None or not request.accepted:
                more = self._begun(request, more, now)
            try:
                fate = request.add_row(out, number, choice, tokens[first:offset], more)
                if fate is RowFate.AGAIN:
                    again[request_id] = request
                elif fate is not RowFate.GOES_ON:
                    self._settle(request, number, fate)
            except Exception:
                self._give_up(request)
        for address, out in outgoing.items():
            self._send(address, out.batch())
        for request in again.values():
            self._redraw(request, now)
        if stale:
            self._disown(sender, [i for i, _ in stale], [a for _, a in stale])

    def _owns(self, request: OwnedRequest, sender: int) -> bool:
        """Whether ``sender`` runs the request."""
        if request.engine == 0 and sender in self._members.peers:
            request.run_by(sender)
            request.refusals.clear()
        return request.engine == sender

    def _begun(self, request: OwnedRequest, more: TokenExtras, now: float) -> TokenExtras:
        """A row has come: an engine has the request. What was lost with the row begins anew."""
        if request.taken(more.start.max_tokens if more.start is not None else 0):
            self._tell_accepted(request)
        return request.taken_over(more, now, self.on_taken_over)

    def _settle(self, request: OwnedRequest, number: int, fate: RowFate) -> None:
        """A choice has ended."""
        if fate is RowFate.CUT:
            self._cancel_at_engine(request, number)
        request.open_choices -= 1
        if request.open_choices == 0:
            del self.open[request.id]

    # --- endings

    def _reject(self, request: OwnedRequest, rejected: Rejected) -> None:
        """It ends; no engine works on it any more."""
        del self.open[request.id]
        self._send(request.reply_to, rejected)

    def _end_choice(self, request: OwnedRequest, number: int) -> None:
        choice = request.choices.get(number)
        if choice is not None and not choice.ended:
            choice.ended = True
            self._settle(request, number, RowFate.CUT)

    def _give_up(self, request: OwnedRequest) -> None:
        """Its tokens cannot be turned into text: it ends, and the others' rows go out."""
        _log.exception("a request's tokens make no text", extra=log_fields(request.head))
        if request.id in self.open:
            self._drop(request)
        reason = "the output could not be turned into text"
        self._send(request.reply_to, failed(request.id, request.attempt, reason))

    def _drop(self, request: OwnedRequest) -> None:
        del self.open[request.id]
        self._cancel_at_engine(request)

    def _cancel_at_engine(self, request: OwnedRequest, number: int = -1) -> None:
        if request.work is None:
            return
        peer = self._members.peers.get(request.engine)
        address = peer.address if peer else self._members.router_address
        self._send(address, Cancel([request.id], [request.attempt], [number]))

    def peers_gone(self, gone: dict[int, Peer], now: float) -> None:
        """A lost frontend's requests end; a lost engine's go on elsewhere."""
        addresses = {peer.address for peer in gone.values() if peer.service == "frontend"}
        for request in list(self.open.values()):
            if request.frontend in gone or request.reply_to in addresses:
                self._drop(request)
            elif request.engine in gone:
                self._continue(request, now, "its engine was lost")

    def tick(self, now: float) -> None:
        """Send again, forget, compare. Call it a few times a second."""
        for request in list(self.open.values()):
            if request.frontend == 0 and not self._find_frontend(request, now):
                self._drop(request)
            elif request.work is not None and request.engine == 0 and now >= request.resend_at:
                if request.router not in (0, self._members.router_incarnation):
                    self._count_continuation(request)
                self._enqueue(request, now)
        self._tombstones.expire(now)
        if now >= self._reconcile_at:
            self._reconcile_at = now + RECONCILE_SECONDS
            held = ((r.engine, r.id, r.attempt) for r in self.open.values())
            reconcile(self._members, self._send, "scheduler", self._address, held)

    def _find_frontend(self, request: OwnedRequest, now: float) -> bool:
        """Name the frontend as soon as the membership does; ``False`` when it never came."""
        request.frontend = incarnation_at(self._members, request.reply_to)
        return bool(request.frontend) or now - request.began < GRACE_SECONDS
