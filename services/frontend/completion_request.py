"""What a completion of OpenAI's asks for, once its body is checked."""

from __future__ import annotations

import msgspec

from penstock.client.cache_control import cache_hints
from penstock.client.gateway_interface import ServedModel
from penstock.protocol.sampling import DEFAULT_COMPLETION_TOKENS
from penstock.services.frontend.beam_request import with_beams
from penstock.services.frontend.bodies.requests import CompletionBody
from penstock.services.frontend.errors import bad_request
from penstock.services.frontend.parameters import sampling_of, wrong
from penstock.services.frontend.parse import (
    GenerateRequest,
    check_choices,
    find_model,
    generate_request,
)
from penstock.services.frontend.prompts import parse_prompts


def completion_request(body: CompletionBody, models: list[ServedModel]) -> GenerateRequest:
    """Raises ``ApiError``."""
    model, name = find_model(body.model, models)
    params = sampling_of(
        body,
        model,
        logprobs=body.logprobs,
        echo=bool(body.echo),
        max_tokens=DEFAULT_COMPLETION_TOKENS,
    )
    prompts = parse_prompts(body.prompt, model, params.truncate_prompt_tokens)
    cache = cache_hints(body.cache_control)
    request = generate_request(body, model, name, params, prompts, cache=cache)
    if params.echo and params.logprobs is not None and not request.lists_prompt:
        params = msgspec.structs.replace(params, prompt_logprobs=params.logprobs)
        request = msgspec.structs.replace(request, params=params)
    request = with_beams(request, body, model)
    return request if request.beams is not None else _with_best_of(request, body)


def _with_best_of(request: GenerateRequest, body: CompletionBody) -> GenerateRequest:
    """The request with as many choices as the best are chosen from, and the logprobs that they are
    chosen by. Raises ``ApiError``."""
    wanted, params = request.params.n, request.params
    if body.best_of is None or body.best_of == wanted:
        return request
    if body.best_of < wanted:
        raise wrong("best_of", body.best_of, f"at least n, {wanted}, is allowed")
    if request.stream:
        raise bad_request(
            f"best_of is {body.best_of}, but which {wanted} are the best is known when all have "
            "ended; send stream: false, or leave best_of out",
            param="best_of",
        )
    check_choices(len(request.prompts), body.best_of, "best_of")
    logprobs = params.logprobs or 0
    params = msgspec.structs.replace(params, n=body.best_of, logprobs=logprobs)
    hides = body.logprobs is None
    return msgspec.structs.replace(request, params=params, keeps=wanted, hides_logprobs=hides)
