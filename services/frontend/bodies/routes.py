"""What each route with JSON takes and gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

import msgspec

from penstock.protocol.declared import Declared
from penstock.services.frontend.bodies import anthropic, anthropic_answers, responses
from penstock.services.frontend.bodies.requests import ChatBody, CompletionBody


class RouteBodies(NamedTuple):
    method: str
    path: str
    gives: type[responses.Given]
    takes: type[Declared] | None = None
    streams: Any = None
    """Each event of an answer that is streamed: a type, or several as a union."""
    fails: type[responses.Given] = responses.ErrorBody


ROUTE_BODIES = (
    RouteBodies(
        "POST", "/v1/chat/completions", responses.ChatCompletion, ChatBody, responses.ChatChunk
    ),
    RouteBodies(
        "POST", "/v1/completions", responses.Completion, CompletionBody, responses.CompletionChunk
    ),
    RouteBodies(
        "POST",
        "/v1/messages",
        anthropic_answers.AnsweredMessage,
        anthropic.MessagesBody,
        anthropic_answers.MessageEvent,
        anthropic_answers.MessageErrorBody,
    ),
    RouteBodies(
        "POST",
        "/v1/messages/count_tokens",
        anthropic_answers.TokenCount,
        anthropic.CountTokensBody,
        fails=anthropic_answers.MessageErrorBody,
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
    for route in ROUTE_BODIES:
        for body in (route.fails, route.takes, route.gives, route.streams):
            if body is not None:
                yield from get_args(body) or (body,)
    yield from (anthropic_answers.ModelInfo, anthropic_answers.ModelInfoList)
