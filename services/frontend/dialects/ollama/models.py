"""What Ollama's API says of the server and its models."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from functools import partial

from aiohttp import web

from penstock.client.gateway_interface import ServedModel
from penstock.services.frontend.bodies.ollama import (
    ModelDetails,
    OllamaError,
    OllamaModel,
    OllamaRunning,
    OllamaShown,
    OllamaTags,
    RunningModel,
    ShowBody,
)
from penstock.services.frontend.bodies.responses import Version
from penstock.services.frontend.bodies.routes import RouteBodies
from penstock.services.frontend.context import CONTEXT, KEY, Context, models_for
from penstock.services.frontend.dialects.interface import Endpoint
from penstock.services.frontend.dialects.ollama.request import model_of
from penstock.services.frontend.errors import bad_request
from penstock.services.frontend.keys.model_choice import of_its_own
from penstock.services.frontend.request_body import read_body
from penstock.services.frontend.system import json_response

SPOKEN = "0.13.0"
"""The version of Ollama whose API this is: clients ask for it to know what they may send."""
NEVER = "9999-12-31T23:59:59Z"
CAPABILITIES = ("completion", "tools")
"""Of every model: a chat may offer tools to any."""


def _time(context: Context) -> str:
    return datetime.fromtimestamp(context.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _named(request: web.Request) -> list[tuple[str, ServedModel]]:
    """Those that the caller may use."""
    return [
        (name, model)
        for model in models_for(request)
        for name in dict.fromkeys((model.name, *model.aliases))
    ]


def _digest(model: ServedModel) -> str:
    """A digest that is the same for all names of a model."""
    return hashlib.sha256(model.name.encode()).hexdigest()


async def tags(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    return json_response(
        OllamaTags(
            models=[
                OllamaModel(
                    name=name,
                    model=name,
                    modified_at=_time(context),
                    digest=_digest(model),
                    details=ModelDetails(),
                )
                for name, model in _named(request)
            ]
        )
    )


async def running(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    return json_response(
        OllamaRunning(
            models=[
                RunningModel(
                    name=name,
                    model=name,
                    modified_at=_time(context),
                    digest=_digest(model),
                    details=ModelDetails(),
                    expires_at=NEVER,
                    context_length=model.max_model_len,
                )
                for name, model in _named(request)
                if not model.sleep
            ]
        )
    )


async def show(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    body = await read_body(request, ShowBody)
    asked = body.model or body.name
    if not asked:
        raise bad_request("model is missing; the name of a served model is required", "model")
    await context.gateway.known()
    model, _ = of_its_own(request[KEY], context.gateway.models(), partial(model_of, asked))
    shown = OllamaShown(
        details=ModelDetails(),
        model_info={
            "general.architecture": "penstock",
            "general.basename": model.name,
            "penstock.context_length": model.max_model_len,
            "penstock.vocab_size": model.vocab_size,
        },
        capabilities=list(CAPABILITIES),
        modified_at=_time(context),
    )
    return json_response(shown)


async def version(request: web.Request) -> web.Response:
    return json_response(Version(version=SPOKEN))


ENDPOINTS: tuple[Endpoint, ...] = (
    ("GET", "/api/tags", tags),
    ("GET", "/api/ps", running),
    ("POST", "/api/show", show),
    ("GET", "/api/version", version),
)
_ABOUT = partial(RouteBodies, fails=OllamaError, group="Ollama")
BODIES = (
    _ABOUT("GET", "/api/tags", OllamaTags, summary="The served models"),
    _ABOUT("GET", "/api/ps", OllamaRunning, summary="The served models that are awake"),
    _ABOUT("POST", "/api/show", OllamaShown, ShowBody, summary="What is known of a model"),
    _ABOUT("GET", "/api/version", Version, summary="The version of Ollama's API that is spoken"),
)
