"""Embed and Score: of each input becomes a vector, or scores."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from penstock.client.answers import Answer
from penstock.client.gateway_interface import ServedModel
from penstock.client.request_terms import Priority, User, check_printable, terms_of
from penstock.client.vectors import numbers, scores_of, vector_of
from penstock.protocol.declared import Declared
from penstock.protocol.grpc import penstock_pb2 as pb
from penstock.protocol.sampling import MAX_TOKENS
from penstock.protocol.tasks import CLASSIFY, SCORE
from penstock.protocol.wire.messages.requests import PoolingParams, Prompt
from penstock.services.frontend.bodies.embeddings import EmbeddingBody
from penstock.services.frontend.bodies.pooling import MAX_INPUTS
from penstock.services.frontend.dialects.embeddings import embedding_request
from penstock.services.frontend.errors import bad_request
from penstock.services.frontend.grpc.call import Call
from penstock.services.frontend.grpc.deltas import usage_of
from penstock.services.frontend.grpc.requests import checked, given, limit
from penstock.services.frontend.parse import GenerateRequest, find_model
from penstock.services.frontend.pooling_request import parse_inputs, parse_pairs, pooling_request


class ScoreFields(Declared, kw_only=True):
    """The fields of a ``ScoreRequest``."""

    model: str | None = None
    query: Annotated[str, Meta(min_length=1)] | None = None
    texts: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)]
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None = None
    user: User | None = None
    priority: Priority | None = None

    def __post_init__(self) -> None:
        """Raise ``InvalidValue`` for what a type cannot say."""
        check_printable(self)


MANY = 64
"""Vectors from which on a message is made beside the event loop."""


async def embed(call: Call) -> pb.EmbedResponse:
    asked = await call.asked(pb.EmbedRequest, embed_request)
    answers = await call.whole(asked)
    if len(answers) < MANY:
        return _vectors(answers, asked, call)
    return await asyncio.to_thread(_vectors, answers, asked, call)


def embed_request(message: pb.EmbedRequest, models: list[ServedModel]) -> GenerateRequest:
    """Raises ``ApiError``."""
    limit(message.inputs, "inputs", MAX_INPUTS)
    fields = given(message)
    fields["input"] = [_input(one, n) for n, one in enumerate(fields.pop("inputs", []))]
    return embedding_request(checked(fields, EmbeddingBody), models)


def _input(one: pb.Input, number: int) -> str | list[int]:
    if one.WhichOneof("input") is None:
        raise bad_request(f"inputs[{number}] is empty; a text or token ids are needed", "inputs")
    return one.text if one.HasField("text") else list(one.token_ids.ids)


def _vectors(answers: Sequence[Answer], asked: GenerateRequest, call: Call) -> pb.EmbedResponse:
    vectors = [pb.Vector(values=numbers(vector_of(answer))) for answer in answers]
    return pb.EmbedResponse(model=asked.model, vectors=vectors, usage=_usage(call))


async def score(call: Call) -> pb.ScoreResponse:
    asked = await call.asked(pb.ScoreRequest, score_request)
    answers = await call.whole(asked)
    scores = [pb.Scores(values=scores_of(answer)) for answer in answers]
    return pb.ScoreResponse(model=asked.model, scores=scores, usage=_usage(call))


def score_request(message: pb.ScoreRequest, models: list[ServedModel]) -> GenerateRequest:
    """Raises ``ApiError``."""
    limit(message.texts, "texts", MAX_INPUTS)
    body = checked(given(message), ScoreFields)
    model, name = find_model(body.model, models)
    truncate = body.truncate_prompt_tokens
    prompts: list[Prompt]
    if body.query is None:
        task, prompts = CLASSIFY, parse_inputs(body.texts, model, truncate)
    else:
        task, prompts = SCORE, parse_pairs([body.query], body.texts, "query")
    return pooling_request(
        *(task, model, name, prompts, PoolingParams()),
        truncate=truncate,
        terms=terms_of(body),
        field="texts",
    )


def _usage(call: Call) -> pb.Usage:
    if call.generation is None:
        raise ValueError("nothing was generated")
    return usage_of(call.generation.usage)
