"""One request of a client with a prompt, whatever API it came by, from its arrival to its end.

It may be several gateway requests, one for each prompt, or for the tasks that a folder decides on
one for each batch. All are accepted or the client gets an error; the first error ends all of them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from penstock.client.answers import Answer, AnswerSink, RequestProgress
from penstock.client.batches import BATCH_INPUTS, batch_end
from penstock.client.gateway_interface import Gateway, Overloaded
from penstock.client.meters import Meters
from penstock.client.request_terms import Caller
from penstock.protocol.process.spans import SPANS, OpenSpan
from penstock.protocol.tasks import OF_FOLDERS
from penstock.protocol.trace_context import exemplar_id
from penstock.protocol.wire.messages.requests import Rejected
from penstock.protocol.wire.messages.tokens import End
from penstock.services.frontend.errors import ApiError, bad_request, from_rejected, status_error
from penstock.services.frontend.keys.gate import Gate
from penstock.services.frontend.keys.known_key import KnownKey
from penstock.services.frontend.keys.limits import Admission
from penstock.services.frontend.keys.standing import LimitReached, Standing
from penstock.services.frontend.parse import GenerateRequest
from penstock.services.frontend.request_span import begin_span, end_span

LONGEST_PAUSE_SECONDS = 1.0
"""Until a request with a window asks again for room for its next prompt."""
STANDSTILL_SECONDS = 30.0
"""A request with a window ends when it has been asking for room for so long while nothing of it
was on its way."""
OPEN_AT_ONCE = 32
"""Prompts of a request with a window from which on the next ones wait for another turn of the event
loop."""


class _PromptSink(AnswerSink):
    """Of some of the prompts, which are one gateway request; what is wrong with one of them is told
    with its place."""

    __slots__ = ("_accepted", "_at", "_finds_no_room")

    def __init__(
        self, generation: Generation, answers: Sequence[Answer], prompts: range, *, wants_ids: bool
    ) -> None:
        super().__init__(generation, answers, wants_ids=wants_ids, prompts=len(prompts))
        self._at = partial(generation.request.at, prompts.start)
        self._finds_no_room = partial(generation.finds_no_room, prompts)
        self._accepted = False

    def on_accepted(self, prompt_tokens: int) -> None:
        self._accepted = True
        super().on_accepted(prompt_tokens)

    def on_rejected(self, rejected: Rejected) -> None:
        if self._accepted or not self._finds_no_room(rejected):
            super().on_rejected(self._at(rejected))


class Generation(RequestProgress):
    """What the sinks of a client's request share with who answers it.

    The handler awaits ``accepted``, then ``finished``, looks at ``error`` after each, and calls
    ``close`` whatever happens.
    """

    def __init__(
        self,
        gateway: Gateway,
        meters: Meters,
        request: GenerateRequest,
        *,
        caller: Caller,
        key: KnownKey,
        gate: Gate,
        timeout_s: float,
        arrival: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        prompts = len(request.prompts)
        super().__init__(prompts, prompts * request.params.n, meters, arrival, now, request.task)
        loop = asyncio.get_running_loop()
        self.request = request
        self.error: ApiError | None = None
        self.accepted: asyncio.Future[None] = loop.create_future()
        self.finished: asyncio.Future[None] = loop.create_future()
        self.answers: Sequence[Answer] = ()
        """Of all choices, prompt by prompt, once it was opened."""
        self._gateway = gateway
        self._span: OpenSpan | None = None
        if SPANS.on:
            self._span = begin_span(request, caller.trace, caller.request_id, arrival)
        if self._span is not None:
            caller = msgspec.structs.replace(caller, trace=self._span.traceparent)
        self.caller = caller
        self.exemplar_id = exemplar_id(caller.trace)
        self.accepted_at = 0.0
        """When engines had all of its prompts; 0 before."""
        self.key = key
        self.standing: Standing | None = None
        """What is left of the limits of its key, once it has asked to be let in."""
        self._gate = gate
        self._admission: Admission | None = None
        self.timeout_s = timeout_s = min(timeout_s, request.terms.deadline_s or timeout_s)
        self._own_deadline = timeout_s == request.terms.deadline_s
        self._ids: list[int] = []
        self._next = 0
        """The first prompt that was never opened."""
        self._refused: deque[range] = deque()
        """Prompts that found no room, and are to be opened again as they were opened before."""
        self._went_on_at = 0.0
        """When a prompt was last accepted, or a choice ended."""
        self._opens_later = False
        self._waiting = True
        self._closed = False
        self._deadline = loop.call_later(max(0.0, arrival + timeout_s - now()), self._on_deadline)

    async def enter(self, answers: Sequence[Answer]) -> None:
        """Be let in, and hand nothing to the gateway: the caller finds the answers in his own way.
        Raises ``ApiError`` where the key may not (401, 403, 429)."""
        self.answers = answers
        self._next = len(self.request.prompts)
        await self._enter()

    async def open(self, answers: Sequence[Answer]) -> None:
        """Hand every prompt to the gateway, or the first ones where the request has a window, once
        the key may. Raises ``ApiError`` where it may not (401, 403, 429), or where the gateway is
        overloaded.

        answers: of all choices, prompt by prompt.
        """
        if self.request.beams is not None:
            raise bad_request(
                "use_beam_search is true, which is for requests over HTTP; send it to "
                "/v1/completions or /v1/chat/completions",
                param="use_beam_search",
            )
        self.answers = answers
        await self._enter()
        if not self.finished.done():  # else nobody waits for it any more
            self._open_next()

    def _open_next(self) -> None:
        """Open as many prompts as the window has room for, some of them in this turn of the event
        loop. Raises ``ApiError``."""
        window, self._opens_later = self.request.window, False
        last = len(self.request.prompts)
        if window:
            ended = len(self.answers) - self.open_choices
            last = min(last, ended // self.request.params.n + window)
        opened = 0
        while prompts := self._to_open(last):
            if window and opened >= OPEN_AT_ONCE:
                self._open_soon(0.0)
                return
            if prompts.start == self._next:
                self._next = prompts.stop
            else:
                self._refused.popleft()
            self._open(prompts)
            opened += len(prompts)
            if self._opens_later:
                return

    @property
    def open_ids(self) -> list[int]:
        """What the gateway calls the prompts that were opened, while a choice of them is open."""
        return self._ids

    def _to_open(self, last: int) -> range:
        """The prompts that are next, of those before ``last``; none while the window has no room
        for a whole batch, which the others make when they end."""
        first, request = self._next, self.request
        if self._refused:
            return self._refused[0]
        if first >= last or request.task not in OF_FOLDERS:
            return range(first, min(first + 1, last))
        if last < len(request.prompts) and last - first < min(BATCH_INPUTS, request.window):
            return range(0)
        return range(first, batch_end(request.prompts, first, last))

    def _open(self, prompts: range) -> None:
        """Raises ``ApiError``."""
        n = self.request.params.n
        own = self.answers[prompts.start * n : prompts.stop * n]
        sink = _PromptSink(self, own, prompts, wants_ids=self.request.returns_ids)
        age = self.now() - self.arrival
        left = max(0.0, self.timeout_s - age)
        work = self.request.work(prompts, self.caller, time_left=left, age=age)
        try:
            self._ids.append(self._gateway.open(work, sink))
        except Overloaded as overloaded:
            if not (prompts.start and self._waits(prompts, overloaded.rejected)):
                self._refuse(overloaded.rejected)
        if self.error is not None:
            raise self.error

    def finds_no_room(self, prompts: range, rejected: Rejected) -> bool:
        """Prompts were refused before an engine took them. Returns whether they are opened again:
        where nothing of their request was taken, its client does better to come again."""
        nothing_taken = self.unaccepted == len(self.request.prompts)
        return not nothing_taken and self._waits(prompts, rejected)

    def _waits(self, prompts: range, rejected: Rejected) -> bool:
        """Whether a request of many prompts, of which some were let in, asks again for these: its
        work so far is not thrown away because others fill the server meanwhile."""
        if not self.request.window or rejected.status not in (429, 503) or self.finished.done():
            return False
        is_on_its_way = self.open_choices > self.unaccepted * self.request.params.n
        stands_still = self.now() - (self._went_on_at or self.arrival) > STANDSTILL_SECONDS
        if self._gateway.is_closed or (stands_still and not is_on_its_way):
            return False
        self._refused.append(prompts)
        if not self._opens_later:
            self._open_soon(
                min(rejected.retry_after or LONGEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
            )
        return True

    def _open_soon(self, pause: float) -> None:
        self._opens_later = True
        asyncio.get_running_loop().call_later(pause, self._open_later)

    def _open_later(self) -> None:
        if self.finished.done():
            return
        try:
            self._open_next()
        except ApiError as error:
            self.fail(error)

    def on_end(self, end: End) -> None:
        super().on_end(end)
        self._went_on_at = self.now()
        # The gateway is in the middle of its rows.
        is_due = self._refused or self._next < len(self.request.prompts)
        if is_due and not self._opens_later:
            self._open_soon(0.0)

    async def _enter(self) -> None:
        """Raises ``ApiError`` where its key may not."""
        if not self.request.is_part:
            self._gate.history.began(self)
        try:
            self._admission = await self._gate.admit(self.key, self.request)
        except ApiError as error:
            if isinstance(error, LimitReached):
                self.standing = error.standing
            self.fail(error)
            raise
        if self._admission is not None:
            self.standing = self._admission.standing

    def on_accepted(self, prompt_tokens: int, prompts: int = 1) -> None:
        super().on_accepted(prompt_tokens, prompts)
        self._went_on_at = self.now()
        if self.unaccepted == 0:
            self.accepted_at = self.now()
            self._set_accepted()

    def on_rejected(self, rejected: Rejected) -> None:
        self._refuse(rejected)

    def _refuse(self, rejected: Rejected) -> None:
        if not self.finished.done():
            self.meters.refused(rejected)
        self.fail(from_rejected(rejected))

    def on_failed(self, end: End) -> None:
        status = end.status if 400 <= end.status < 600 else 500
        self.fail(status_error(status, end.message or "The request was aborted"))

    def on_all_ended(self) -> None:
        if not self.finished.done():
            super().on_all_ended()
            self.finished.set_result(None)
            self._ids.clear()

    def fail(self, error: ApiError) -> None:
        """End everything with this error; a second one changes nothing."""
        if self.finished.done():
            return
        self.error = error
        self._end_open_choices("rejected" if self._waiting else "error")
        self._set_accepted()
        self._set_finished()

    def abandon(self) -> None:
        """The client is gone: nobody wants the rest."""
        self._end_open_choices("abort")
        self._set_accepted()
        if not self.finished.done():
            self._set_finished()

    def close(self) -> None:
        """Cancel whatever is still open. Idempotent."""
        if not self._closed:
            self._closed = True
            self._deadline.cancel()
            self.abandon()
            self._gate.history.ended(self)
            if not self.request.is_part:
                self.meters.ended(self.usage, self.request.served, self.key.name, self.task)
            if self._admission is not None:
                self._settle(self._admission)
            if self._span is not None:
                end_span(self._span, self)

    def _settle(self, admission: Admission) -> None:
        """Its key pays for the tokens that there were."""
        used = self.usage.prompt + self.usage.completion
        self._gate.settle(admission, used, took_place=bool(used) or self.error is None)

    def _on_deadline(self) -> None:
        limit = "its deadline_s" if self._own_deadline else "--request-timeout-s sets the limit"
        self.fail(
            ApiError(
                504,
                f"The request took longer than {self.timeout_s:g} s; {limit}",
                kind="timeout_error",
                code="request_timeout",
            )
        )

    def _set_finished(self) -> None:
        self.ended_at = self.now()
        self.finished.set_result(None)

    def _set_accepted(self) -> None:
        if self._waiting:
            self._waiting = False
            if not self.accepted.done():  # a cancelled handler cancels what it awaits
                self.accepted.set_result(None)

    def _end_open_choices(self, reason: str) -> None:
        ids, self._ids = self._ids, []
        for request_id in ids:
            self._gateway.cancel(request_id)
        if self.open_choices:
            self.reasons[reason] = None
            self.meters.finished(reason, self.open_choices)
            self.open_choices = 0
