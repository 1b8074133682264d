"""OpenAI's embeddings: /v1/embeddings."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Literal

from penstock.client.answers import Answer
from penstock.client.gateway_interface import ServedModel
from penstock.client.meters import Usage
from penstock.client.request_terms import terms_of
from penstock.client.vectors import numbers, vector_of
from penstock.protocol.tasks import EMBED
from penstock.protocol.wire.messages.requests import PoolingParams
from penstock.services.frontend.bodies.embeddings import EmbeddingBody, EmbeddingList
from penstock.services.frontend.bodies.routes import RouteBodies
from penstock.services.frontend.body import Pause
from penstock.services.frontend.dialects.interface import Unstreamed
from penstock.services.frontend.errors import ApiError
from penstock.services.frontend.json_lines import encode
from penstock.services.frontend.parse import GenerateRequest, find_model
from penstock.services.frontend.pooled_answers import listed, usage_of
from penstock.services.frontend.pooling_request import parse_inputs, pooling_request
from penstock.services.frontend.token_arrays import decode_with_ids


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
        body = decode_with_ids(raw, EmbeddingBody, pause, "input")
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
        input_type=_input_type(body),
    )
    return pooling_request(
        EMBED, model, name, prompts, pooling, truncate=truncate, terms=terms_of(body)
    )


def _input_type(body: EmbeddingBody) -> Literal["", "query", "document"]:
    if body.input_type is None:
        return ""
    return "query" if body.input_type in ("query", "search_query") else "document"


class EmbeddingsRenderer(Unstreamed):
    """A vector is written at a time, so that others run in between."""

    def __init__(self, model: str, as_base64: bool) -> None:
        self._model = model
        self._base64 = as_base64

    def body(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        data = listed(
            b'{"object":"embedding","index":%d,"embedding":%b}' % (index, self._written(answer))
            for index, answer in enumerate(answers)
        )
        tail = encode({"model": self._model, "usage": usage_of(usage)})
        return b'{"object":"list","data":%b,%b' % (data, tail[1:])

    def _written(self, answer: Answer) -> bytes:
        values = vector_of(answer)
        if self._base64:
            return b'"%b"' % base64.b64encode(values)
        return encode(numbers(values).tolist())
