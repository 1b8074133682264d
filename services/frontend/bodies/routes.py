"""What each route takes and gives, for checks, tests and the description at /openapi.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from penstock.protocol.declared import Declared
from penstock.services.frontend.bodies import administration, responses
from penstock.services.frontend.bodies.anthropic_answers import ModelInfo, ModelInfoList

JSON = "application/json"
EVENT_STREAM = "text/event-stream"
JSON_LINES = "application/x-ndjson"
NOTHING: Mapping[Any, Any] = MappingProxyType({})


class RouteBodies(NamedTuple):
    """One method of one path."""

    method: str
    path: str
    gives: Any = None
    """The type of a JSON answer; ``None`` where the answer is none."""
    takes: type[Declared] | None = None
    """The type of the JSON body."""
    streams: Any = None
    """The type of each event of an answer that is streamed; or several, as a union."""
    fails: type[msgspec.Struct] = responses.ErrorBody
    """The type of every answer with a status from 400 on."""
    summary: str = ""
    stream_type: str = EVENT_STREAM
    media_type: str = JSON
    """Of an answer that is not streamed."""
    others: Mapping[int, type[msgspec.Struct]] = NOTHING
    """Answers with a status of their own that are no errors, by it."""
    or_gives: Sequence[Any] = ()
    """What a JSON answer may be instead."""
    query: Mapping[str, str] = NOTHING
    """Parameters of the query, each with what it means."""
    group: str = "Server"
    upgrades: bool = False
    """The route leads to a WebSocket."""
    messages: tuple[Any, Any] | None = None
    """What a client sends there, and what it gets: unions of types."""


SERVER_ROUTES = (
    RouteBodies(
        "GET",
        "/v1/models",
        responses.ModelList,
        or_gives=(ModelInfoList,),
        summary="The served models; in Anthropic's shape with the header anthropic-version",
    ),
    RouteBodies(
        "GET",
        "/v1/models/{model:.+}",
        responses.ModelCard,
        or_gives=(ModelInfo,),
        summary="One served model; likewise",
    ),
    RouteBodies("GET", "/live", responses.Live, summary="This process answers"),
    *(
        RouteBodies(
            "GET",
            path,
            responses.Ready,
            summary="Whether requests would be served",
            others={503: responses.Ready},
            query={"model": "Ask for one model, by one of its names."},
        )
        for path in ("/health", "/ready")
    ),
    RouteBodies(
        "GET",
        "/metrics",
        summary="Metrics of all processes",
        media_type="text/plain",
    ),
    RouteBodies(
        "GET",
        "/v1/requests/{request}",
        administration.RequestLife,
        summary="What became of a request, by its x-request-id: states, times, sizes",
    ),
    RouteBodies(
        "POST",
        "/v1/admin/requests/{request}/abort",
        administration.Aborted,
        administration.EmptyBody,
        summary="End a request (role admin)",
    ),
    RouteBodies(
        "POST",
        "/v1/admin/drain",
        takes=administration.EmptyBody,
        summary="Finish what runs, and end the server (role admin)",
        others={202: administration.Draining},
    ),
    RouteBodies(
        "POST",
        "/v1/admin/log_level",
        administration.LogLevel,
        administration.LogLevelBody,
        summary="Change the log's level in all processes (role admin)",
    ),
    RouteBodies(
        "GET",
        "/v1/admin/models",
        administration.ModelStates,
        summary="The models that the server's launcher runs, with their states (role admin)",
    ),
    RouteBodies(
        "GET",
        "/v1/admin/models/{model:.+}",
        administration.ModelStateBody,
        summary="The state of one of them, by one of its names (role admin)",
    ),
    RouteBodies(
        "POST",
        "/v1/admin/models/load",
        administration.ModelStateBody,
        administration.LoadModelBody,
        summary="Load a model (role admin); 202 while it is loading",
        others={202: administration.ModelStateBody},
    ),
    RouteBodies(
        "POST",
        "/v1/admin/models/unload",
        administration.ModelStateBody,
        administration.UnloadModelBody,
        summary="Unload a model (role admin); 202 while what runs is finished",
        others={202: administration.ModelStateBody},
    ),
    RouteBodies(
        "POST",
        "/sleep",
        administration.ModelStateBody,
        administration.SleepBody,
        summary="Let a model sleep until its next request (role admin); 202 while it falls asleep",
        others={202: administration.ModelStateBody},
    ),
    RouteBodies(
        "POST",
        "/wake_up",
        administration.ModelStateBody,
        administration.WakeBody,
        summary="Wake a model (role admin); 202 while it wakes, or waits for its turn",
        others={202: administration.ModelStateBody},
    ),
    RouteBodies(
        "GET",
        "/is_sleeping",
        administration.IsSleeping,
        summary="Whether a model sleeps (role admin)",
        query={"model": "One of its names; where there is one model, none."},
    ),
    RouteBodies(
        "POST",
        "/v1/load_lora_adapter",
        takes=administration.LoadAdapterBody,
        summary="Load an adapter and serve it as a model (role admin)",
        media_type="text/plain",
    ),
    RouteBodies(
        "POST",
        "/v1/unload_lora_adapter",
        takes=administration.UnloadAdapterBody,
        summary="Serve an adapter no more (role admin); what runs with it ends",
        media_type="text/plain",
    ),
    RouteBodies("GET", "/version", responses.Version, summary="The server's version"),
    RouteBodies("GET", "/openapi.json", dict[str, Any], summary="This description"),
    RouteBodies("GET", "/docs", summary="This description as a page", media_type="text/html"),
    RouteBodies("GET", "/", summary="The playground", media_type="text/html"),
    RouteBodies(
        "GET",
        "/playground/schema",
        dict[str, Any],
        summary="The sampling parameters as a JSON schema",
    ),
    RouteBodies(
        "GET", "/playground/status", dict[str, Any], summary="What the playground's panel shows"
    ),
)
"""The routes that belong to no dialect, but for the files of pages."""


def structs_of(routes: Sequence[RouteBodies]) -> Iterator[Any]:
    """The types of all bodies."""
    for route in routes:
        found = (
            route.takes,
            route.gives,
            *route.or_gives,
            route.streams,
            route.fails,
            *(route.messages or ()),
        )
        yield from (one for one in (*found, *route.others.values()) if one is not None)
