"""Routes that put models to sleep and wake them, with the names of vLLM's. The server's launcher
does it; a frontend asks it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from penstock.protocol.shown_values import show
from penstock.protocol.wire.messages.administration import SLEEP_MODEL, WAKE_MODEL, ModelState
from penstock.protocol.wire.messages.membership import Sleep
from penstock.services.frontend.bodies.administration import IsSleeping, SleepBody, WakeBody
from penstock.services.frontend.context import CONTEXT, Context
from penstock.services.frontend.errors import ApiError, bad_request
from penstock.services.frontend.keys.known_key import Right
from penstock.services.frontend.request_body import read_body
from penstock.services.frontend.requests.model_routes import (
    ask_launcher,
    on_its_way,
    state_of,
    unknown_model,
    wait_for_state,
)
from penstock.services.frontend.system import json_response

SLEEP, WAKE, IS_SLEEPING = "/sleep", "/wake_up", "/is_sleeping"
RIGHTS: dict[str, Right] = dict.fromkeys((SLEEP, WAKE, IS_SLEEPING), "admin")
Body = TypeVar("Body", SleepBody, WakeBody)


async def sleep(request: web.Request) -> web.Response:
    """``POST /sleep``."""
    body = await _asked(request, SleepBody)
    return await _answer(request, body, SLEEP_MODEL, lambda now: now.state == Sleep.ASLEEP)


async def wake_up(request: web.Request) -> web.Response:
    """``POST /wake_up``."""
    context, body = request.app[CONTEXT], await _asked(request, WakeBody)

    def is_done(now: ModelState) -> bool:
        # What the launcher knows, this process may hear a moment later.
        is_ready = now.state == "ready" and context.gateway.ready(now.name).ready
        return is_ready or bool(now.reason)

    return await _answer(request, body, WAKE_MODEL, is_done)


async def is_sleeping(request: web.Request) -> web.Response:
    """``GET /is_sleeping``."""
    context, query = request.app[CONTEXT], dict(request.query)
    name = query.pop("model", "")
    if query:
        raise bad_request(f"{next(iter(query))} is unknown; known are: model", next(iter(query)))
    state = await _state(context, name)
    return json_response(IsSleeping(is_sleeping=state.state != "ready", state=state.state))


async def _asked(request: web.Request, declared: type[Body]) -> Body:
    """The body; where there is none, as clients of vLLM send it, the query says the same."""
    if request.body_exists:
        return await read_body(request, declared)
    try:
        return msgspec.convert(dict(request.query), declared, strict=False)
    except msgspec.ValidationError as error:
        raise bad_request(f"the query: {error}") from None


async def _state(context: Context, name: str) -> ModelState:
    """Of the model of that name; without one of the only one. Raises ``ApiError``."""
    if name:
        state = await state_of(context, name)
        if state is None:
            raise unknown_model(name)
        return state
    states = await ask_launcher(context)
    if len(states) != 1:
        known = ", ".join(show(one.name) for one in states)
        raise bad_request(f"model is missing; this server has {known}", "model")
    return states[0]


async def _answer(
    request: web.Request,
    body: SleepBody | WakeBody,
    what: str,
    is_done: Callable[[ModelState], bool],
) -> web.Response:
    context = request.app[CONTEXT]
    name = body.model or (await _state(context, "")).name
    (state,) = await ask_launcher(context, what, name.encode())
    found = await wait_for_state(context, state, body.wait_s, is_done)
    if found is None:
        raise unknown_model(name)
    if found.reason and what == WAKE_MODEL:
        message = f"The model {show(found.name)} cannot be woken: {found.reason}"
        raise ApiError(500, message, kind="server_error", code="model_wake_failed")
    return on_its_way(found, 200 if is_done(found) else 202)


ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", SLEEP, sleep),
    ("POST", WAKE, wake_up),
    ("GET", IS_SLEEPING, is_sleeping),
)
