"""One call, from its arrival to its end in the metrics and the log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeAlias, TypeVar
from urllib.parse import unquote

import grpc
import msgspec
from google.protobuf.message import Message

from penstock.client.answers import Answer
from penstock.client.gateway_interface import Overloaded, ServedModel
from penstock.client.request_terms import Caller
from penstock.protocol.trace_context import line_fields, trace_id, traceparent_of
from penstock.protocol.wire.messages.administration import ABORT_REQUEST, RequestName
from penstock.services.frontend import access
from penstock.services.frontend.body import READ_TIMEOUT_S
from penstock.services.frontend.context import Context
from penstock.services.frontend.dialect_handler import parsed
from penstock.services.frontend.errors import ApiError, from_rejected, retry_after, status_error
from penstock.services.frontend.generation import Generation
from penstock.services.frontend.grpc.requests import decoded
from penstock.services.frontend.grpc.status import Metadata, code_of, message_of, trailing
from penstock.services.frontend.grpc.stream import MakesMessages, MessageStream
from penstock.services.frontend.keys.known_key import ANYBODY
from penstock.services.frontend.keys.standing import utc_now
from penstock.services.frontend.parse import GenerateRequest
from penstock.services.frontend.request_log import CLIENT_GONE, log_request
from penstock.services.frontend.requests.routes import aborted

ABORT_SECONDS = 1.0
"""Time for the status of a call to go out behind a message that nobody takes."""
_log = logging.getLogger("penstock.frontend")

Sent = TypeVar("Sent", bound=Message)
Found = TypeVar("Found")
Rpc: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"


class RunningCalls:
    """How many calls are being answered in this process, and since when it answers any."""

    def __init__(self) -> None:
        self.count = 0
        self.began = time.monotonic()


class Call:
    def __init__(self, context: Context, running: RunningCalls, rpc: Rpc) -> None:
        self.context = context
        self.running = running
        self.arrival = context.clock.now()
        self.generation: Generation | None = None
        self._rpc = rpc
        metadata = {
            name: value for name, value in rpc.invocation_metadata() or () if isinstance(value, str)
        }
        self._metadata = metadata
        self.id = access.harmless_id(metadata.get("x-request-id", ""))
        self.trace = traceparent_of(metadata.get("traceparent", ""))
        self.key = ANYBODY
        self.caller = Caller()
        self.owner = ""
        """Whose requests this caller's are: those of its key, or of its address."""

    def identify(self) -> None:
        """Find out who calls. Raises ``ApiError``: 401, 403."""
        found = self._metadata
        sent = access.given_key(found.get("authorization", ""), found.get("x-api-key", ""))
        self.key = self.context.keys.of_text(sent)
        self.key.check_right("user")
        self.caller = Caller("", self.key.tenant, _address(self._rpc.peer()), self.trace)
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

    async def received(self) -> bytes:
        """The call's message. Raises ``ApiError``: 408, 400."""
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                message: Any = await self._rpc.read()
        except TimeoutError:
            raise ApiError(
                408, f"The message did not arrive within {READ_TIMEOUT_S:.0f} s"
            ) from None
        if message is grpc.aio.EOF:
            raise ApiError(400, "The call ended without a message")
        return bytes(message)

    async def asked(
        self, kind: type[Sent], raw: bytes, read: Callable[[Sent, list[ServedModel]], Found]
    ) -> Found:
        """What ``read`` makes of the call's message; of a large one beside the event loop. Raises
        ``ApiError``."""
        context = self.context
        await context.gateway.known()
        context.bodies.take(len(raw))
        try:
            return await parsed(
                context, self.key, len(raw), lambda models, _: read(decoded(kind, raw), models)
            )
        finally:
            context.bodies.used -= len(raw)

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
            generation, messages, self._rpc.write, stall_s=self.context.clock.stall_s
        )
        await generation.open(stream.answers())
        await stream.run()

    async def send(self, message: Message) -> None:
        """Write one message of a stream; returns when gRPC has taken it."""
        await self._rpc.write(message.SerializeToString())

    async def whole(self, asked: GenerateRequest) -> list[Answer]:
        """The answers to all prompts. Raises ``ApiError``."""
        generation = self.generate(asked)
        answers = [Answer() for _ in range(generation.open_choices)]
        await generation.open(answers)
        await generation.finished
        if generation.error is not None:
            raise generation.error
        return answers

    async def aborted(self, request_id: str) -> bool:
        """End the caller's requests of this id, in whatever frontend and API. Returns whether one
        of them ran."""
        if not access.is_harmless(request_id):
            return False
        name = RequestName(request_id, self.owner)
        count = aborted(self.context, name)
        asked = msgspec.msgpack.encode(name)
        answers = await self.context.gateway.ask("frontend", ABORT_REQUEST, asked)
        return count + sum(map(int, answers)) > 0


Handler: TypeAlias = Callable[[bytes, Call], Awaitable[Message | None]]
"""Takes the call's message; returns the answer of a call that has one alone."""


async def run_call(
    context: Context, running: RunningCalls, route: str, handler: Handler, rpc: Rpc
) -> Any:
    """Answer a call, whatever happens. Returns the bytes of a single answer.

    Nothing of the call's message is taken in before it is known who calls.
    """
    call = Call(context, running, rpc)
    error: ApiError | None = None
    status = CLIENT_GONE
    entered = False
    try:
        call.identify()
        if context.gateway.draining():
            raise _draining()
        running.count += 1
        entered = True
        answer = await handler(await call.received(), call)
        status = 200
        rpc.set_trailing_metadata(_told(call))
        return None if answer is None else answer.SerializeToString()
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
    except Exception:
        _log.exception("a request failed", extra=line_fields(call.id, call.trace))
        error = status_error(500, f"Internal error in request {call.id}")
    finally:
        if error is not None:
            status = error.status
        if entered:
            running.count -= 1
        try:
            _record_end(call, route, status, error)
        finally:
            if call.generation is not None:
                call.generation.close()
    await _refuse(rpc, error, call)
    return None


def _told(call: Call) -> Metadata:
    """What every call says of itself at its end: its id, and what is left of its key's limits."""
    found: Metadata = (("x-request-id", call.id),)
    if call.generation is None or call.generation.standing is None:
        return found
    limits = call.generation.standing.headers(utc_now(), anthropic=False)
    return (*found, *((name.lower(), value) for name, value in limits.items()))


def _address(peer: str) -> str:
    """The address in a peer as gRPC names it, ``ipv4:127.0.0.1:50000`` or ``ipv6:%5B::1%5D:50000``,
    as HTTP has it."""
    return unquote(peer.partition(":")[2]).rpartition(":")[0].strip("[]")


def _draining() -> ApiError:
    return ApiError(
        503,
        "The server is shutting down; connect again",
        kind="overloaded_error",
        code="server_shutting_down",
        headers=retry_after(1.0),
    )


def _record_end(call: Call, route: str, status: int, error: ApiError | None) -> None:
    code = grpc.StatusCode.OK if status == 200 else code_of(status)
    call.context.registry.inc("grpc_requests_total", route, code.name)
    kind = "" if error is None else error.code or error.kind
    trace = trace_id(call.trace)
    log_request(call.id, route, status, kind, call.generation, trace)


async def _refuse(rpc: Rpc, error: ApiError, call: Call) -> None:
    metadata = (*trailing(error, call.id), *_told(call))
    abort = partial(rpc.abort, code_of(error.status), message_of(error), metadata)
    if error.code != "slow_reader":
        await abort()
    async with asyncio.timeout(ABORT_SECONDS):  # it waits behind what the client does not read
        await abort()


__all__ = ["Call", "Handler", "Rpc", "RunningCalls", "run_call"]
