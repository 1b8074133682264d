"""What the parameters of a body mean, checked against each other and against the model."""

from __future__ import annotations

from typing import Any

from penstock.client.gateway_interface import ServedModel
from penstock.protocol.grammar.request import (
    Grammar,
    conflict,
    from_response_format,
    from_structured_outputs,
)
from penstock.protocol.sampler_parameters import sampler_conflict
from penstock.protocol.sampling import SamplingParams, token_ids
from penstock.protocol.shown_values import show
from penstock.protocol.validation import InvalidValue
from penstock.services.frontend.bodies.requests import (
    SAMPLING_NAMES,
    GenerationBody,
)
from penstock.services.frontend.errors import ApiError, bad_request, from_invalid


def wrong(name: str, value: Any, allowed: str) -> ApiError:
    """A 400 for a parameter with this value."""
    return bad_request(f"{name} is {show(value)}; {allowed}", param=name)


def sampling_of(body: GenerationBody, model: ServedModel, **own: Any) -> SamplingParams:
    """``own``: what this route writes in its own way. Raises ``ApiError`` 400 that names value and
    limit."""
    given = {
        name: value for name in SAMPLING_NAMES if (value := getattr(body, name, None)) is not None
    }
    fields = {**own, **given}
    if body.stop is not None:
        fields["stop"] = [body.stop] if isinstance(body.stop, str) else body.stop
    if body.max_completion_tokens is not None:
        fields["max_tokens"] = _max_tokens(body)
    fields["structured_outputs"] = _grammar(body)
    params = checked(SamplingParams(**fields), model)
    most = params.max_tokens
    if most is not None and params.min_tokens > most:
        raise wrong("min_tokens", params.min_tokens, f"at most max_tokens, {most}, is allowed")
    if params.prompt_logprobs is not None and body.stream:
        raise bad_request(
            "prompt_logprobs are not sent in a stream; send stream: false, or echo and logprobs to "
            "/v1/completions",
            param="prompt_logprobs",
        )
    return params


def checked(params: SamplingParams, model: ServedModel) -> SamplingParams:
    """The parameters, if they go together and the model has what they name. Raises ``ApiError``
    400."""
    if (wrong_together := sampler_conflict(params)) is not None:
        param, reason = wrong_together
        raise bad_request(reason, param=param)
    _check_model(params, model)
    _check_grammar(params)
    return params


def _max_tokens(body: GenerationBody) -> int | None:
    most: int | None = getattr(body, "max_tokens", None)
    if most is not None and most != body.max_completion_tokens:
        raise bad_request(
            f"max_tokens and max_completion_tokens contradict each other ({most} and "
            f"{body.max_completion_tokens}); send one of them, or the same value in both",
            param="max_completion_tokens",
        )
    return body.max_completion_tokens


def _check_model(params: SamplingParams, model: ServedModel) -> None:
    for name, token in token_ids(params):
        if token >= model.vocab_size:
            allowed = f"token ids below {model.vocab_size}, the size of the vocabulary, are allowed"
            raise bad_request(f"{name} holds {token}; {allowed}", param=name)
    for name in ("logprobs", "prompt_logprobs"):
        if ((wanted := getattr(params, name)) or 0) > model.vocab_size:
            most = f"at most {model.vocab_size}, the size of the vocabulary, is allowed"
            raise wrong(name, wanted, most)


def _grammar(body: GenerationBody) -> Grammar | None:
    """What ``structured_outputs`` or ``response_format`` asks for."""
    if body.response_format is None and body.structured_outputs is None:
        return None
    structured = format = None
    try:
        if body.structured_outputs is not None:
            structured = from_structured_outputs(body.structured_outputs)
        if body.response_format is not None:
            format = from_response_format(body.response_format)
    except InvalidValue as invalid:
        raise from_invalid(invalid) from None
    if format is not None and structured is not None:
        raise bad_request(
            "response_format and structured_outputs contradict each other; send one of them",
            param="structured_outputs",
        )
    return format or structured


def _check_grammar(params: SamplingParams) -> None:
    grammar = params.structured_outputs
    if grammar is None:
        return
    allowed = params.allowed_token_ids is not None
    reason = conflict(
        grammar,
        allowed_token_ids=allowed,
        bad_words=bool(params.bad_words),
        no_repeat_ngram_size=params.no_repeat_ngram_size > 0,
        banned_strings=bool(params.banned_strings),
    )
    if reason is not None:
        raise bad_request(reason, param=grammar.param)
