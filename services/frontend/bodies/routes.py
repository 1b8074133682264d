"""What each route with JSON takes and gives. An error of any of them is an ``ErrorBody``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from penstock.protocol.declared import Declared
from penstock.services.frontend.bodies import responses
from penstock.services.frontend.bodies.requests import ChatBody, CompletionBody


class RouteBodies(NamedTuple):
    method: str
    path: str
    gives: type[responses.Given]
    takes: type[Declared] | None = None
    streams: type[responses.Given] | None = None
    """Each event of an answer that is streamed."""


ROUTE_BODIES = (
    RouteBodies(
        "POST", "/v1/chat/completions", responses.ChatCompletion, ChatBody, responses.ChatChunk
    ),
    RouteBodies(
        "POST", "/v1/completions", responses.Completion, CompletionBody, responses.CompletionChunk
    ),
    RouteBodies("GET", "/v1/models", responses.ModelList),
    RouteBodies("GET", "/v1/models/{model:.+}", responses.ModelCard),
    RouteBodies("GET", "/live", responses.Live),
    RouteBodies("GET", "/health", responses.Ready),
    RouteBodies("GET", "/ready", responses.Ready),
    RouteBodies("GET", "/version", responses.Version),
)


def declared_bodies() -> Iterator[type[msgspec.Struct]]:
    """All of them."""
    yield responses.ErrorBody
    for route in ROUTE_BODIES:
        yield from (body for body in (route.takes, route.gives, route.streams) if body is not None)
