"""OpenAI's embeddings: /v1/embeddings."""

from __future__ import annotations

import base64
import sys
import time
from array import array
from collections.abc import Sequence

from penstock.client.answers import Answer
from penstock.client.gateway_interface import ServedModel
from penstock.client.meters import Usage
from penstock.client.request_terms import terms_of
from penstock.protocol.tasks import EMBED
from penstock.protocol.wire.messages.requests import PoolingParams
from penstock.protocol.wire.messages.tokens import Vector
from penstock.services.frontend.bodies.embeddings import (
    EmbeddingBody,
    EmbeddingList,
    EmbeddingUsage,
)
from penstock.services.frontend.bodies.routes import RouteBodies
from penstock.services.frontend.body import Pause, decode_body, no_pause
from penstock.services.frontend.dialects.interface import Unstreamed
from penstock.services.frontend.errors import ApiError
from penstock.services.frontend.json_lines import encode
from penstock.services.frontend.parse import GenerateRequest, find_model
from penstock.services.frontend.pooling_request import parse_inputs, pooling_request

NUMBERS_AT_ONCE = 8192
"""Numbers that are written without letting others run, which takes half a millisecond."""


class EmbeddingsRequest(GenerateRequest, frozen=True):
    base64: bool = False


class EmbeddingsDialect:
    name = "embeddings"
    routes: tuple[str, ...] = ("/v1/embeddings",)
    bodies = (
        RouteBodies(
            "POST",
            routes[0],
            EmbeddingList,
            EmbeddingBody,
            summary="A vector for each text",
            group="OpenAI",
        ),
    )

    def parse(
        self, raw: bytes, models: list[ServedModel], pause: Pause | None = None
    ) -> GenerateRequest:
        body = decode_body(raw, EmbeddingBody, pause or no_pause)
        found = embedding_request(body, models)
        fields = {name: getattr(found, name) for name in found.__struct_fields__}
        return EmbeddingsRequest(**fields, base64=body.encoding_format == "base64")

    def renderer(
        self, request: GenerateRequest, answer_id: str, created: int
    ) -> EmbeddingsRenderer:
        return EmbeddingsRenderer(request.model, getattr(request, "base64", False))

    def error(self, error: ApiError) -> bytes:
        return error.body()


def embedding_request(body: EmbeddingBody, models: list[ServedModel]) -> GenerateRequest:
    """Raises ``ApiError``."""
    model, name = find_model(body.model, models)
    truncate = body.truncate_prompt_tokens
    prompts = parse_inputs(
        body.input, model, truncate, add_special_tokens=body.add_special_tokens is not False
    )
    pooling = PoolingParams(
        dimensions=body.dimensions,
        normalize=body.normalize,
        prompt_name=body.prompt_name or "",
    )
    return pooling_request(
        EMBED, model, name, prompts, pooling, truncate=truncate, terms=terms_of(body)
    )


class EmbeddingsRenderer(Unstreamed):
    """A vector is written at a time, so that others run in between."""

    def __init__(self, model: str, as_base64: bool) -> None:
        self._model = model
        self._base64 = as_base64

    def body(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        pieces: list[bytes] = []
        since_pause = 0
        for index, answer in enumerate(answers):
            values = vector_of(answer)
            since_pause += len(values) // 4
            if since_pause > NUMBERS_AT_ONCE:
                time.sleep(0)  # gives Python's lock to others
                since_pause = 0
            written = self._written(values)
            pieces.append(b'{"object":"embedding","index":%d,"embedding":%b}' % (index, written))
        tail = {
            "model": self._model,
            "usage": EmbeddingUsage(prompt_tokens=usage.prompt, total_tokens=usage.prompt),
        }
        return b'{"object":"list","data":[%b],%b' % (b",".join(pieces), encode(tail)[1:])

    def _written(self, values: bytes) -> bytes:
        if self._base64:
            return b'"%b"' % base64.b64encode(values)
        return encode(numbers(values).tolist())


def numbers(values: bytes) -> array[float]:
    """float32, little endian, as numbers."""
    found = array("f", values)
    if sys.byteorder == "big":
        found.byteswap()
    return found


def vector_of(answer: Answer) -> bytes:
    """float32, little endian. Raises ``TypeError`` for an answer of another task."""
    (event,) = answer.events()
    if not isinstance(event, Vector):
        raise TypeError(f"{type(event).__name__} is no answer of the task {EMBED}")
    return event.values
