"""Requests of which each input becomes a vector or scores: what their routes have in common."""

from __future__ import annotations

from typing import Any

from penstock.client.gateway_interface import ServedModel
from penstock.client.request_terms import DEFAULT_TERMS, RequestTerms
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.wire.messages.requests import Pair, PoolingParams, Prompt
from penstock.services.frontend.bodies.pooling import MAX_INPUTS
from penstock.services.frontend.errors import bad_request
from penstock.services.frontend.parse import GenerateRequest
from penstock.services.frontend.prompts import PromptField, parse_prompts

OPEN_INPUTS = 128
"""Inputs of one request that are open at once."""
MAX_REPEATED = 2**24
"""Characters of a text that stands in all pairs that are open at once, in all of them: it goes
to the tokenizer with each."""


def pooling_request(
    task: str,
    model: ServedModel,
    name: str,
    prompts: list[Prompt],
    pooling: PoolingParams,
    *,
    truncate: int | None = None,
    terms: RequestTerms = DEFAULT_TERMS,
    field: str = "input",
) -> GenerateRequest:
    """A request for a task that a model's folder decides on. name: the model's, as the client wrote
    it. truncate: tokens to keep of each prompt, -1: as many as the model takes. field: which holds
    the inputs, for errors. Raises ``ApiError`` for too many prompts."""
    if len(prompts) > MAX_INPUTS:
        raise bad_request(
            f"there are {len(prompts)} inputs; at most {MAX_INPUTS} are allowed in one request",
            param=field,
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
        field=field,
    )


def parse_pairs(first: list[str], second: list[str], field: str) -> list[Prompt]:
    """first: one text, which stands beside each of the second ones, or as many. field: its name,
    for errors. Raises ``ApiError`` for one that is too long to be sent so often."""
    if len(first) > 1:
        return [Pair(*texts) for texts in zip(first, second, strict=True)]
    (text,), open_pairs = first, min(len(second), OPEN_INPUTS)
    if len(text) * open_pairs > MAX_REPEATED:
        raise bad_request(
            f"{field} has {len(text)} characters; beside {len(second)} texts at most "
            f"{MAX_REPEATED // open_pairs} are allowed: shorten it, or send fewer texts at a time",
            param=field,
        )
    return [Pair(text, other) for other in second]


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
