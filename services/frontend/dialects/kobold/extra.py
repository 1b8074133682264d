"""What KoboldAI's clients ask for beside answers: requests that run, tokens, facts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from aiohttp import web

from penstock.client.answers import Answer
from penstock.client.gateway_interface import ServedModel
from penstock.client.meters import Usage
from penstock.client.tokens import ids_of
from penstock.protocol.tasks import TOKENIZE
from penstock.protocol.wire.messages.requests import PromptText
from penstock.services.frontend.bodies.kobold import (
    CountBody,
    KeyBody,
    KoboldAborted,
    KoboldCount,
    KoboldError,
    KoboldProgress,
    KoboldResult,
    KoboldValue,
    KoboldVersion,
    TextSoFar,
)
from penstock.services.frontend.bodies.routes import RouteBodies
from penstock.services.frontend.body import Pause, decode_body, no_pause
from penstock.services.frontend.context import CONTEXT, models_for
from penstock.services.frontend.dialect_handler import owner
from penstock.services.frontend.dialects.interface import Endpoint, Unstreamed
from penstock.services.frontend.dialects.kobold.dialect import (
    KoboldRenderer,
    default_length,
    error_body,
    model_of,
)
from penstock.services.frontend.dialects.tokens import token_request
from penstock.services.frontend.errors import ApiError
from penstock.services.frontend.json_lines import encode
from penstock.services.frontend.parse import GenerateRequest
from penstock.services.frontend.request_body import read_body
from penstock.services.frontend.running import Running
from penstock.services.frontend.system import json_response

UNITED = "1.2.5"
"""The version of KoboldAI United's API that is spoken."""
COMPATIBLE = "1.76"
"""The version of KoboldCpp whose additions these are: clients compare it to know what they may
use."""


# --- requests that run


def _text(running: Running) -> str:
    """What has come of its first choice."""
    said = running.renderer.said if isinstance(running.renderer, KoboldRenderer) else []
    return "".join((*said, *(answer.text for answer in running.generation.answers[:1])))


async def _progress(request: web.Request, key: str) -> web.Response:
    found = request.app[CONTEXT].running.of(owner(request), key)
    texts = [TextSoFar(text=_text(one)) for one in found[:1]]
    return json_response(KoboldProgress(results=texts or [TextSoFar(text="")]))


async def check(request: web.Request) -> web.Response:
    body = await read_body(request, KeyBody)
    return await _progress(request, body.genkey or "")


async def check_unnamed(request: web.Request) -> web.Response:
    return await _progress(request, "")


async def abort(request: web.Request) -> web.Response:
    """End requests with what they have said so far."""
    body = await read_body(request, KeyBody)
    found = request.app[CONTEXT].running.of(owner(request), body.genkey or "")
    for running in found:
        running.generation.abandon()
    return json_response(KoboldAborted(success="true" if found else "false", done="true"))


# --- facts


async def _model(request: web.Request) -> ServedModel:
    gateway = request.app[CONTEXT].gateway
    await gateway.known()
    return model_of(None, models_for(request))[0]


async def model(request: web.Request) -> web.Response:
    return json_response(KoboldResult(result=(await _model(request)).name))


async def context_length(request: web.Request) -> web.Response:
    return json_response(KoboldValue(value=(await _model(request)).max_model_len))


async def max_length(request: web.Request) -> web.Response:
    return json_response(KoboldValue(value=default_length(await _model(request))))


async def united_version(request: web.Request) -> web.Response:
    return json_response(KoboldResult(result=UNITED))


async def version(request: web.Request) -> web.Response:
    protected = bool(request.app[CONTEXT].config.has_keys)
    return json_response(KoboldVersion(result="KoboldCpp", version=COMPATIBLE, protected=protected))


# --- tokens

_ABOUT = partial(RouteBodies, fails=KoboldError, group="KoboldAI")


class TokenCountDialect:
    """Counts the tokens of a text. No engine hears of it."""

    name = "kobold-tokencount"
    routes: tuple[str, ...] = ("/api/extra/tokencount",)
    endpoints: tuple[Endpoint, ...] = (
        ("POST", "/api/extra/generate/check", check),
        ("GET", "/api/extra/generate/check", check_unnamed),
        ("POST", "/api/extra/abort", abort),
        ("GET", "/api/extra/version", version),
        ("GET", "/api/extra/true_max_context_length", context_length),
        ("GET", "/api/v1/model", model),
        ("GET", "/api/v1/config/max_context_length", context_length),
        ("GET", "/api/v1/config/max_length", max_length),
        ("GET", "/api/v1/info/version", united_version),
    )
    bodies = (
        _ABOUT("POST", routes[0], KoboldCount, CountBody, summary="Count the tokens of a text"),
        _ABOUT(
            "POST",
            "/api/extra/generate/check",
            KoboldProgress,
            KeyBody,
            summary="The text so far of a request that runs",
        ),
        _ABOUT(
            "GET",
            "/api/extra/generate/check",
            KoboldProgress,
            summary="The same, of one that was sent without genkey",
        ),
        _ABOUT(
            "POST",
            "/api/extra/abort",
            KoboldAborted,
            KeyBody,
            summary="End requests with their text so far",
        ),
        _ABOUT("GET", "/api/extra/version", KoboldVersion, summary="What of KoboldCpp there is"),
        _ABOUT(
            "GET",
            "/api/extra/true_max_context_length",
            KoboldValue,
            summary="Tokens of prompt and output together",
        ),
        _ABOUT("GET", "/api/v1/model", KoboldResult, summary="The first served model"),
        _ABOUT(
            "GET",
            "/api/v1/config/max_context_length",
            KoboldValue,
            summary="The default of max_context_length",
        ),
        _ABOUT(
            "GET", "/api/v1/config/max_length", KoboldValue, summary="The default of max_length"
        ),
        _ABOUT(
            "GET",
            "/api/v1/info/version",
            KoboldResult,
            summary="The version of KoboldAI United's API that is spoken",
        ),
    )

    def parse(
        self, raw: bytes, models: list[ServedModel], pause: Pause | None = None
    ) -> GenerateRequest:
        body = decode_body(raw, CountBody, pause or no_pause)
        model, name = model_of(body.model, models)
        prompt = PromptText(body.prompt, body.special is not False)
        return token_request(model, name, TOKENIZE, prompt)

    def renderer(self, request: GenerateRequest, answer_id: str, created: int) -> TokenCounter:
        return TokenCounter()

    def error(self, error: ApiError) -> bytes:
        return error_body(error)


class TokenCounter(Unstreamed):
    """The renderer of a count."""

    def body(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        ids = ids_of(answers[0])
        return encode(KoboldCount(value=len(ids), ids=ids))
