"""One request on a connection of /v1/stream."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.client.gateway_interface import ServedModel
from penstock.services.frontend.bodies.multiplex import StreamedChat, StreamedCompletion
from penstock.services.frontend.body import Pause, decode_body, no_pause
from penstock.services.frontend.chat_request import chat_request
from penstock.services.frontend.completion_request import completion_request
from penstock.services.frontend.context import KEY
from penstock.services.frontend.dialect_handler import ended, parsed
from penstock.services.frontend.dialects.logprobs import ChatLogprobs, CompletionLogprobs
from penstock.services.frontend.dialects.multiplex.encodings import Encoding, json_body
from penstock.services.frontend.dialects.multiplex.renderer import (
    MakeLogprobs,
    MultiplexRenderer,
    MultiplexStream,
)
from penstock.services.frontend.generation import Generation
from penstock.services.frontend.parse import GenerateRequest
from penstock.services.frontend.token_arrays import decode_with_ids
from penstock.services.frontend.websockets.request import SocketRequest, one_request

if TYPE_CHECKING:
    from penstock.services.frontend.dialects.multiplex.session import MultiplexSession

LOGPROBS: dict[str, MakeLogprobs] = {"chat": ChatLogprobs, "completion": CompletionLogprobs}
"""Of the types of requests that there are."""


class Asked(NamedTuple):
    """A frame that begins a request."""

    name: str
    """By which its client knows it."""
    type: str
    """A key of ``LOGPROBS``."""
    body: msgspec.Raw
    encoding: Encoding


class MultiplexedRequest:
    """From a frame to the one frame that ends what it began."""

    def __init__(self, session: MultiplexSession, asked: Asked) -> None:
        """Raises ``ApiError`` 503 where there is no room for its body."""
        self._session = session
        self._name = asked.name
        self._encoding = asked.encoding
        self._asked: Asked | None = asked
        self._held = len(asked.body)
        session.context.bodies.take(self._held)
        self._is_cancelled = False
        self._generation: Generation | None = None

    def cancel(self) -> None:
        """Its client wants no more of it: it ends with what has come."""
        self._is_cancelled = True
        if self._generation is not None:
            self._generation.abandon()

    def forget_body(self) -> None:
        """The body is read, or nobody will read it. Idempotent."""
        self._session.context.bodies.used -= self._held
        self._held = 0
        self._asked = None

    async def answer(self) -> None:
        """Write all its frames."""
        with suppress(ConnectionError), one_request(self._session) as request:
            await self._stream(request)
        if request.refusal is not None:
            self._session.socket.write(self._encoding.error(request.refusal, self._name))

    async def _stream(self, one: SocketRequest) -> None:
        """Raises ``ApiError`` where it does not begin."""
        session, context = self._session, self._session.context
        arrival = context.clock.now()
        request, logprobs = await self._parsed()
        renderer = MultiplexRenderer(request, self._name, one.id, self._encoding, logprobs)
        generation = self._generation = session.generation(request, one.id, arrival)
        one.generation = generation
        stream = MultiplexStream(generation, renderer, context.clock, one.id)
        try:
            if self._is_cancelled:
                generation.abandon()
            else:
                answers = [stream.answer(one) for one in range(generation.open_choices)]
                await generation.open(answers)
            await generation.accepted
            if generation.error is not None:
                raise generation.error
            stream.start(session.socket.transport, chunked=False)
            await generation.finished
            rest = await stream.finish(lambda: ended(generation, renderer, one.id))
        finally:
            stream.close()
        session.socket.write_end(rest)

    async def _parsed(self) -> tuple[GenerateRequest, MakeLogprobs]:
        """What its body asks for. Raises ``ApiError``."""
        asked, context = self._asked, self._session.context
        if asked is None:
            raise ValueError("a body is read once")
        await context.gateway.known()

        def parse(models: list[ServedModel], pause: Pause | None) -> GenerateRequest:
            body = json_body(asked.body, asked.encoding)
            if asked.type == "chat":
                return chat_request(decode_body(body, StreamedChat, pause or no_pause), models)
            return completion_request(decode_with_ids(body, StreamedCompletion, pause), models)

        try:
            key = self._session.request[KEY]
            return await parsed(context, key, self._held, parse), LOGPROBS[asked.type]
        finally:
            self.forget_body()
