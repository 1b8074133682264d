"""The handlers that tell about the server: models, health, metrics, version."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import msgspec
from aiohttp import hdrs, web

from penstock import __version__
from penstock.client.gateway_interface import ServedModel
from penstock.protocol.shown_values import show
from penstock.protocol.tasks import GENERATE
from penstock.services.frontend.bodies.responses import (
    Live,
    ModelCard,
    ModelList,
    Ready,
    Version,
)
from penstock.services.frontend.context import CONTEXT, KEY, models_for
from penstock.services.frontend.dialects.anthropic.headers import VERSION_HEADER
from penstock.services.frontend.dialects.anthropic.models import model_info, model_infos
from penstock.services.frontend.errors import ApiError
from penstock.services.frontend.exposition import render
from penstock.services.frontend.keys.known_key import KnownKey
from penstock.services.frontend.keys.model_choice import of_its_own
from penstock.services.frontend.parse import UnknownModel, find_model

METRICS_TIMEOUT_S = 5.0


def json_response(value: Any, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type="application/json"
    )


def _model_card(model: ServedModel, name: str, created: int) -> ModelCard:
    return ModelCard(
        id=name,
        created=created,
        root=model.name,
        parent=model.parent or None,
        max_model_len=model.max_model_len,
        tasks=[*([GENERATE] if model.generates else []), *model.tasks],
        state=model.sleep or msgspec.UNSET,
    )


async def list_models(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    if VERSION_HEADER in request.headers:
        return json_response(model_infos(models_for(request), context.created))
    cards = [
        _model_card(model, name, context.created)
        for model in models_for(request)
        for name in dict.fromkeys((model.name, *model.aliases))
    ]
    return json_response(ModelList(data=cards))


async def show_model(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    asked = partial(find_model, request.match_info["model"])
    model, name = of_its_own(request[KEY], context.gateway.models(), asked)
    if VERSION_HEADER in request.headers:
        return json_response(model_info(model, name, context.created))
    return json_response(_model_card(model, name, context.created))


async def live(request: web.Request) -> web.Response:
    """This process only: its event loop answers."""
    return json_response(Live())


def _key_of(request: web.Request) -> KnownKey | None:
    """Who calls a route that needs no key; ``None``: there are keys, and he has none of them."""
    try:
        return request.app[CONTEXT].keys.of_request(request)
    except ApiError:
        return None


def _named(name: str, models: list[ServedModel], key: KnownKey | None) -> str:
    """The first name of a model. Raises ``ApiError``, which lists no model that the caller may not
    know of."""
    if key is not None:
        return of_its_own(key, models, partial(find_model, name))[0].name
    try:
        return find_model(name, models)[0].name
    except UnknownModel:
        raise UnknownModel(name, f"{show(name)} does not exist") from None


async def ready(request: web.Request) -> web.Response:
    """The system: 200 when a request would be served, for any model or for the one that
    ``?model=`` names. Probes have no key, so it needs none; names of models are listed to those
    alone to whom ``/v1/models`` lists them."""
    gateway, key = request.app[CONTEXT].gateway, _key_of(request)
    named = request.query.get("model")
    readiness = gateway.ready()
    if named:  # one that is awaited has no facts yet
        known = named in readiness.models
        readiness = gateway.ready(named if known else _named(named, gateway.models(), key))
    served = {model.name: model for model in gateway.models()}
    models = {
        name: state
        for name, state in readiness.models.items()
        if key is not None and (key.may_use(served[name]) if name in served else key.may_know(name))
    }
    draining = gateway.draining()
    serves = readiness.ready and not draining
    body = Ready(
        ready=serves,
        status="draining" if draining else "ready" if serves else "not ready",
        parts=readiness.parts,
        models=models,
    )
    return json_response(body, 200 if serves else 503)


async def show_metrics(request: web.Request) -> web.Response:
    try:
        async with asyncio.timeout(METRICS_TIMEOUT_S):
            answer = await request.app[CONTEXT].gateway.metrics()
    except TimeoutError:
        raise ApiError(
            503,
            "The router has not answered, or not heard from all processes since it began; "
            "ask again",
            kind="server_error",
        ) from None
    body, content_type = render(answer, request.headers.get(hdrs.ACCEPT, ""))
    return web.Response(body=body, headers={hdrs.CONTENT_TYPE: content_type})


async def version(request: web.Request) -> web.Response:
    return json_response(Version(version=__version__))
