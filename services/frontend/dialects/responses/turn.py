"""One request of the Responses API, checked: what is asked, and what it continues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.client.cache_control import cache_hints
from penstock.client.gateway_interface import ServedModel
from penstock.client.messages import TemplateVariables, encode_messages
from penstock.client.request_terms import terms_of
from penstock.client.tools import output_format
from penstock.protocol.grammar.request import Grammar, from_text_format
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.validation import InvalidValue
from penstock.protocol.wire.messages.requests import Chat, OutputFormat
from penstock.services.frontend.bodies.openai_items import InputItem, ReferenceItem
from penstock.services.frontend.bodies.openai_responses import (
    SAMPLING_NAMES,
    PromptBody,
    ResponsesBody,
    TextFormat,
)
from penstock.services.frontend.dialects.responses import items as items_
from penstock.services.frontend.dialects.responses.prompt import messages_of
from penstock.services.frontend.dialects.responses.tools import (
    OfferedTools,
    choice_of,
    offered,
)
from penstock.services.frontend.errors import from_invalid
from penstock.services.frontend.parameters import checked
from penstock.services.frontend.parse import GenerateRequest, find_model

LOGPROBS = "message.output_text.logprobs"
SEALED = "reasoning.encrypted_content"


class Turn(msgspec.Struct, frozen=True):
    """A request with all that it is made of."""

    body: ResponsesBody
    own: list[InputItem]
    """The input, without what it continues."""
    request: GenerateRequest
    tools: OfferedTools


def read_input(body: PromptBody) -> list[InputItem | ReferenceItem]:
    """The items of a body. Raises ``ApiError`` 400."""
    try:
        return items_.read_items(body.input or [])
    except InvalidValue as invalid:
        raise from_invalid(invalid) from None


def turn_of(
    body: ResponsesBody,
    items: Sequence[InputItem],
    own: list[InputItem],
    models: list[ServedModel],
    *,
    streams: bool,
) -> Turn:
    """items: the conversation. own: the body's own items, also where they were left out of it.
    Raises ``ApiError`` 400."""
    model, name = find_model(body.model, models)
    try:
        tools = offered(body.tools or ())
        prompt = _prompt(body, items)
        output = _output(body, tools)
        params = _sampling(body)
    except InvalidValue as invalid:
        raise from_invalid(invalid) from None
    params = checked(params, model)
    request = GenerateRequest(
        model=name,
        served=model.name,
        prompts=[prompt],
        params=params,
        stream=streams,
        terms=terms_of(body),
        output=output,
        cache=cache_hints(body.cache_control),
    )
    return Turn(body, own, request, tools)


def _prompt(body: PromptBody, items: Sequence[InputItem]) -> Chat:
    messages = messages_of(body.instructions, items)
    if not messages:
        raise InvalidValue(
            "input is missing; a string or an array of items is required, or a "
            "previous_response_id to continue",
            "input",
        )
    return Chat(encode_messages(messages, "input"), msgspec.json.encode(_variables(body)))


def _variables(body: PromptBody) -> TemplateVariables:
    effort = body.reasoning.effort if body.reasoning else None
    if effort is None:
        return TemplateVariables()
    if effort == "none":
        return TemplateVariables(enable_thinking=False, thinking=False)
    return TemplateVariables(reasoning_effort=effort)


def _output(body: PromptBody, tools: OfferedTools) -> OutputFormat:
    return output_format(
        tools.functions,
        choice_of(body.tool_choice, tools),
        parallel=body.parallel_tool_calls is not False,
    )


def _sampling(body: ResponsesBody) -> SamplingParams:
    fields: dict[str, Any] = {
        name: value for name in SAMPLING_NAMES if (value := getattr(body, name)) is not None
    }
    if body.stop is not None:
        fields["stop"] = [body.stop] if isinstance(body.stop, str) else body.stop
    if body.top_logprobs or LOGPROBS in (body.include or ()):
        fields["logprobs"] = body.top_logprobs or 0
    params = SamplingParams(
        max_tokens=body.max_output_tokens, structured_outputs=_grammar(body), **fields
    )
    most = params.max_tokens
    if most is not None and params.min_tokens > most:
        raise InvalidValue(
            f"min_tokens is {params.min_tokens}; at most max_output_tokens, {most}, is allowed",
            "min_tokens",
        )
    return params


def _grammar(body: PromptBody) -> Grammar | None:
    format: TextFormat | None = body.text.format if body.text else None
    if format is None:
        return None
    if format.type == "json_schema" and format.name is None:
        raise InvalidValue("text.format.name is missing; a string is required", "text")
    return from_text_format(format.type, format.schema)
