"""One request on a WebSocket, with the responses that steering makes of it."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import msgspec

from penstock.client.answers import Answer
from penstock.client.meters import Usage
from penstock.services.frontend.bodies.openai_items import InputItem
from penstock.services.frontend.bodies.openai_responses import ResponseCreate
from penstock.services.frontend.context import KEY
from penstock.services.frontend.dialect_handler import ended, parsed
from penstock.services.frontend.dialects.responses.events import EventWriter
from penstock.services.frontend.dialects.responses.held_responses import held_responses
from penstock.services.frontend.dialects.responses.renderer import ResponsesRenderer
from penstock.services.frontend.dialects.responses.state import RunningResponse, kept
from penstock.services.frontend.dialects.responses.steering import (
    Steer,
    accepted,
    failed_steer,
    joined,
    new_steer,
    pending,
)
from penstock.services.frontend.dialects.responses.token_count import counted
from penstock.services.frontend.dialects.responses.truncation import whole_turn
from penstock.services.frontend.dialects.responses.turn import Turn, read_input
from penstock.services.frontend.errors import ApiError
from penstock.services.frontend.generation import Generation
from penstock.services.frontend.parse import GenerateRequest
from penstock.services.frontend.stream import EventStream
from penstock.services.frontend.websockets.messages import PING, text_messages
from penstock.services.frontend.websockets.request import one_request

if TYPE_CHECKING:
    from penstock.services.frontend.dialects.responses.session import Session


class SocketStream(EventStream):
    """The events of one response on a connection that may carry several: a message for a line."""

    def _framed(self, frames: bytes) -> bytes:
        return text_messages(frames) or PING


class LaneTurn:
    """A ``response.create`` until its lane is free again."""

    def __init__(self, session: Session, body: ResponseCreate, size: int) -> None:
        """size: of the body, in bytes."""
        self._session = session
        self._body = body
        self._size = size
        self.lane = body.stream_id
        self.steers: list[Steer] = []
        """What has come for the response that runs."""
        self._running: tuple[Generation, ResponsesRenderer, SocketStream] | None = None

    async def answer(self) -> None:
        """Write all its events. Raises ``ConnectionError`` when the client has gone."""
        self._session.steering.turns.add(self)
        try:
            await self._answer_all()
        finally:
            self._session.steering.turns.discard(self)

    async def _answer_all(self) -> None:
        body, steers = self._body, None
        while True:
            await self._answer(body, steers)
            steers, self.steers = self.steers, []
            if not steers:
                return
            # What was said meanwhile continues the response, by another one.
            body = msgspec.structs.replace(
                body, input=None, previous_response_id=steers[0].target, generate=None
            )

    async def _answer(self, body: ResponseCreate, steers: list[Steer] | None) -> None:
        """steers: the input, for a successor that steering makes."""
        session, context = self._session, self._session.context
        arrival = context.clock.now()
        waited: list[Steer] = []
        try:
            with one_request(session) as request:
                if session.ends is not None:
                    raise session.ends
                await context.gateway.known()
                stores = session.state.stores(body.store)
                turn, waited = await self._turn(body, steers)
                generation = session.generation(turn.request, request.id, arrival)
                request.generation = generation
                if body.generate is False:
                    await self._warm(turn, generation, stores=stores)
                else:
                    await self._stream(turn, generation, request.id, stores=stores)
        finally:
            self._running = None
        if request.refusal is not None:
            self._refuse(request.refusal, steers, body, waited)

    async def _turn(
        self, body: ResponseCreate, steers: list[Steer] | None
    ) -> tuple[Turn, list[Steer]]:
        """The request, and the steering that has waited for it. Raises ``ApiError``."""
        session = self._session
        own: list[InputItem] = []
        waited: list[Steer] = []
        context, conversations = session.context, session.conversations
        key = session.request[KEY]
        with held_responses(context) as held:
            before = await conversations.before(body.previous_response_id, held)
            if steers is None:
                read = await parsed(context, key, self._size, lambda *_: read_input(body))
                own = await conversations.resolved(read, held)
                waited = session.steering.pending.pop(body.previous_response_id or "", [])
            own = joined(own, steers or waited)
            warms = body.generate is False
            size = self._size + held.size
            try:
                turn = await whole_turn(
                    context, key, body, size, before, own, self._count, streams=not warms
                )
            except ApiError:
                if waited and body.previous_response_id:
                    session.steering.pending[body.previous_response_id] = waited
                raise
        return (_warming(turn) if warms else turn), waited

    async def _count(self, asked: GenerateRequest) -> int:
        """Tokens of a prompt. Raises ``ApiError``."""
        session = self._session
        name, now = session.next_request_id(), session.context.clock.now()
        return await counted(asked, lambda counting: session.generation(counting, name, now))

    def _refuse(
        self,
        error: ApiError,
        steers: list[Steer] | None,
        body: ResponseCreate,
        waited: list[Steer],
    ) -> None:
        """Nothing has begun."""
        session = self._session
        if steers is None:
            session.tell_error(error, self.lane)
        if waited and body.previous_response_id:
            session.steering.pending[body.previous_response_id] = waited
        self._fail_steers(steers or [], error.message)

    def _fail_steers(self, steers: list[Steer], message: str) -> None:
        writer = EventWriter(is_socket=True, lane=self.lane)
        for steer in steers:
            told = failed_steer(
                steer.raw, "successor_creation_failed", message, writer=writer, steer=steer
            )
            self._session.tell(told)

    # --- a response

    def _renderer(self, turn: Turn, answer_id: str, *, stores: bool) -> ResponsesRenderer:
        writer = EventWriter(is_socket=True, lane=self.lane)
        renderer = ResponsesRenderer(turn, answer_id, stores=stores, writer=writer)
        renderer.keep_alive = b""
        return renderer

    async def _stream(
        self, turn: Turn, generation: Generation, request_id: str, *, stores: bool
    ) -> None:
        """Raises ``ApiError`` where it does not begin."""
        session = self._session
        answer_id = uuid.uuid4().hex
        renderer = self._renderer(turn, answer_id, stores=stores)
        stream = SocketStream(generation, renderer, session.context.clock, request_id)
        key = (session.owner, renderer.id)
        try:
            await generation.open([stream.answer(0)])
            await generation.accepted
            if generation.error is not None:
                raise generation.error
            stream.start(
                session.socket.transport, chunked=False, first=renderer.first(generation.usage)
            )
            self._running = (generation, renderer, stream)
            session.steering.running[renderer.id] = self
            session.state.running[key] = RunningResponse(generation, renderer)
            await generation.finished
            session.steering.running.pop(renderer.id, None)
            rest = await stream.finish(lambda: ended(generation, renderer, request_id))
            await self._remember(turn, answer_id, renderer, stores=stores)
            rest += self._after(renderer)
        finally:
            session.steering.running.pop(renderer.id, None)
            session.state.running.pop(key, None)
            stream.close()
        session.socket.write_end(text_messages(rest))

    async def _warm(self, turn: Turn, generation: Generation, *, stores: bool) -> None:
        """Compute the prompt, so that it is cached for what continues it, and answer nothing."""
        answer_id = uuid.uuid4().hex
        renderer = self._renderer(turn, answer_id, stores=stores)
        await generation.open([Answer()])
        await generation.finished
        error = generation.error
        if error is not None and error.status != 400:  # what is no prompt yet may become one
            raise error
        usage = Usage()
        usage.prompt, usage.cached = generation.usage.prompt, generation.usage.cached
        renderer.stop("warmed")
        told = renderer.first(usage) + renderer.last(usage)
        await self._remember(turn, answer_id, renderer, stores=stores)
        self._session.tell(told)

    async def _remember(
        self, turn: Turn, answer_id: str, renderer: ResponsesRenderer, *, stores: bool
    ) -> None:
        if renderer.response.status == "failed":
            return
        session = self._session
        record = kept(turn.own, answer_id, renderer)
        if session.state.local.keep(session.name, renderer.id, record):
            session.remembered.append(renderer.id)
        if stores and session.state.store is not None:
            await session.state.store.put(session.owner, renderer.id, record)

    # --- steering

    def steer(self, body: list[InputItem], raw: bytes) -> None:
        """Take messages for the response that runs, for which there is room. It ends at once,
        unless a tool is called."""
        if self._running is None:
            return
        generation, renderer, stream = self._running
        writer = renderer.writer
        steer = new_steer(renderer.id, body, raw)
        self.steers.append(steer)
        stream.write(accepted(writer, steer))
        output = renderer.output
        if not (stream.held or output.is_calling or output.calls()):
            renderer.stop("steered")
            generation.abandon()

    def _after(self, renderer: ResponsesRenderer) -> bytes:
        """What is told of steering when its response has ended, where that is no successor."""
        steers, calls = self.steers, renderer.output.calls()
        if not steers:
            return b""
        writer, status = renderer.writer, renderer.response.status
        if status in ("failed", "cancelled"):
            self.steers = []
            message = f"Response {renderer.id} {status}"
            code = "successor_creation_failed"
            return b"".join(
                failed_steer(one.raw, code, message, writer=writer, steer=one) for one in steers
            )
        if not calls:
            return b""
        self.steers = []
        self._session.steering.pending[renderer.id] = steers
        return b"".join(pending(writer, one, calls) for one in steers)


def _warming(turn: Turn) -> Turn:
    """The same prompt, and as little of an answer as can be asked for."""
    params = msgspec.structs.replace(
        turn.request.params, max_tokens=1, min_tokens=0, structured_outputs=None, logprobs=None
    )
    request = msgspec.structs.replace(turn.request, params=params)
    return msgspec.structs.replace(turn, request=request)
