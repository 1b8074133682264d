"""Routes about requests and the server: why one was slow, ending one, draining, the log's level."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Literal

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from penstock.protocol.process import logs
from penstock.protocol.shown_values import show
from penstock.protocol.wire.messages.administration import (
    ABORT_REQUESTS,
    FIND_REQUEST,
    LOG_LEVEL,
    REQUEST_PROGRESS,
    Ask,
    EngineProgress,
    FoundRequest,
    RequestName,
    RequestNames,
    Told,
)
from penstock.services.frontend.bodies.administration import (
    Aborted,
    Draining,
    EmptyBody,
    LogLevel,
    LogLevelBody,
    RequestLife,
)
from penstock.services.frontend.context import CONTEXT, KEY, Context
from penstock.services.frontend.dialect_handler import owner
from penstock.services.frontend.errors import ApiError
from penstock.services.frontend.keys.known_key import Right
from penstock.services.frontend.request_body import read_body
from penstock.services.frontend.requests.history import Found, with_progress
from penstock.services.frontend.system import json_response

REQUEST = "/v1/requests/{request}"
DRAIN = "/v1/admin/drain"
ABORT = "/v1/admin/requests/{request}/abort"
LEVEL = "/v1/admin/log_level"
MAX_ID = 128
Scope = Literal["server", "frontend"]
BEGIN_DRAIN = web.AppKey[Callable[[], Scope]]("begin_drain")
"""Begins to end the server, or this frontend alone; says which."""
RIGHTS: dict[str, Right] = {DRAIN: "admin", ABORT: "admin", LEVEL: "admin"}


async def show_request(request: web.Request) -> web.Response:
    """``GET /v1/requests/{id}``: of the caller's own, or with an admin key of anybody's."""
    context, name = request.app[CONTEXT], request.match_info["request"]
    whose = None if "admin" in request[KEY].rights else owner(request)
    found = context.history.find(name, whose)
    if found is None and len(name) <= MAX_ID:
        asked = msgspec.msgpack.encode(RequestName(name, whose))
        answers = await context.gateway.ask("frontend", FIND_REQUEST, asked)
        found = max(
            map(_found_elsewhere, answers), key=lambda one: one.life.states[0].at, default=None
        )
    if found is None:
        raise ApiError(
            404,
            f"There is no request {show(name)} of this caller; ended ones are kept for an hour at "
            "most, in the frontend that had them",
            kind="not_found_error",
            code="request_not_found",
        )
    return json_response(await _with_engines(context, found))


def _found_elsewhere(told: bytes) -> Found:
    found = msgspec.msgpack.decode(told, type=FoundRequest)
    return Found(msgspec.json.decode(found.life, type=RequestLife), found.open_ids)


async def _with_engines(context: Context, found: Found) -> RequestLife:
    """With what the engines say that have it; within the time that any question has."""
    if not found.open_ids:
        return found.life
    asked = msgspec.msgpack.encode(found.open_ids)
    answers = await context.gateway.ask("scheduler", REQUEST_PROGRESS, asked)
    told = (msgspec.msgpack.decode(one, type=list[EngineProgress]) for one in answers)
    return with_progress(found, list(itertools.chain.from_iterable(told)))


async def abort_request(request: web.Request) -> web.Response:
    """``POST /v1/admin/requests/{id}/abort``."""
    context, name = request.app[CONTEXT], request.match_info["request"]
    await read_body(request, EmptyBody)
    count = 0
    if len(name) <= MAX_ID:
        (count,) = await abort_everywhere(context, RequestNames([name]))
    if not count:
        raise ApiError(
            404,
            f"No request {show(name)} runs",
            kind="not_found_error",
            code="request_not_found",
        )
    return json_response(Aborted(id=name, aborted=count))


async def drain(request: web.Request) -> web.Response:
    """``POST /v1/admin/drain``: as SIGTERM does."""
    await read_body(request, EmptyBody)
    begin = request.app.get(BEGIN_DRAIN)
    if begin is None:
        raise ApiError(400, "This frontend is no process of its own", code="cannot_drain")
    return json_response(Draining(scope=begin()), 202)


async def change_log_level(request: web.Request) -> web.Response:
    """``POST /v1/admin/log_level``: in all processes of the server but the launcher."""
    body = await read_body(request, LogLevelBody)
    logs.change_level(body.level)
    answers = await request.app[CONTEXT].gateway.ask("", LOG_LEVEL, body.level.encode())
    return json_response(LogLevel(level=body.level, processes=1 + len(answers)))


async def abort_everywhere(context: Context, names: RequestNames) -> list[int]:
    """End what runs under these ids, in all frontends; returns of each how many requests that
    were. The others are asked once."""
    if not names.ids:
        return []
    asked = msgspec.msgpack.encode(names)
    counts = [aborted(context, names)]
    for told in await context.gateway.ask("frontend", ABORT_REQUESTS, asked):
        counts.append(msgspec.msgpack.decode(told, type=list[int]))
    return [sum(of_one) for of_one in zip(*counts, strict=True)]


def aborted(context: Context, names: RequestNames) -> list[int]:
    """End what runs here under these ids; returns of each how many requests that were."""
    who = "an administrator" if names.owner is None else "its own client"
    error = ApiError(499, f"The request was aborted by {who}", code="aborted")
    found = context.history.all_running(names.ids, names.owner)
    for generation in itertools.chain.from_iterable(found):
        generation.fail(error)
    return [len(of_one) for of_one in found]


def answer(context: Context, asked: Ask) -> Told:
    """What another frontend is told."""
    found = b""
    with contextlib.suppress(msgspec.MsgspecError):
        if asked.what == FIND_REQUEST:
            name = msgspec.msgpack.decode(asked.about, type=RequestName)
            if known := context.history.find(name.id, name.owner):
                life = msgspec.json.encode(known.life)
                found = msgspec.msgpack.encode(FoundRequest(life, known.open_ids))
        elif asked.what == ABORT_REQUESTS:
            names = msgspec.msgpack.decode(asked.about, type=RequestNames)
            if any(counts := aborted(context, names)):
                found = msgspec.msgpack.encode(counts)
    return Told(asked.number, found)


ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("GET", REQUEST, show_request),
    ("POST", DRAIN, drain),
    ("POST", ABORT, abort_request),
    ("POST", LEVEL, change_log_level),
)
