"""Requests of which each input becomes a vector or scores: what their routes have in common."""

from __future__ import annotations

from typing import Any

from penstock.client.gateway_interface import ServedModel
from penstock.client.request_terms import DEFAULT_TERMS, RequestTerms
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.wire.messages.requests import PoolingParams, Prompt
from penstock.services.frontend.errors import bad_request
from penstock.services.frontend.parse import GenerateRequest
from penstock.services.frontend.prompts import PromptField, parse_prompts

MAX_INPUTS = 2048
"""As OpenAI has it. They are not open all at once: see ``GenerateRequest.window``."""
OPEN_INPUTS = 128
"""Inputs of one request that are open at once."""


def pooling_request(
    task: str,
    model: ServedModel,
    name: str,
    prompts: list[Prompt],
    pooling: PoolingParams,
    *,
    truncate: int | None = None,
    terms: RequestTerms = DEFAULT_TERMS,
) -> GenerateRequest:
    """A request for a task that a model's folder decides on. name: the model's, as the client wrote
    it. truncate: tokens to keep of each prompt, -1: as many as the model takes. Raises ``ApiError``
    for too many prompts."""
    if len(prompts) > MAX_INPUTS:
        raise bad_request(
            f"there are {len(prompts)} inputs; at most {MAX_INPUTS} are allowed in one request",
            param="input",
        )
    keep = model.longest_task_prompt if truncate == -1 else truncate
    return GenerateRequest(
        model=name,
        served=model.name,
        prompts=prompts,
        params=SamplingParams(truncate_prompt_tokens=keep),
        terms=terms,
        task=task,
        pooling=pooling,
        window=OPEN_INPUTS,
    )


def parse_inputs(
    value: str | list[Any],
    model: ServedModel,
    truncate: int | None,
    *,
    add_special_tokens: bool = True,
) -> list[Prompt]:
    """``input``: text, token ids, or a list of either. Raises ``ApiError``."""
    longest = 2**31 if truncate is not None else model.longest_task_prompt
    field = PromptField(
        "input", MAX_INPUTS, longest, "this model takes at most", add_special_tokens
    )
    return parse_prompts(value, model, None, field)
