"""One call, from its arrival to its end in the metrics and the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

import grpc
import msgspec
from google.protobuf.message import Message

from penstock.client.answers import Answer
from penstock.client.gateway_interface import Overloaded, ServedModel
from penstock.client.request_terms import Caller
from penstock.protocol.trace_context import line_fields, trace_id, traceparent_of
from penstock.protocol.wire.messages.administration import RequestNames
from penstock.services.frontend import access
from penstock.services.frontend.context import Context
from penstock.services.frontend.dialect_handler import parsed
from penstock.services.frontend.errors import ApiError, from_rejected, shutting_down, status_error
from penstock.services.frontend.forwarded import HEADER
from penstock.services.frontend.generation import Generation
from penstock.services.frontend.grpc.receiving import Rpc, address_of
from penstock.services.frontend.grpc.requests import decoded
from penstock.services.frontend.grpc.running_calls import RunningCalls
from penstock.services.frontend.grpc.sending import SLOW_READER, refuse, send, write
from penstock.services.frontend.grpc.status import Metadata, code_of
from penstock.services.frontend.grpc.stream import MakesMessages, MessageStream
from penstock.services.frontend.keys.known_key import ANYBODY
from penstock.services.frontend.keys.standing import utc_now
from penstock.services.frontend.parse import GenerateRequest
from penstock.services.frontend.request_log import CLIENT_GONE, log_request
from penstock.services.frontend.requests.routes import abort_everywhere

_log = logging.getLogger("penstock.frontend")

Sent = TypeVar("Sent", bound=Message)
Found = TypeVar("Found")


class Call:
    def __init__(self, context: Context, running: RunningCalls, rpc: Rpc) -> None:
        self.context = context
        self.running = running
        self.arrival = context.clock.now()
        self.generation: Generation | None = None
        self._rpc = rpc
        pairs = [(n, v) for n, v in rpc.invocation_metadata() or () if isinstance(v, str)]
        metadata = self._metadata = dict(pairs)
        self._forwarded = [value for name, value in pairs if name == HEADER.lower()]
        self.id = access.harmless_id(metadata.get("x-request-id", ""))
        self.trace = traceparent_of(metadata.get("traceparent", ""))
        self.key = ANYBODY
        self.caller = Caller()
        self.owner = ""
        """Whose requests this caller's are: those of its key, or of its address."""
        self._raw = b""
        """Its message, counted in the budget of bodies for as long as it is here."""

    def identify(self) -> None:
        """Find out who calls. Raises ``ApiError``: 401, 403."""
        found = self._metadata
        sent = access.given_key(found.get("authorization", ""), found.get("x-api-key", ""))
        self.key = self.context.keys.of_text(sent)
        self.key.check_right("user")
        address = self.context.proxies.client(address_of(self._rpc.peer()), self._forwarded)
        self.caller = Caller("", self.key.tenant, address, self.trace)
        self.owner = self.caller.tenant()

    def models(self) -> list[ServedModel]:
        """The served models that the caller may use."""
        return self.key.of_its_own(self.context.gateway.models())

    def known_as(self, request_id: str) -> None:
        """Its message names it, which goes before its metadata."""
        if request_id:
            self.id = access.harmless_id(request_id)

    @property
    def time_left(self) -> float | None:
        """Seconds until its deadline; ``None``: it has none."""
        return self._rpc.time_remaining()

    # --- what it asks for

    async def receive(self) -> None:
        """Take in the call's message. Raises ``ApiError``: 503, 408, 400."""
        raw = await self.running.receiving.message(self._rpc)
        self.context.bodies.take(len(raw))
        self._raw = raw

    def forget(self) -> None:
        """Give the message's memory back. Idempotent."""
        self.context.bodies.used -= len(self._raw)
        self._raw = b""

    def message(self, kind: type[Sent]) -> Sent:
        """The call's message, for the first who asks. Raises ``ApiError`` 400."""
        try:
            return decoded(kind, self._raw)
        finally:
            self.forget()

    async def asked(
        self, kind: type[Sent], read: Callable[[Sent, list[ServedModel]], Found]
    ) -> Found:
        """What ``read`` makes of the call's message; of a large one beside the event loop. Raises
        ``ApiError``."""
        context, raw = self.context, self._raw
        try:
            await context.gateway.known()
            return await parsed(
                context, self.key, len(raw), lambda models, _: read(decoded(kind, raw), models)
            )
        finally:
            self.forget()

    # --- what it gets

    def generate(self, asked: GenerateRequest) -> Generation:
        """Begin to generate; it ends with the call."""
        context = self.context
        left, most = self.time_left, context.config.request_timeout_s
        self.generation = Generation(
            context.gateway,
            context.meters,
            asked,
            caller=msgspec.structs.replace(self.caller, request_id=self.id),
            key=self.key,
            gate=context.gate,
            timeout_s=most
            if left is None or asked.terms.deadline_s
            else min(most, max(left, 0.001)),
            arrival=self.arrival,
            now=context.clock.now,
        )
        return self.generation

    async def stream(self, asked: GenerateRequest, messages: MakesMessages) -> None:
        """Write a whole answer. Raises ``ApiError``."""
        generation = self.generate(asked)
        stream = MessageStream(
            generation, messages, partial(write, self._rpc), stall_s=self.context.clock.stall_s
        )
        await generation.open(stream.answers())
        await stream.run()

    async def send(self, message: Message) -> None:
        """Write one message; returns when gRPC has taken it. Raises ``ApiError`` where the client
        does not read, or may not have so much at once."""
        await send(self._rpc, message.SerializeToString(), self.context.clock.stall_s)

    async def whole(self, asked: GenerateRequest) -> list[Answer]:
        """The answers to all prompts. Raises ``ApiError``."""
        generation = self.generate(asked)
        answers = [Answer() for _ in range(generation.open_choices)]
        await generation.open(answers)
        await generation.finished
        if generation.error is not None:
            raise generation.error
        return answers

    async def aborted(self, ids: Sequence[str]) -> list[bool]:
        """End the caller's requests of these ids, in whatever frontend and API. Returns of each
        whether one of them ran."""
        known = [one for one in dict.fromkeys(ids) if access.is_harmless(one)]
        counts = await abort_everywhere(self.context, RequestNames(known, self.owner))
        ran = {one for one, count in zip(known, counts, strict=True) if count}
        return [one in ran for one in ids]


Handler: TypeAlias = Callable[[Call], Awaitable[Message | None]]
"""Returns the answer of a call that has one alone."""


async def run_call(
    context: Context, running: RunningCalls, route: str, handler: Handler, rpc: Rpc
) -> None:
    """Answer a call, whatever happens.

    Nothing of the call's message is taken in before it is known who calls.
    """
    call = Call(context, running, rpc)
    error: ApiError | None = None
    status = CLIENT_GONE
    try:
        call.identify()
        running.untaken.check(call.owner)
        if context.gateway.draining():
            raise shutting_down()
        _count(running, rpc)
        await call.receive()
        if (answer := await handler(call)) is not None:
            await call.send(answer)
        status = 200
        rpc.set_trailing_metadata(_told(call))
        return
    except ApiError as refusal:
        # It holds the frame, which holds the message: its memory would wait for the collector.
        refusal.__traceback__ = None
        error = refusal
    except Overloaded as overloaded:
        error = from_rejected(overloaded.rejected)
    except asyncio.CancelledError:
        left = call.time_left
        if left is not None and left <= 0:
            status = 504
        raise
    except grpc.aio.InternalError:  # gRPC's for a call that is no more: the client has left
        raise asyncio.CancelledError from None
    except Exception:
        _log.exception("a request failed", extra=line_fields(call.id, call.trace))
        error = status_error(500, f"Internal error in request {call.id}")
    finally:
        if error is not None:
            status = error.status
        try:
            _record_end(call, route, status, error)
        finally:
            call.forget()
            if call.generation is not None:
                call.generation.close()
    if error.code != SLOW_READER:
        await refuse(rpc, error, call.id, _told(call))
    await _refuse_slow_reader(call, running, rpc, error)


async def _refuse_slow_reader(call: Call, running: RunningCalls, rpc: Rpc, error: ApiError) -> None:
    """The client does not read, so this may last: it counts as an answer that nobody takes, and
    not as a call."""
    running.count -= 1
    try:
        with running.untaken.held(call.owner):
            await refuse(rpc, error, call.id)
    finally:
        running.count += 1  # for the callback that takes it away


def _count(running: RunningCalls, rpc: Rpc) -> None:
    """Count a call until its status has gone out."""

    def done(_: Rpc) -> None:
        running.count -= 1

    rpc.add_done_callback(done)  # type: ignore[arg-type]  # a class to its stubs, no protocol
    running.count += 1


def _told(call: Call) -> Metadata:
    """What every call says of itself at its end: its id, and what is left of its key's limits."""
    found: Metadata = (("x-request-id", call.id),)
    if call.generation is None or call.generation.standing is None:
        return found
    limits = call.generation.standing.headers(utc_now(), anthropic=False)
    return (*found, *((name.lower(), value) for name, value in limits.items()))


def _record_end(call: Call, route: str, status: int, error: ApiError | None) -> None:
    code = grpc.StatusCode.OK if status == 200 else code_of(status)
    call.context.registry.inc("grpc_requests_total", route, code.name)
    kind = "" if error is None else error.code or error.kind
    trace = trace_id(call.trace)
    log_request(call.id, route, status, kind, call.generation, trace)


__all__ = ["Call", "Handler", "run_call"]
