"""The routes of the Responses API over HTTP."""

from __future__ import annotations

import uuid

import msgspec
from aiohttp import web

from penstock.protocol.shown_values import show
from penstock.services.frontend.bodies.openai_response import (
    DeletedResponse,
    InputTokens,
    ItemList,
)
from penstock.services.frontend.bodies.openai_responses import (
    PromptBody,
    ResponsesBody,
    TokenCountBody,
)
from penstock.services.frontend.body import body_of, decode_body, no_pause
from penstock.services.frontend.connection import Connection
from penstock.services.frontend.context import CONTEXT, REQUEST_ID, TENANT
from penstock.services.frontend.dialect_handler import answered, generation_of, parsed
from penstock.services.frontend.dialects.responses.conversations import (
    Conversations,
    not_found,
    output_of,
)
from penstock.services.frontend.dialects.responses.renderer import ResponsesRenderer
from penstock.services.frontend.dialects.responses.session import Session
from penstock.services.frontend.dialects.responses.socket import Socket
from penstock.services.frontend.dialects.responses.state import (
    RESPONSES,
    RunningResponse,
    kept,
)
from penstock.services.frontend.dialects.responses.store import StoredResponse
from penstock.services.frontend.dialects.responses.token_count import count_tokens
from penstock.services.frontend.dialects.responses.turn import Turn, read_input, turn_of
from penstock.services.frontend.errors import ApiError, bad_request, retry_after
from penstock.services.frontend.system import json_response

PATH = "/v1/responses"
CLOSE_SECONDS = 2.0
"""Time for the client to answer when a WebSocket is closed."""
MAX_LISTED = 100
DEFAULT_LISTED = 20


async def create(request: web.Request) -> web.StreamResponse:
    """``POST /v1/responses``. No status goes out before the prompt is accepted."""
    context, state, owner = request.app[CONTEXT], request.app[RESPONSES], request[TENANT]
    arrival = context.clock.now()
    await context.gateway.known()
    async with body_of(request, context.config.max_body_bytes, context.bodies) as raw:
        body = await parsed(
            context,
            len(raw),
            lambda models, pause: decode_body(raw, ResponsesBody, pause or no_pause),
        )
        stores = state.stores(body.store)
        turn = await turn_for(
            request, body, len(raw), state.conversations(owner), streams=bool(body.stream)
        )
    answer_id = uuid.uuid4().hex
    generation = generation_of(request, turn.request, arrival)
    renderer = ResponsesRenderer(turn, answer_id, stores=stores)
    state.running[owner, renderer.id] = RunningResponse(generation, renderer)

    async def keep() -> None:
        if state.store is not None and stores and renderer.has_ended:
            await state.store.put(owner, renderer.id, kept(turn.own, answer_id, renderer))

    try:
        return await answered(request, generation, renderer, keep)
    finally:
        del state.running[owner, renderer.id]
        generation.close()


async def connect(request: web.Request) -> web.StreamResponse:
    """``GET /v1/responses``, to become a WebSocket."""
    context, state = request.app[CONTEXT], request.app[RESPONSES]
    connection = web.WebSocketResponse(
        timeout=CLOSE_SECONDS, max_msg_size=context.config.max_body_bytes, compress=False
    )
    if not connection.can_prepare(request):
        raise ApiError(
            426,
            f"GET {PATH} is for WebSockets: send the headers of RFC 6455 (Upgrade: websocket), or "
            f"POST {PATH}",
            headers={"Upgrade": "websocket"},
        )
    if context.gateway.draining():
        raise ApiError(
            503,
            "The server is shutting down; connect again",
            kind="overloaded_error",
            headers=retry_after(1.0),
        )
    protocol = request.protocol
    await connection.prepare(request)
    if not isinstance(protocol, Connection):
        raise TypeError("a WebSocket needs a connection of this server")
    socket = Socket(protocol, context.bodies, context.clock.stall_s, request[REQUEST_ID])
    session = Session(request, connection, socket, state, limit_s=state.limit_s)
    state.sessions[session] = None
    try:
        await session.run()
    finally:
        del state.sessions[session]
        session.close()
    return connection


async def turn_for(
    request: web.Request,
    body: ResponsesBody,
    size: int,
    conversations: Conversations,
    *,
    streams: bool,
) -> Turn:
    """A body of so many bytes with all that it continues. Raises ``ApiError``."""
    context = request.app[CONTEXT]
    read = await parsed(context, size, lambda models, pause: read_input(body))
    before = await conversations.before(body.previous_response_id)
    own = await conversations.resolved(read)
    return await parsed(
        context,
        size,
        lambda models, pause: turn_of(body, before, own, models, streams=streams),
    )


async def show_one(request: web.Request) -> web.Response:
    """``GET /v1/responses/{id}``: a stored response, or one that is being generated here."""
    state, owner, name = request.app[RESPONSES], request[TENANT], request.match_info["response"]
    if request.query.get("stream", "false") != "false" or "starting_after" in request.query:
        raise bad_request(
            "stream and starting_after are not supported yet: a stream is sent once; leave them "
            "out to get the whole response",
            "stream",
        )
    running = state.running.get((owner, name))
    if running is not None:
        return json_response(running.renderer.response)
    found = await _found(request)
    return web.Response(body=found.response, content_type="application/json")


async def delete(request: web.Request) -> web.Response:
    """``DELETE /v1/responses/{id}``. What continues it cannot be continued any more."""
    state, owner, name = request.app[RESPONSES], request[TENANT], request.match_info["response"]
    state.refuse_off()
    if state.store is None or not await state.store.delete(owner, name):
        raise not_found(name)
    return json_response(DeletedResponse(id=name))


async def cancel(request: web.Request) -> web.Response:
    """``POST /v1/responses/{id}/cancel``: end a response that is being generated here."""
    state, owner, name = request.app[RESPONSES], request[TENANT], request.match_info["response"]
    running = state.running.get((owner, name))
    if running is None:
        found = await _found(request)
        status = msgspec.json.decode(found.response)["status"]
        raise bad_request(f"Response {show(name)} has ended ({status}) and cannot be cancelled")
    running.renderer.stop("cancelled")
    running.generation.abandon()
    return json_response(running.renderer.cancelled())


async def list_input(request: web.Request) -> web.Response:
    """``GET /v1/responses/{id}/input_items``: all items that a response was made from."""
    state, owner = request.app[RESPONSES], request[TENANT]
    limit, is_newest_first = _limit(request), _order(request)
    found = await _found(request)
    items = []
    if found.previous:
        for before in await state.conversations(owner).chain(found.previous):
            items += msgspec.json.decode(before.input) + output_of(before)
    items += msgspec.json.decode(found.input)
    if is_newest_first:
        items.reverse()
    if (after := request.query.get("after")) is not None:
        places = [index for index, item in enumerate(items) if item["id"] == after]
        if not places:
            raise bad_request(f"after is {show(after)}, which is no item of this input", "after")
        items = items[places[0] + 1 :]
    shown = items[:limit]
    return json_response(
        ItemList(
            data=shown,
            first_id=shown[0]["id"] if shown else None,
            last_id=shown[-1]["id"] if shown else None,
            has_more=len(items) > limit,
        )
    )


def _limit(request: web.Request) -> int:
    given = request.query.get("limit", str(DEFAULT_LISTED))
    if not (given.isascii() and given.isdigit() and 1 <= int(given[:9]) <= MAX_LISTED):
        raise bad_request(f"limit is {show(given)}; 1 to {MAX_LISTED} is allowed", "limit")
    return int(given[:9])


def _order(request: web.Request) -> bool:
    """Whether the newest come first."""
    given = request.query.get("order", "desc")
    if given not in ("asc", "desc"):
        raise bad_request(f"order is {show(given)}; 'asc' or 'desc' is allowed", "order")
    return given == "desc"


async def _found(request: web.Request) -> StoredResponse:
    state, owner, name = request.app[RESPONSES], request[TENANT], request.match_info["response"]
    state.refuse_off()
    found = await state.conversations(owner).find(name)
    if found is None:
        raise not_found(name)
    return found


async def input_tokens(request: web.Request) -> web.Response:
    """``POST /v1/responses/input_tokens``: how many tokens a prompt would have."""
    context, state, owner = request.app[CONTEXT], request.app[RESPONSES], request[TENANT]
    await context.gateway.known()
    async with body_of(request, context.config.max_body_bytes, context.bodies) as raw:
        counted: PromptBody = await parsed(
            context,
            len(raw),
            lambda models, pause: decode_body(raw, TokenCountBody, pause or no_pause),
        )
        body = ResponsesBody(
            **{name: getattr(counted, name) for name in PromptBody.__struct_fields__}
        )
        turn = await turn_for(request, body, len(raw), state.conversations(owner), streams=False)
    return json_response(InputTokens(input_tokens=await count_tokens(request, turn.request)))
