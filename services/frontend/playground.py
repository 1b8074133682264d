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
from penstock.protocol.process.metrics import merge
from penstock.protocol.sampling import DEFAULTS, PARAMETERS, Parameter
from penstock.protocol.wire.messages.membership import (
    MetricsAnswer,
    MetricsReport,
    Peer,
)
from penstock.services.frontend.context import CONTEXT
from penstock.services.frontend.page_files import PageFiles
from penstock.services.frontend.system import json_response

INDEX = "index.html"
_MODULES = (
    *("api", "blocks", "chat", "controls", "conversation", "dom", "inline", "layout", "library"),
    *("main", "markdown", "marked", "models", "panel", "render", "settings", "status", "storage"),
    *("thinking", "toast", "turn", "turn_view"),
)
FILES = (
    INDEX,
    *("icon.svg", "base.css", "chat.css", "page.css", "panels.css", "marked-license.txt"),
    *(f"{name}.js" for name in _MODULES),
)
"""All that there is to fetch, each with a route of its own."""
STATUS_TIMEOUT_S = 3.0
UNSEEN = frozenset({"logprobs", "prompt_logprobs", "echo", "structured_outputs"})
"""Parameters that the page has no way to set, or whose results it does not show."""
PIPELINE = ("frontend", "tokenizer", "router", "scheduler", "worker")
"""The services in the order in which the panel shows them."""
_WAITING_HOPS = ("router", "tokenizer", "scheduler")
"""Where requests wait; those at hop ``frontend`` are all that are open."""


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


def _sum(report: MetricsReport, name: str, *labels: str) -> int:
    """A counter or gauge without fraction; 0 where nobody has reported it."""
    wanted = list(labels)
    return sum(int(s.values[0]) for s in report.samples if s.name == name and s.labels == wanted)


def _living(answer: MetricsAnswer) -> dict[int, MetricsReport]:
    return {one.incarnation: one.report for one in answer.processes if one.incarnation}


def _engine_facts(report: MetricsReport) -> dict[str, list[str]]:
    """The devices and dtypes of the living workers, each once."""
    known = [sample.labels for sample in report.samples if sample.name == "engine_info"]
    devices, dtypes = ({labels[place] for labels in known} - {""} for place in (0, 1))
    return {"devices": sorted(devices), "dtypes": sorted(dtypes)}


def _load(peer: Peer, report: MetricsReport | None) -> int:
    """Requests in the process. From its counters: the membership tells of a load only when
    something else changes."""
    if report is None:
        return 0
    if peer.service == "scheduler":
        return _sum(report, "num_requests_running") + _sum(report, "num_requests_waiting")
    return _sum(report, "queue_depth", peer.service)


def _process(peer: Peer, report: MetricsReport | None) -> dict[str, Any]:
    return {
        "service": peer.service,
        "pid": peer.identity.pid,
        "host": peer.identity.host,
        "engine": peer.identity.engine,
        "rank": peer.identity.rank,
        "phase": peer.phase,
        "note": peer.note,
        "load": _load(peer, report),
    }


def _place(peer: Peer) -> tuple[int, str, int, int]:
    order = PIPELINE.index(peer.service) if peer.service in PIPELINE else len(PIPELINE)
    return order, peer.identity.engine, peer.identity.rank, peer.identity.pid


def pipeline_status(answer: MetricsAnswer, members: list[Peer]) -> dict[str, Any]:
    """What the live panel shows of the pipeline.

    Counters include the dead processes' share, so they never fall while a router lives; gauges
    are the living ones' only. Values are as old as the newest beats (half a second).
    """
    everyone = merge(one.report for one in answer.processes)
    living = _living(answer)
    now = merge(living.values())
    return {
        **_engine_facts(now),
        "running": _sum(now, "num_requests_running"),
        "waiting": sum(_sum(now, "queue_depth", hop) for hop in _WAITING_HOPS),
        "queue_depth": {hop: _sum(now, "queue_depth", hop) for hop in PIPELINE[:-1]},
        "kv_blocks_used": _sum(now, "kv_blocks_used"),
        "kv_blocks_total": _sum(now, "kv_blocks_total"),
        "prefix_cache_query_tokens": _sum(everyone, "prefix_cache_query_tokens_total"),
        "prefix_cache_hit_tokens": _sum(everyone, "prefix_cache_hit_tokens_total"),
        "prompt_tokens": _sum(everyone, "prompt_tokens_total"),
        "generation_tokens": _sum(everyone, "generation_tokens_total"),
        "processes": [
            _process(peer, living.get(peer.incarnation)) for peer in sorted(members, key=_place)
        ],
    }


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
                for model in gateway.models()
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
