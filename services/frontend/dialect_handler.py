"""The handler of every route that a dialect has."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from aiohttp import HttpVersion11, hdrs, web
from aiohttp.typedefs import Handler

from penstock.client.answers import Answer
from penstock.client.gateway_interface import Gateway, ServedModel
from penstock.client.meters import Usage
from penstock.client.request_terms import Caller
from penstock.services.frontend.beam_answers import search_beams
from penstock.services.frontend.bodies.routes import JSON
from penstock.services.frontend.body import Pause, body_of
from penstock.services.frontend.context import CONTEXT, KEY, REQUEST_ID, TENANT, TRACE, Context
from penstock.services.frontend.dialects.interface import Dialect, Renderer, first_of, media_type_of
from penstock.services.frontend.generation import Generation
from penstock.services.frontend.keys.known_key import KnownKey
from penstock.services.frontend.keys.model_choice import of_its_own
from penstock.services.frontend.parse import GenerateRequest, UnknownModel
from penstock.services.frontend.request_body import beside
from penstock.services.frontend.request_log import GENERATION
from penstock.services.frontend.running import Running
from penstock.services.frontend.stream import EventStream

_STREAM_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would hold the events back
}
MANY_ANSWERS = 8
"""More are rendered beside the event loop."""
Parsed = TypeVar("Parsed")
Keep = Callable[[], Awaitable[None]]


def handler(dialect: Dialect) -> Handler:
    """The handler of a dialect's routes."""

    async def generate(request: web.Request) -> web.StreamResponse:
        return await _generate(request, dialect)

    return generate


async def _generate(request: web.Request, dialect: Dialect) -> web.StreamResponse:
    """Answer one request. No status goes out before every prompt is accepted.

    A client that leaves cancels this task (``handler_cancellation``), wherever it waits.
    """
    context = request.app[CONTEXT]
    arrival = context.clock.now()
    await context.gateway.known()
    async with body_of(request, context.config.max_body_bytes, context.bodies) as raw:
        asked = await parsed(context, request[KEY], len(raw), partial(dialect.parse, raw))
    renderer = dialect.renderer(asked, uuid.uuid4().hex, int(time.time()))
    if not asked.prompts:
        return _json(renderer.body((), Usage()))
    generation = generation_of(request, asked, arrival)
    running = context.running.entered(owner(request), asked.handle, Running(generation, renderer))
    try:
        with running:
            return await answered(request, generation, renderer)
    finally:
        generation.close()


def generation_of(request: web.Request, asked: GenerateRequest, arrival: float) -> Generation:
    """The life of an HTTP request with a prompt; close it whatever happens."""
    context = request.app[CONTEXT]
    generation = Generation(
        context.gateway,
        context.meters,
        asked,
        caller=caller_of(request, request[REQUEST_ID]),
        key=request[KEY],
        gate=context.gate,
        timeout_s=context.config.request_timeout_s,
        arrival=arrival,
        now=context.clock.now,
    )
    request[GENERATION] = generation
    return generation


def owner(request: web.Request) -> str:
    """Whose requests those of this caller are, for the names that it gives them: those of its key,
    or where there are no keys of its address."""
    return caller_of(request).tenant()


def caller_of(request: web.Request, request_id: str = "") -> Caller:
    """Who asks, under the id of one of the requests that come of it."""
    return Caller(
        request_id, request[TENANT], request.app[CONTEXT].proxies.client_of(request), request[TRACE]
    )


async def parsed(
    context: Context,
    key: KnownKey,
    size: int,
    parse: Callable[[list[ServedModel], Pause | None], Parsed],
) -> Parsed:
    """What ``parse`` makes of a body of so many bytes and the models that the key may use. Raises
    ``ApiError``. What takes long is done beside the event loop.

    A model whose engine is being started again may not be known to a new frontend: then the
    request waits to hear of it, as it waits for an adapter that is being loaded.
    """
    try:
        return await _parsed_once(context, key, size, parse)
    except UnknownModel as error:
        await context.awaited.wait(error.name)
        await context.gateway.known(error.name)
    return await _parsed_once(context, key, size, parse)


async def _parsed_once(
    context: Context,
    key: KnownKey,
    size: int,
    parse: Callable[[list[ServedModel], Pause | None], Parsed],
) -> Parsed:
    key, models = context.keys.current(key), context.gateway.models()

    def read(pause: Pause | None) -> Parsed:
        return of_its_own(key, models, lambda own: parse(own, pause))

    return await beside(context, size, read)


async def answered(
    request: web.Request, generation: Generation, renderer: Renderer, keep: Keep | None = None
) -> web.StreamResponse:
    """The answer, streamed or whole. Raises ``ApiError`` where there is none.

    keep: awaited when the answer is all there, before its end goes out.
    """
    if generation.request.stream:
        return await _streamed(request, generation, renderer, keep)
    return await _whole(request.app[CONTEXT].gateway, generation, renderer, keep)


async def _whole(
    gateway: Gateway, generation: Generation, renderer: Renderer, keep: Keep | None
) -> web.Response:
    answers = [Answer() for _ in range(generation.open_choices)]
    if generation.request.beams is not None:
        await search_beams(generation, gateway, answers)
    else:
        await generation.open(answers)
    await generation.finished
    if generation.error is not None:
        raise generation.error
    # Thousands of small objects, or of numbers: others go on.
    if len(answers) > MANY_ANSWERS or any(answer.details or answer.prompt for answer in answers):
        body = await asyncio.to_thread(renderer.body, answers, generation.usage)
    else:
        body = renderer.body(answers, generation.usage)
    if keep is not None:
        await keep()
    return _json(body)


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type=JSON)


async def _streamed(
    request: web.Request, generation: Generation, renderer: Renderer, keep: Keep | None
) -> web.StreamResponse:
    clock, request_id = request.app[CONTEXT].clock, request[REQUEST_ID]
    stream = EventStream(generation, renderer, clock, request_id)
    await generation.open([stream.answer(index) for index in range(generation.open_choices)])
    await generation.accepted
    if generation.error is not None:
        raise generation.error
    headers = {hdrs.CONTENT_TYPE: media_type_of(renderer), **_STREAM_HEADERS}
    response = web.StreamResponse(headers=headers)
    chunked = request.version >= HttpVersion11  # HTTP/1.0: the end of the connection is the end
    if chunked:
        response.enable_chunked_encoding()
    await response.prepare(request)
    try:
        stream.start(request.transport, chunked=chunked, first=first_of(renderer, generation.usage))
        await generation.finished
        rest = await stream.finish(lambda: ended(generation, renderer, request_id))
        if keep is not None and generation.error is None:
            await keep()
    finally:
        stream.close()
    await response.write_eof(rest)
    return response


def ended(generation: Generation, renderer: Renderer, request_id: str) -> bytes:
    """What ends a stream whose rows have all been rendered."""
    error = generation.error
    if error is None:
        return renderer.last(generation.usage)
    error.request_id = request_id
    return renderer.failed(error)
