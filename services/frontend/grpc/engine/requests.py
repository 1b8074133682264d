"""What a gateway asks for, as the body that HTTP would have had."""

from __future__ import annotations

from collections.abc import MutableSequence
from typing import Any

from penstock.client.gateway_interface import ServedModel
from penstock.protocol.grpc.engine import vllm_engine_pb2 as pb
from penstock.services.frontend.bodies.embeddings import EmbeddingBody
from penstock.services.frontend.bodies.requests import CompletionBody
from penstock.services.frontend.completion_request import completion_request
from penstock.services.frontend.dialects.embeddings import embedding_request
from penstock.services.frontend.errors import ApiError, bad_request
from penstock.services.frontend.grpc.requests import Fields, checked, deadline, too_long
from penstock.services.frontend.parse import GenerateRequest, find_model

_ZERO_IS_NOTHING = (
    *("top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("min_tokens", "n", "ignore_eos", "include_stop_str_in_output"),
)
_OPTIONAL = ("temperature", "logprobs", "prompt_logprobs", "seed")
_CONSTRAINTS = {
    "json_schema": "json",
    "regex": "regex",
    "grammar": "grammar",
    "json_object": "json_object",
}
_REFUSED = (
    *("kv_transfer_params", "mm_inputs", "kv_transfer_params_json", "data_parallel_rank"),
    *("media_refs", "extra_mm_inputs"),
)


def not_supported(name: str) -> ApiError:
    return bad_request(f"not supported yet: {name}", param=name, code="unsupported_parameter")


def the_model(models: list[ServedModel]) -> ServedModel:
    """The one that an engine stands for. Raises ``ApiError``: 400 where several are served."""
    return find_model(None, models)[0]


def generate_request(
    message: pb.GenerateRequest, models: list[ServedModel], left: float | None
) -> GenerateRequest:
    """left: seconds until the call's deadline. Raises ``ApiError``."""
    for field, _ in message.ListFields():
        if field.name in _REFUSED:
            raise not_supported(field.name)
    model = the_model(models)
    fields = _sampling(message.sampling_params)
    fields |= {"prompt": message.text or "-", "stream": message.stream, "return_token_ids": True}
    if (seconds := deadline(None, left)) is not None:
        fields["deadline_s"] = seconds
    body = checked(fields, CompletionBody)
    if message.WhichOneof("input") == "text":
        body.prompt = message.text
        return completion_request(body, models)
    ids = message.tokenized.input_ids
    body.prompt = _prompt(ids, getattr(body, "truncate_prompt_tokens", None), model)
    return completion_request(with_room(body, len(body.prompt), model), models)


def embed_request(message: pb.EmbedRequest, models: list[ServedModel]) -> GenerateRequest:
    """Raises ``ApiError``."""
    the_model(models)
    body = checked({"input": list(message.tokenized.input_ids)}, EmbeddingBody)
    return embedding_request(body, models)


def _prompt(ids: MutableSequence[int], keep: int | None, model: ServedModel) -> list[Any]:
    if keep is not None:
        return list(ids[-keep:])
    if len(ids) > model.max_model_len:
        raise too_long(len(ids), model)
    return list(ids)


def with_room(body: CompletionBody, tokens: int, model: ServedModel) -> CompletionBody:
    """The body with all that fits behind its prompt, unless it says how much."""
    given: Any = body
    if given.max_tokens is None:
        given.max_tokens = max(1, model.max_model_len - tokens)
    return body


def _sampling(params: pb.SamplingParams) -> Fields:
    """The fields of a body. Raises ``ApiError``."""
    fields: Fields = {name: value for name in _ZERO_IS_NOTHING if (value := getattr(params, name))}
    fields |= {name: getattr(params, name) for name in _OPTIONAL if params.HasField(name)}
    for name in ("stop", "stop_token_ids"):
        if listed := list(getattr(params, name)):
            fields[name] = listed
    if params.logit_bias:
        fields["logit_bias"] = dict(params.logit_bias)
    if params.HasField("max_tokens"):
        fields["max_tokens"] = params.max_tokens
    if params.HasField("truncate_prompt_tokens") and params.truncate_prompt_tokens != -1:
        fields["truncate_prompt_tokens"] = params.truncate_prompt_tokens
    fields["skip_special_tokens"] = params.skip_special_tokens
    match params.WhichOneof("constraint"):
        case None:
            pass
        case "structural_tag":
            raise not_supported("structural_tag")
        case "choice":
            fields["structured_outputs"] = {"choice": list(params.choice.choices)}
        case name:
            fields["structured_outputs"] = {_CONSTRAINTS[name]: getattr(params, name)}
    return fields
