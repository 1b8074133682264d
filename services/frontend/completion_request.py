"""What a completion of OpenAI's asks for, once its body is checked."""

from __future__ import annotations

import msgspec

from penstock.client.gateway_interface import ServedModel
from penstock.protocol.sampling import DEFAULT_COMPLETION_TOKENS
from penstock.services.frontend.bodies.requests import CompletionBody
from penstock.services.frontend.parameters import sampling_of
from penstock.services.frontend.parse import GenerateRequest, find_model, generate_request
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
    request = generate_request(body, model, name, params, prompts)
    if params.echo and params.logprobs is not None and not request.lists_prompt:
        params = msgspec.structs.replace(params, prompt_logprobs=params.logprobs)
        request = msgspec.structs.replace(request, params=params)
    return request
