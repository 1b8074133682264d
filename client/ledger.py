"""The frontend's side: it owns a request until ``Taken``, and watches it to its end.

It can always start the request again elsewhere: it keeps the prompt, the output ids and how much
the client has seen on each channel.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

import msgspec

from penstock.client.open_request import OpenChoice, OpenRequest
from penstock.client.refusals import SHUTTING_DOWN, Shed
from penstock.client.sink import NO_EXTRAS, Sink, row_extras
from penstock.protocol.ownership.peers import Peers, Send, disown, reconcile
from penstock.protocol.ownership.rejections import too_long
from penstock.protocol.ownership.tombstones import (
    MAX_STALLS,
    RECONCILE_SECONDS,
    RESEND_SECONDS,
)
from penstock.protocol.process.spans import SPANS
from penstock.protocol.trace_context import log_fields
from penstock.protocol.wire.codec import MAX_WORK_BYTES, Message
from penstock.protocol.wire.messages.membership import Peer
from penstock.protocol.wire.messages.requests import (
    ATTEMPT_BITS,
    Accepted,
    Cancel,
    Rejected,
    Submit,
    Taken,
    Unknown,
    Work,
    first_attempt,
    submission_of,
)
from penstock.protocol.wire.messages.tokens import Continued, TextBatch

UNTAKEN_SECONDS = 30.0
"""A request that no tokenizer takes for so long ends with 503."""
QUICK_RETRIES = 4
"""A request that draining peers hand back is sent on at once so often, then once a second."""
_encode = msgspec.msgpack.Encoder().encode
_log = logging.getLogger("penstock.ownership")


class ClientLedger:
    """All requests that this frontend has open."""

    def __init__(
        self,
        address: str,
        incarnation: int,
        members: Peers,
        send: Send,
        untaken_s: float = UNTAKEN_SECONDS,
    ) -> None:
        """``untaken_s``: a request that no tokenizer takes for so long ends."""
        self.open: dict[int, OpenRequest] = {}
        self.open_of: Counter[str] = Counter()
        """How many of them are for each model; of a batch each open prompt counts as one."""
        self.stale_rows = 0
        self.continuations = 0
        self._address = address
        self._members = members
        self._send = send
        self._untaken = untaken_s
        self._next_id = (incarnation & 0x7FFF_FFFF) << 32
        self._reconcile_at = 0.0

    def submit(self, work: Work, sink: Sink, now: float) -> int:
        """Send a new request on its way. ``work.params.seed`` must be set. Returns its id.

        One that no message can carry has been rejected when this returns.
        """
        self._next_id += 1
        request = OpenRequest(self._next_id, work, sink, now)
        self.open[request.id] = request
        self.open_of[request.model] += request.weight
        self._submit(request, now)
        return request.id

    def cancel(self, request_id: int) -> None:
        """Nobody waits for it any more. Unknown ids are ignored."""
        request = self.open.get(request_id)
        if request is not None:
            self._forget(request)
            self._cancel_downstream(request)

    def end_all(self, message: str) -> None:
        """This process goes down: every open request ends with 503."""
        for request in list(self.open.values()):
            self._cancel_downstream(request)
            self._reject(request, 503, "overloaded_error", message, code=SHUTTING_DOWN)

    def end_waiting(
        self, model: str, is_over: Callable[[float], bool], message: str, retry_after: float = 1.0
    ) -> None:
        """End with 503 what no engine of the model has accepted yet and, by the time since which it
        has been open, has waited long enough for one."""
        for request in list(self.open.values()):
            if request.model == model and not request.accepted and is_over(request.began):
                self._cancel_downstream(request)
                self._reject(request, 503, "overloaded_error", message, retry_after)

    def _cancel_downstream(self, request: OpenRequest) -> None:
        peer = self._members.peers.get(request.tokenizer)
        address = peer.address if peer else self._members.router_address
        attempt = first_attempt(request.submission + 1) - 1
        self._send(address, Cancel([request.id], [attempt], [-1]))

    def _submit(self, request: OpenRequest, now: float) -> None:
        body = _encode(request.work_now(now))
        if len(body) > MAX_WORK_BYTES:
            attempt = first_attempt(request.submission)
            self._end(request, too_long(request.id, attempt, len(body), "the tokenizer"))
            return
        request.resend_at = now + RESEND_SECONDS
        request.router = self._members.router_incarnation
        self._send(
            self._members.router_address,
            Submit(
                request.id,
                first_attempt(request.submission),
                self._address,
                body,
                request.model,
                request.open_choices,
                SPANS.wanted(request.work.head.trace),
            ),
        )

    def _continue(self, request: OpenRequest, now: float, cause: str) -> None:
        """Start the request again elsewhere, after what the client has already seen."""
        self._cancel_downstream(request)
        request.stalls += 1
        if request.stalls > MAX_STALLS:
            self._reject(
                request,
                500,
                "server_error",
                f"the request was started {MAX_STALLS + 1} times without a new token "
                f"(last: {cause}); it was given up",
            )
            return
        self._count_continuation(request)
        request.submission += 1
        request.lost(now, cause)
        request.untaken_since = now
        self._submit(request, now)

    def _count_continuation(self, request: OpenRequest) -> None:
        self.continuations += 1
        request.sink.on_continued()

    def _reject(
        self,
        request: OpenRequest,
        status: int,
        kind: str,
        message: str,
        retry_after: float = 1.0,
        code: str | None = None,
    ) -> None:
        """``retry_after``: seconds, told with a 503."""
        attempt = first_attempt(request.submission)
        again = retry_after if status == 503 else None
        self._end(
            request,
            Shed(request.id, attempt, status, kind, message, retry_after=again, code=code),
        )

    def _forget(self, request: OpenRequest) -> None:
        if self.open.pop(request.id, None) is not None:
            self.open_of[request.model] -= request.weight

    def _end(self, request: OpenRequest, rejected: Rejected) -> None:
        """Forget the request and tell its sink why."""
        self._forget(request)
        try:
            request.sink.on_rejected(rejected)
        except Exception:
            _log.exception(
                "a request's sink failed on its error", extra=log_fields(request.work.head)
            )

    def _sink_failed(self, request: OpenRequest) -> None:
        """The sink of this request raised: its request ends with an error, and only that one."""
        _log.exception("a request's sink failed", extra=log_fields(request.work.head))
        self._cancel_downstream(request)
        self._reject(request, 500, "server_error", "the frontend failed on this request's answer")

    def handle(self, sender: int, message: Message, now: float) -> bool:
        """Take a message of a request; ``False`` when it is none."""
        match message:
            case TextBatch():
                self._on_rows(sender, message, now)
            case Taken():
                self._owner(sender, message.id, message.attempt)
            case Accepted():
                request = self._owner(sender, message.id, message.attempt)
                if request is not None and not request.accepted:
                    request.accepted = True
                    request.prompt, request.lengths = message.prompt, message.lengths
                    request.max_tokens = message.max_tokens
                    try:
                        request.sink.on_accepted(len(message.prompt) // 4)
                    except Exception:
                        self._sink_failed(request)
            case Rejected():
                self._on_rejected(sender, message, now)
            case Continued():
                for request_id, attempt in zip(message.ids, message.attempts, strict=True):
                    request = self._current(request_id, attempt)
                    if request is not None and request.tokenizer in (0, sender):
                        request.sink.on_continued()
            case Unknown():
                for request_id, attempt in zip(message.ids, message.attempts, strict=True):
                    request = self._current(request_id, attempt)
                    if request is not None and request.tokenizer == sender:
                        self._continue(request, now, "its tokenizer forgot it")
            case _:
                return False
        return True

    def _current(self, request_id: int, attempt: int) -> OpenRequest | None:
        request = self.open.get(request_id)
        if request is None or request.submission != submission_of(attempt):
            return None
        return request

    def _owner(self, sender: int, request_id: int, attempt: int) -> OpenRequest | None:
        """The request, if ``sender`` owns it now; else the sender is told to drop it."""
        request = self._current(request_id, attempt)
        if request is not None and request.tokenizer == 0 and sender in self._members.peers:
            request.taken_by(sender)
        if request is None or request.tokenizer != sender:
            self._disown(sender, [request_id], [attempt])
            return None
        return request

    def _disown(self, sender: int, ids: list[int], attempts: list[int]) -> None:
        self.stale_rows += len(ids)
        disown(self._members, self._send, sender, ids, attempts)

    def _on_rejected(self, sender: int, message: Rejected, now: float) -> None:
        request = self._current(message.id, message.attempt)
        if request is None or request.tokenizer not in (0, sender):
            return
        if message.retry_elsewhere:
            request.tokenizer = request.router = 0
            request.submission += 1
            if request.submission <= QUICK_RETRIES:
                self._submit(request, now)
            return
        self._end(request, message)

    def _on_rows(self, sender: int, batch: TextBatch, now: float) -> None:
        tokens, extras = batch.tokens, row_extras(batch)
        offset = 0
        stale_ids: list[int] = []
        stale_attempts: list[int] = []
        rows = zip(
            range(len(batch.ids)), batch.ids, batch.choices, batch.attempts,
            batch.indices, batch.counts, batch.texts, batch.released, strict=True,
        )  # fmt: skip
        for row, request_id, number, attempt, index, count, text, released in rows:
            first = offset
            offset += 4 * count
            request = self.open.get(request_id)
            if request is None or (
                (request.submission != attempt >> ATTEMPT_BITS or request.tokenizer != sender)
                and not self._adopt(request, sender, attempt)
            ):
                stale_ids.append(request_id)
                stale_attempts.append(attempt)
                continue
            choice = request.choices.get(number)
            if choice is None or choice.ended or index < choice.count:
                continue
            if index > choice.count or not request.accepted:
                self._continue(request, now, "a message was lost")
                continue
            choice.output += tokens[first:offset]
            choice.count = index + count
            choice.released_text = released
            if count:
                request.stalls = 0
            more = extras.get(row) if extras is not None else None
            if more is not None:
                if more.released is not None:
                    choice.released = more.released
                if more.end is not None:
                    self._end_choice(request, choice)
            if request.wants_ids and (count or choice.ended):
                more = msgspec.structs.replace(
                    more or NO_EXTRAS,
                    ids=tokens[first:offset],
                    prompt=request.prompt_of(number) if index == 0 else None,
                )
            try:
                request.sink.on_row(number, text, count, more)
            except Exception:
                self._sink_failed(request)
        if stale_ids:
            self._disown(sender, stale_ids, stale_attempts)

    def _end_choice(self, request: OpenRequest, choice: OpenChoice) -> None:
        choice.ended = True
        request.open_choices -= 1
        if request.is_batch:
            self.open_of[request.model] -= 1
            request.stalls = 0  # what it lost its processes by may be another prompt
        if request.open_choices == 0:
            self._forget(request)

    def _adopt(self, request: OpenRequest, sender: int, attempt: int) -> bool:
        """``Taken`` was lost, but the rows are of the current submission."""
        if request.tokenizer or request.submission != submission_of(attempt):
            return False
        if sender not in self._members.peers:
            return False
        request.taken_by(sender)
        return True

    def peers_gone(self, gone: dict[int, Peer], now: float) -> None:
        """Continue every request whose tokenizer is gone."""
        for request in list(self.open.values()):
            if request.tokenizer in gone and request.id in self.open:
                self._continue(request, now, "its tokenizer was lost")

    def tick(self, now: float) -> None:
        """Send again, give up, compare. Call it a few times a second."""
        for request in list(self.open.values()):
            if request.deadline is not None and now > request.deadline:
                self._cancel_downstream(request)
                left = f"{request.work.head.time_left:.3g} s"
                message = f"the request did not finish in its time: {left} were left for it"
                self._reject(request, 504, "timeout_error", message)
            elif request.tokenizer == 0:
                self._tick_untaken(request, now)
        if now >= self._reconcile_at:
            self._reconcile_at = now + RECONCILE_SECONDS
            held = ((r.tokenizer, r.id, first_attempt(r.submission)) for r in self.open.values())
            reconcile(self._members, self._send, "tokenizer", self._address, held)

    def _tick_untaken(self, request: OpenRequest, now: float) -> None:
        if now - request.untaken_since > self._untaken:
            self._cancel_downstream(request)
            self._reject(
                request,
                503,
                "overloaded_error",
                f"no tokenizer took the request within {self._untaken:.0f} s; try again",
            )
        elif now >= request.resend_at:
            if request.router not in (0, self._members.router_incarnation):
                self._count_continuation(request)
            self._submit(request, now)
