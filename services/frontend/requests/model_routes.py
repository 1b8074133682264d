"""Routes that load and unload models while the server runs. Its launcher does it; a frontend asks
it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from urllib.parse import quote

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from penstock.protocol.shown_values import show
from penstock.protocol.wire.messages.administration import (
    LOAD_MODEL,
    MODEL_STATES,
    UNLOAD_MODEL,
    LoadModel,
    ModelAnswer,
    ModelState,
)
from penstock.services.frontend.bodies.administration import (
    LoadModelBody,
    ModelStateBody,
    ModelStates,
    UnloadModelBody,
)
from penstock.services.frontend.context import CONTEXT, Context
from penstock.services.frontend.errors import INVALID_REQUEST, ApiError, retry_after
from penstock.services.frontend.keys.known_key import Right
from penstock.services.frontend.request_body import read_body
from penstock.services.frontend.system import json_response

STATES = "/v1/admin/models"
STATE = "/v1/admin/models/{model:.+}"
LOAD = "/v1/admin/models/load"
UNLOAD = "/v1/admin/models/unload"
RIGHTS: dict[str, Right] = dict.fromkeys((STATES, STATE, LOAD, UNLOAD), "admin")
LOOK_SECONDS = 0.25
"""Who waits for a model looks so often how far it is."""
UNLOADED = "unloaded"
_KINDS = {403: "permission_error", 404: "not_found_error", 503: "overloaded_error"}


async def list_states(request: web.Request) -> web.Response:
    """``GET /v1/admin/models``."""
    states = await ask_launcher(request.app[CONTEXT], MODEL_STATES)
    return json_response(ModelStates(data=[_told(one) for one in states]))


async def show_state(request: web.Request) -> web.Response:
    """``GET /v1/admin/models/{name}``."""
    name = request.match_info["model"]
    state = await state_of(request.app[CONTEXT], name)
    if state is None:
        raise unknown_model(name)
    return json_response(_told(state))


async def load_model(request: web.Request) -> web.Response:
    """``POST /v1/admin/models/load``."""
    context, body = request.app[CONTEXT], await read_body(request, LoadModelBody)
    about = LoadModel(body.model, body.name, body.memory_share)
    (state,) = await ask_launcher(context, LOAD_MODEL, msgspec.msgpack.encode(about))

    def is_done(now: ModelState) -> bool:
        # What the launcher knows, this process may hear a moment later.
        return now.state == "failed" or (
            now.state == "ready" and context.gateway.ready(now.name).ready
        )

    name = state.name
    found = await wait_for_state(context, state, body.wait_s, is_done)
    if found is None:
        raise ApiError(409, f"The model {show(name)} was unloaded meanwhile", code="model_unloaded")
    if found.state == "failed":
        message = f"The model {show(name)} cannot be loaded: {found.reason}"
        raise ApiError(500, message, kind="server_error", code="model_load_failed")
    return on_its_way(found, 200 if is_done(found) else 202)


async def unload_model(request: web.Request) -> web.Response:
    """``POST /v1/admin/models/unload``."""
    context, body = request.app[CONTEXT], await read_body(request, UnloadModelBody)
    states = await ask_launcher(context, UNLOAD_MODEL, body.model.encode())
    state = states[0] if states else None
    last = state
    if state is not None:
        state = await wait_for_state(
            context, state, body.wait_s, lambda now: now.state != "draining"
        )
    if state is None or state.state != "draining":  # it is gone, or there is another of its name
        gone = last or ModelState(body.model, [], "", UNLOADED, 0.0)
        gone = msgspec.structs.replace(gone, state=UNLOADED, seconds=0.0, note="")
        return json_response(_told(gone))
    return on_its_way(state, 202)


async def wait_for_state(
    context: Context, state: ModelState, wait_s: float, is_done: Callable[[ModelState], bool]
) -> ModelState | None:
    """The state of a model once it is done, after ``wait_s``, or when this process is to end;
    ``None``: there is no such model any more."""
    loop = asyncio.get_running_loop()
    until, found = loop.time() + wait_s, state
    while not (is_done(found) or context.gateway.draining()):
        if (left := until - loop.time()) <= 0:
            break
        await asyncio.sleep(min(LOOK_SECONDS, left))
        try:
            latest = await state_of(context, state.name)
        except ApiError as error:
            if error.status != 503:
                raise
            continue  # the launcher has much to do
        if latest is None:
            return None
        found = latest
    return found


async def state_of(context: Context, name: str) -> ModelState | None:
    """The state of the model that has the name, if there is one."""
    states = await ask_launcher(context, MODEL_STATES)
    return next((one for one in states if name in (one.name, *one.aliases)), None)


async def ask_launcher(
    context: Context, what: str = MODEL_STATES, about: bytes = b""
) -> list[ModelState]:
    """What the launcher says. Raises ``ApiError``: what it refuses, or that it cannot be asked."""
    if not any(peer.service == "launcher" for peer in context.gateway.members()):
        raise ApiError(
            501,
            "No `penstock serve` runs this server, so nobody here can load or unload models: start "
            "a model's processes by hand (`penstock worker --router ADDRESS --engine NAME FOLDER`, "
            "the same for `scheduler`, and `penstock tokenizer --router ADDRESS FOLDER`), and end "
            "them with SIGTERM",
            kind="server_error",
            code="no_launcher",
        )
    told = await context.gateway.ask("launcher", what, about)
    if not told:
        raise ApiError(
            503,
            "The launcher did not answer; GET /v1/admin/models tells what it is doing",
            kind="overloaded_error",
            code="launcher_silent",
            headers=retry_after(1.0),
        )
    answer = msgspec.msgpack.decode(told[0], type=ModelAnswer)
    if answer.status != 200:
        kind = _KINDS.get(answer.status, INVALID_REQUEST)
        message = answer.message[:1].upper() + answer.message[1:]
        later = retry_after(1.0 if answer.status == 503 else None)
        raise ApiError(answer.status, message, kind=kind, code=answer.code, headers=later)
    return answer.models


def unknown_model(name: str) -> ApiError:
    """The launcher has none of that name."""
    return ApiError(
        404,
        f"The launcher knows no model {show(name)}; one that was unloaded is forgotten",
        kind="not_found_error",
        code="model_not_found",
    )


def on_its_way(state: ModelState, status: int) -> web.Response:
    """The state of a model; with a 202 also where it may be asked for."""
    response = json_response(_told(state), status)
    if status == 202:
        response.headers["Location"] = f"{STATES}/{quote(state.name)}"
    return response


def _told(state: ModelState) -> ModelStateBody:
    return ModelStateBody(
        id=state.name,
        aliases=state.aliases,
        folder=state.folder,
        state=state.state,
        seconds=state.seconds,
        reason=state.reason or None,
        note=state.note or None,
    )


ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("GET", STATES, list_states),
    ("GET", STATE, show_state),
    ("POST", LOAD, load_model),
    ("POST", UNLOAD, unload_model),
)
