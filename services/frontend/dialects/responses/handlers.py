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
from penstock.services.frontend.context import CONTEXT, KEY, TENANT
from penstock.services.frontend.dialect_handler import answered, generation_of, parsed
from penstock.services.frontend.dialects.responses.conversations import (
    Conversations,
    items_of,
    not_found,
)
from penstock.services.frontend.dialects.responses.held_responses import held_responses
from penstock.services.frontend.dialects.responses.renderer import ResponsesRenderer
from penstock.services.frontend.dialects.responses.session import Session
from penstock.services.frontend.dialects.responses.state import (
    RESPONSES,
    RunningResponse,
    kept,
)
from penstock.services.frontend.dialects.responses.store import StoredResponse
from penstock.services.frontend.dialects.responses.token_count import count_tokens
from penstock.services.frontend.dialects.responses.truncation import whole_turn
from penstock.services.frontend.dialects.responses.turn import Turn, read_input
from penstock.services.frontend.errors import bad_request
from penstock.services.frontend.system import json_response
from penstock.services.frontend.websockets.handshake import connected

PATH = "/v1/responses"
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
            request[KEY],
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
    return await connected(request, Session, instead=f", or POST {PATH}")


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
    read = await parsed(context, request[KEY], size, lambda models, pause: read_input(body))
    with held_responses(context) as held:
        before = await conversations.before(body.previous_response_id, held)
        own = await conversations.resolved(read, held)
        return await whole_turn(
            context,
            request[KEY],
            body,
            size + held.size,
            before,
            own,
            lambda asked: count_tokens(request, asked),
            streams=streams,
        )


async def show_one(request: web.Request) -> web.Response:
    """``GET /v1/responses/{id}``: a stored response, or one that is being generated here."""
    state, owner, name = request.app[RESPONSES], request[TENANT], request.match_info["response"]
    if request.query.get("stream", "false") != "false" or "starting_after" in request.query:
        raise bad_request(
            "stream and starting_after resume the stream of a background response, and there are "
            "none here (background): a stream is sent once; leave them out to get the whole "
            "response",
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
    with held_responses(request.app[CONTEXT]) as held:
        chain = await state.conversations(owner).chain(found.previous, held)
        held.take(found)
        items = await held.read(
            lambda pause: items_of(chain, pause or no_pause) + msgspec.json.decode(found.input)
        )
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
            request[KEY],
            len(raw),
            lambda models, pause: decode_body(raw, TokenCountBody, pause or no_pause),
        )
        body = ResponsesBody(
            **{name: getattr(counted, name) for name in PromptBody.__struct_fields__}
        )
        turn = await turn_for(request, body, len(raw), state.conversations(owner), streams=False)
    tokens = await count_tokens(request, turn.request, is_part=False)
    return json_response(InputTokens(input_tokens=tokens))
