"""The Responses API among the dialects: its routes, and what each takes and gives."""

from __future__ import annotations

from functools import partial
from typing import NoReturn

from penstock.client.gateway_interface import ServedModel
from penstock.services.frontend.bodies.openai_response import (
    DeletedResponse,
    InputTokens,
    ItemList,
    ResponseEvent,
    ResponseObject,
)
from penstock.services.frontend.bodies.openai_responses import ResponsesBody, TokenCountBody
from penstock.services.frontend.bodies.responses import ErrorBody
from penstock.services.frontend.bodies.routes import RouteBodies
from penstock.services.frontend.body import Pause
from penstock.services.frontend.dialects.interface import Endpoint
from penstock.services.frontend.dialects.responses import handlers
from penstock.services.frontend.errors import ApiError
from penstock.services.frontend.parse import GenerateRequest

_PATH = handlers.PATH
_ONE = _PATH + "/{response}"
_of = partial(RouteBodies, group="Responses")


class ResponsesDialect:
    """Its requests continue others and are kept, so every route has a handler of its own."""

    name = "responses"
    routes: tuple[str, ...] = ()
    endpoints: tuple[Endpoint, ...] = (
        ("POST", _PATH, handlers.create),
        ("GET", _PATH, handlers.connect),
        ("POST", f"{_PATH}/input_tokens", handlers.input_tokens),
        ("GET", _ONE, handlers.show_one),
        ("DELETE", _ONE, handlers.delete),
        ("POST", f"{_ONE}/cancel", handlers.cancel),
        ("GET", f"{_ONE}/input_items", handlers.list_input),
    )
    bodies = (
        _of(
            "POST",
            _PATH,
            ResponseObject,
            ResponsesBody,
            ResponseEvent,
            summary="Answer an input of items",
        ),
        _of(
            "GET",
            _PATH,
            summary="The same on a WebSocket",
            upgrades=True,
            others={426: ErrorBody},
        ),
        _of(
            "POST",
            f"{_PATH}/input_tokens",
            InputTokens,
            TokenCountBody,
            summary="How many tokens a prompt has",
        ),
        _of("GET", _ONE, ResponseObject, summary="A response that is kept, or generated here"),
        _of("DELETE", _ONE, DeletedResponse, summary="Forget a response"),
        _of("POST", f"{_ONE}/cancel", ResponseObject, summary="End a response generated here"),
        _of(
            "GET",
            f"{_ONE}/input_items",
            ItemList,
            summary="All items that a response was made from",
            query={
                "limit": "Items at once, 1 to 100; 20 by default.",
                "order": "asc or desc, the default.",
                "after": "The id of the item to begin behind.",
            },
        ),
    )

    def parse(
        self, raw: bytes, models: list[ServedModel], pause: Pause | None = None
    ) -> GenerateRequest:
        raise _has_handlers()

    def renderer(self, request: GenerateRequest, answer_id: str, created: int) -> NoReturn:
        raise _has_handlers()

    def error(self, error: ApiError) -> bytes:
        return error.body()


def _has_handlers() -> TypeError:
    return TypeError("the routes of the Responses API have handlers of their own")
