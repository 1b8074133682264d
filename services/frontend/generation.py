"""One generating HTTP request from its arrival to its end.

It may be several gateway requests, one for each prompt. All are accepted or the client gets an
error; the first error ends all of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from penstock.client.interface import Gateway, Overloaded
from penstock.client.ledger import Sink
from penstock.protocol.process.metrics import Registry
from penstock.protocol.wire.messages.requests import Rejected
from penstock.protocol.wire.messages.tokens import End, EndReason, RowDetails, RowStart
from penstock.services.frontend.chunks import Answer, Usage
from penstock.services.frontend.errors import ApiError, from_rejected, status_error
from penstock.services.frontend.parse import GenerateRequest

_REASONS = {EndReason.STOP: "stop", EndReason.LENGTH: "length"}


class Meters:
    """The series that requests are counted in."""

    def __init__(self, registry: Registry) -> None:
        self.first_token = registry.histogram("time_to_first_token_seconds").observe
        self.between_tokens = registry.histogram("inter_token_latency_seconds").observe
        self.end_to_end = registry.histogram("e2e_request_latency_seconds").observe
        self._registry = registry

    def finished(self, reason: str, choices: int = 1) -> None:
        self._registry.inc("request_finished_total", reason, amount=choices)


class Generation:
    """The state that the sinks of one HTTP request share with its handler.

    The handler awaits ``accepted``, then ``finished``, looks at ``error`` after each, and calls
    ``close`` whatever happens.
    """

    def __init__(
        self,
        gateway: Gateway,
        meters: Meters,
        request: GenerateRequest,
        *,
        tenant: str,
        timeout_s: float,
        arrival: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.request = request
        self.meters = meters
        self.arrival = arrival
        self.now = now
        self.usage = Usage()
        self.error: ApiError | None = None
        self.first_at = self.ended_at = 0.0
        """When the first token came, and when all choices had ended; 0 before."""
        self.queued_s = 0.0
        """Seconds that the last of its choices waited until an engine began with it."""
        self.reasons: dict[str, None] = {}
        """Why its choices ended, each reason once."""
        self.accepted: asyncio.Future[None] = loop.create_future()
        self.finished: asyncio.Future[None] = loop.create_future()
        self._gateway = gateway
        self._tenant = tenant
        self._timeout_s = timeout_s = min(timeout_s, request.deadline_s or timeout_s)
        self._own_deadline = timeout_s == request.deadline_s
        self._ids: list[int] = []
        self._unaccepted = len(request.prompts)
        self._open_choices = len(request.prompts) * request.params.n
        self._waiting = True
        self._closed = False
        self._deadline = loop.call_later(max(0.0, arrival + timeout_s - now()), self._on_deadline)

    def open(self, sinks: Sequence[Sink]) -> None:
        """Hand every prompt to the gateway. Raises ``ApiError`` where it is overloaded."""
        for prompt, sink in enumerate(sinks):
            age = self.now() - self.arrival
            left = max(0.0, self._timeout_s - age)
            work = self.request.work(prompt, tenant=self._tenant, time_left=left, age=age)
            try:
                self._ids.append(self._gateway.open(work, sink))
            except Overloaded as overloaded:
                self.fail(from_rejected(overloaded.rejected))
            if self.error is not None:
                raise self.error

    def on_accepted(self, prompt_tokens: int) -> None:
        self.usage.prompt += prompt_tokens
        self._unaccepted -= 1
        if self._unaccepted == 0:
            self._set_accepted()

    def on_rejected(self, rejected: Rejected) -> None:
        self.fail(from_rejected(rejected))

    def on_end(self, end: End) -> bool:
        """A choice ended. False: with an error, which ends the whole request."""
        reason = _REASONS.get(end.reason)
        if reason is None:
            status = end.status if 400 <= end.status < 600 else 500
            self.fail(status_error(status, end.message or "The request was aborted"))
            return False
        self._open_choices -= 1
        self.reasons[reason] = None
        self.meters.finished(reason)
        if self._open_choices == 0 and not self.finished.done():
            self._set_finished()
            self.meters.end_to_end(self.ended_at - self.arrival)
            self._ids.clear()
        return True

    def on_start(self, choice: int, start: RowStart) -> None:
        """A choice of one of the prompts has run; the first one computed its prompt."""
        if choice == 0:
            self.usage.cached += start.cached
        self.queued_s = max(self.queued_s, start.queued_s)

    def on_first_token(self, now: float) -> None:
        """Of one of the prompts."""
        self.first_at = self.first_at or now
        self.meters.first_token(now - self.arrival)

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

    def _on_deadline(self) -> None:
        limit = "its deadline_s" if self._own_deadline else "--request-timeout-s sets the limit"
        self.fail(
            ApiError(
                504,
                f"The request took longer than {self._timeout_s:g} s; {limit}",
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
        if self._open_choices:
            self.reasons[reason] = None
            self.meters.finished(reason, self._open_choices)
            self._open_choices = 0


class CollectSink:
    """Gathers the text of one prompt's choices for an unstreamed answer."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        n = generation.request.params.n
        self._texts: list[list[str]] = [[] for _ in range(n)]
        self._details: list[list[RowDetails]] = [[] for _ in range(n)]
        self._ends: list[End | None] = [None] * n
        self._last = [0.0] * n
        self._has_first = False

    def on_accepted(self, prompt_tokens: int) -> None:
        self._generation.on_accepted(prompt_tokens)

    def on_rejected(self, rejected: Rejected) -> None:
        self._generation.on_rejected(rejected)

    def on_text(
        self,
        choice: int,
        text: str,
        tokens: int,
        end: End | None,
        start: RowStart | None = None,
        details: RowDetails | None = None,
    ) -> None:
        generation = self._generation
        if tokens:
            now = generation.now()
            if self._last[choice]:
                generation.meters.between_tokens((now - self._last[choice]) / tokens, tokens)
            elif not self._has_first:
                self._has_first = True
                generation.on_first_token(now)
            self._last[choice] = now
            generation.usage.completion += tokens
        if start is not None:
            generation.on_start(choice, start)
        if details is not None:
            self._details[choice].append(details)
        if text:
            self._texts[choice].append(text)
        if end is not None and self._ends[choice] is None and generation.on_end(end):
            self._ends[choice] = end

    def choices(self) -> list[Answer]:
        """Every choice; for a request that finished without an error."""
        return [
            Answer("".join(texts), end, details)
            for texts, end, details in zip(self._texts, self._ends, self._details, strict=True)
            if end is not None
        ]
