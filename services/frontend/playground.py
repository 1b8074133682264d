"""The playground: a page to talk to the model, and the data that it shows.

The page loads nothing from elsewhere, runs no inline script, and its policy forbids both, so that a
model's text can never become markup or code.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from penstock import __version__
from penstock.protocol.process.pipeline_status import pipeline_status
from penstock.protocol.sampling import DEFAULTS, PARAMETERS, Parameter
from penstock.protocol.wire.messages.membership import MetricsAnswer
from penstock.services.frontend.context import CONTEXT, models_for
from penstock.services.frontend.page_files import PageFiles
from penstock.services.frontend.system import json_response

INDEX = "index.html"
_MODULES = (
    *("api", "arguments", "blocks", "calculator", "chat", "clock", "controls", "conversation"),
    *("dom", "inline", "layout", "library", "main", "markdown", "marked", "models", "panel"),
    *("render", "rounds", "settings", "status", "step", "step_view", "storage", "thinking"),
    *("toast", "tool_choices", "tools", "turn", "turn_view"),
)
FILES = (
    INDEX,
    *("icon.svg", "base.css", "chat.css", "page.css", "panels.css", "marked-license.txt"),
    *(f"{name}.js" for name in _MODULES),
)
"""All that there is to fetch, each with a route of its own."""
STATUS_TIMEOUT_S = 3.0
UNSEEN = frozenset({"logprobs", "prompt_logprobs", "echo", "structured_outputs", "sampler_order"})
"""Parameters that the page has no way to set, or whose results it does not show."""


_PAGE = PageFiles("page", FILES)


# --- the sampling controls


def _property(parameter: Parameter) -> dict[str, Any]:
    """JSON schema of one parameter; "or null" is left out, as null means left out."""
    schema = msgspec.json.schema(parameter.type)
    branches = [s for s in schema.pop("anyOf", []) if s.get("type") != "null"]
    if len(branches) == 1:
        schema |= branches[0]
    elif branches:
        schema["anyOf"] = branches
    schema["description"] = parameter.description
    schema["default"] = parameter.default
    if parameter.name in DEFAULTS:
        schema["x-fallback"] = DEFAULTS[parameter.name]
    return schema


def sampling_schema() -> dict[str, Any]:
    """The sampling parameters as one JSON schema.

    ``x-fallback`` is what holds where the request, and then the model's generation config, say
    nothing.
    """
    return {
        "type": "object",
        "properties": {
            name: _property(one) for name, one in PARAMETERS.items() if name not in UNSEEN
        },
    }


_SCHEMA = msgspec.json.encode(sampling_schema())


async def schema(request: web.Request) -> web.Response:
    return web.Response(body=_SCHEMA, content_type="application/json")


# --- the live panel


async def status(request: web.Request) -> web.Response:
    """The system as the panel shows it; it answers while the router is away too."""
    gateway = request.app[CONTEXT].gateway
    readiness = gateway.ready()
    try:
        async with asyncio.timeout(STATUS_TIMEOUT_S):
            answer = await gateway.metrics()
    except TimeoutError:
        answer = MetricsAnswer([])
    return json_response(
        {
            "version": __version__,
            "ready": readiness.ready,
            "draining": gateway.draining(),
            "parts": readiness.parts,
            "models": [
                {"name": model.name, "max_model_len": model.max_model_len}
                for model in models_for(request)
            ],
            **pipeline_status(answer, gateway.members()),
        }
    )


_PAGE_ROUTES = (
    ("GET", "/", _PAGE.handler(INDEX)),
    *(("GET", f"/playground/{name}", _PAGE.handler(name)) for name in FILES if name != INDEX),
)
ROUTES: tuple[tuple[str, str, Handler], ...] = (
    *_PAGE_ROUTES,
    ("GET", "/playground/schema", schema),
    ("GET", "/playground/status", status),
)
OPEN_ROUTES = frozenset(path for _, path, _ in _PAGE_ROUTES)
"""The page asks for the key itself, so it comes without one. The data routes want it."""
