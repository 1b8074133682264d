"""Penstock's own service: ``penstock.v1.Penstock``."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from penstock.client.gateway_interface import ServedModel
from penstock.client.tokens import ids_of
from penstock.protocol.grpc import penstock_pb2 as pb
from penstock.protocol.tasks import GENERATE
from penstock.services.frontend.grpc.call import Call, Handler
from penstock.services.frontend.grpc.deltas import Messages
from penstock.services.frontend.grpc.pooling import embed, score
from penstock.services.frontend.grpc.requests import (
    chat,
    generate_request,
    limit,
    tokenize,
)

NAME = pb.DESCRIPTOR.services_by_name["Penstock"].full_name
MAX_ABORTED = 1024
"""Requests that one call may end."""


async def generate(call: Call) -> None:
    asked = await call.asked(
        pb.GenerateRequest, lambda sent, models: generate_request(sent, models, call.time_left)
    )
    await call.stream(asked, Messages(pb.GenerateResponse, asked, call.id))


async def answer_chat(call: Call) -> None:
    asked = await call.asked(
        pb.ChatRequest, lambda sent, models: chat(sent, models, call.time_left)
    )
    await call.stream(asked, Messages(pb.ChatResponse, asked, call.id))


async def tokens_of(call: Call) -> pb.TokenizeResponse:
    asked = await call.asked(pb.TokenizeRequest, tokenize)
    (answer,) = await call.whole(asked)
    return pb.TokenizeResponse(token_ids=ids_of(answer), max_model_len=asked.max_model_len)


async def models(call: Call) -> pb.ModelsResponse:
    call.message(pb.ModelsRequest)
    return pb.ModelsResponse(models=[_model(one, call) for one in call.models()])


def _model(model: ServedModel, call: Call) -> pb.Model:
    return pb.Model(
        names=dict.fromkeys((model.name, *model.aliases)),
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        tasks=[*([GENERATE] if model.generates else []), *model.tasks],
        ready=call.context.gateway.ready(model.name).ready,
    )


async def abort(call: Call) -> pb.AbortResponse:
    asked = call.message(pb.AbortRequest)
    limit(asked.ids, "ids", MAX_ABORTED)
    ids = list(dict.fromkeys(asked.ids))
    return pb.AbortResponse(aborted=itertools.compress(ids, await call.aborted(ids)))


METHODS: Mapping[str, Handler] = {
    "Generate": generate,
    "Chat": answer_chat,
    "Embed": embed,
    "Score": score,
    "Tokenize": tokens_of,
    "Models": models,
    "Abort": abort,
}
