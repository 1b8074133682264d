"""The service ``vllm.grpc.engine.VllmEngine``.

A gateway has the tokenizer, and spreads requests over engines by what each has cached. To it a
frontend is an engine, whatever stands behind: it serves one model.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock import __version__
from penstock.client.gateway_interface import ServedModel
from penstock.client.vectors import numbers, vector_of
from penstock.protocol.grpc.engine import common_pb2
from penstock.protocol.grpc.engine import vllm_engine_pb2 as pb
from penstock.protocol.wire.messages.membership import Peer
from penstock.services.frontend.errors import ApiError
from penstock.services.frontend.grpc.call import Call, Handler
from penstock.services.frontend.grpc.engine.chunks import Chunks
from penstock.services.frontend.grpc.engine.requests import (
    embed_request,
    generate_request,
    the_model,
)
from penstock.services.frontend.grpc.engine.tokenizer_files import pieces
from penstock.services.frontend.grpc.requests import limit
from penstock.services.frontend.grpc.servicer import MAX_ABORTED
from penstock.services.frontend.parse import GenerateRequest

NAME = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name
SERVER_TYPE = "penstock"


async def generate(call: Call) -> None:
    def read(sent: pb.GenerateRequest, models: list[ServedModel]) -> tuple[str, GenerateRequest]:
        return sent.request_id, generate_request(sent, models, call.time_left)

    request_id, asked = await call.asked(pb.GenerateRequest, read)
    call.known_as(request_id)
    await call.stream(asked, Chunks(asked))


async def embed(call: Call) -> pb.EmbedResponse:
    def read(sent: pb.EmbedRequest, models: list[ServedModel]) -> tuple[str, GenerateRequest]:
        return sent.request_id, embed_request(sent, models)

    request_id, asked = await call.asked(pb.EmbedRequest, read)
    call.known_as(request_id)
    (answer,) = await call.whole(asked)
    values = numbers(vector_of(answer))
    tokens = 0 if call.generation is None else call.generation.usage.prompt
    return pb.EmbedResponse(embedding=values, prompt_tokens=tokens, embedding_dim=len(values))


async def health_check(call: Call) -> pb.HealthCheckResponse:
    readiness = call.context.gateway.ready()
    parts = ", ".join(f"{name}: {state}" for name, state in readiness.parts.items())
    return pb.HealthCheckResponse(healthy=readiness.ready, message=parts)


async def abort(call: Call) -> pb.AbortResponse:
    ids = call.message(pb.AbortRequest).request_ids
    limit(ids, "request_ids", MAX_ABORTED)
    await call.aborted(ids)
    return pb.AbortResponse()


async def model_info(call: Call) -> pb.GetModelInfoResponse:
    await call.context.gateway.known()
    model = _model(call)
    folder = call.context.config.grpc_tokenizer
    return pb.GetModelInfoResponse(
        model_path=folder or model.name,
        served_model_name=model.name,
        tokenizer_path=folder or model.name,
        is_generation=model.generates,
        max_context_length=model.max_model_len,
        max_req_input_len=model.max_model_len,
        vocab_size=model.vocab_size,
    )


async def server_info(call: Call) -> pb.GetServerInfoResponse:
    await call.context.gateway.known()
    engines = _engines(call)
    return pb.GetServerInfoResponse(
        active_requests=sum(one.load for one in engines),
        uptime_seconds=call.arrival - call.running.began,
        server_type=SERVER_TYPE,
        data_parallel_size=1,
        max_num_seqs=sum(one.capacity.max_num_seqs for one in engines),
    )


async def loads(call: Call) -> pb.GetLoadsResponse:
    await call.context.gateway.known()
    engines = _engines(call)
    there = sum(one.load for one in engines)
    slots = sum(one.capacity.max_num_seqs for one in engines)
    load = pb.SchedulerLoad(
        num_running_reqs=min(there, slots),
        num_waiting_reqs=max(0, there - slots),
        num_total_reqs=there,
        max_total_num_tokens=sum(one.capacity.all_kv_tokens for one in engines),
        max_running_requests=slots,
    )
    return pb.GetLoadsResponse(version=__version__, dp_rank_count=1, loads=[load])


def _model(call: Call) -> ServedModel:
    """The one that the caller may use. Raises ``ApiError``: 404, 400, 503."""
    models = call.models()
    if not models and call.context.gateway.models():
        raise ApiError(
            404, "The key may use none of the models that are served", code="model_not_found"
        )
    return the_model(models)


def _engines(call: Call) -> list[Peer]:
    """The schedulers of the model."""
    model = _model(call).name
    members = call.context.gateway.members()
    return [one for one in members if one.service == "scheduler" and one.identity.is_of(model)]


async def flush_cache(call: Call) -> common_pb2.FlushCacheResponse:
    return common_pb2.FlushCacheResponse(
        success=False, message="The prefix cache cannot be emptied; it gives way as room is needed"
    )


async def profile(call: Call) -> common_pb2.ProfileResponse:
    return common_pb2.ProfileResponse(success=False, message="There is no profiler to be driven")


async def tokenizer(call: Call) -> None:
    call.message(common_pb2.GetTokenizerRequest)
    await call.context.gateway.known()
    _model(call)
    files = call.running.tokenizer
    if files is None:
        raise ApiError(
            501,
            "This frontend has no tokenizer's files to give: --grpc-tokenizer names their folder",
        )
    for piece in pieces(await files.archive()):
        await call.send(piece)


async def kv_events(call: Call) -> None:
    raise ApiError(
        501,
        "SubscribeKvEvents is not served: what is cached is not told; a gateway that spreads by "
        "prefixes goes by what it has sent",
    )


METHODS: Mapping[str, Handler] = {
    "Generate": generate,
    "Embed": embed,
    "HealthCheck": health_check,
    "Abort": abort,
    "GetModelInfo": model_info,
    "GetServerInfo": server_info,
    "GetLoads": loads,
    "FlushCache": flush_cache,
    "StartProfile": profile,
    "StopProfile": profile,
    "GetTokenizer": tokenizer,
    "SubscribeKvEvents": kv_events,
}
