"""From the bodies of Ollama's API to requests."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.client.gateway_interface import ServedModel
from penstock.client.messages import (
    CalledFunction,
    Message,
    TemplateVariables,
    ToolCall,
    encode_messages,
)
from penstock.protocol.grammar.request import Grammar, of_schema
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.validation import InvalidValue
from penstock.protocol.wire.messages.requests import Chat, OutputFormat, Prompt
from penstock.services.frontend.bodies.ollama import (
    OPTIONS,
    OllamaBody,
    OllamaMessage,
    OllamaOptions,
)
from penstock.services.frontend.bodies.sampling_fields import sampling_values
from penstock.services.frontend.errors import bad_request, from_invalid
from penstock.services.frontend.parameters import checked, wrong
from penstock.services.frontend.parse import GenerateRequest, UnknownModel, find_model

LATEST = ":latest"


def model_of(name: str, models: list[ServedModel]) -> tuple[ServedModel, str]:
    """The model of that name, which may end with the tag that Ollama's clients add."""
    try:
        return find_model(name, models)
    except UnknownModel:
        if not name.endswith(LATEST):
            raise
    return find_model(name.removesuffix(LATEST), models)


def params_of(body: OllamaBody, model: ServedModel) -> SamplingParams:
    """Raises ``ApiError`` 400."""
    options = body.options or OllamaOptions()
    given: dict[str, Any] = sampling_values(options, OPTIONS)
    if options.num_predict is not None and options.num_predict >= 0:
        given["max_tokens"] = options.num_predict
    if options.stop is not None:
        given["stop"] = [options.stop] if isinstance(options.stop, str) else options.stop
    if options.repeat_last_n == 0:
        given["repetition_penalty"] = 1.0
    if given.get("seed", 0) < 0:  # Ollama draws one
        del given["seed"]
    if body.logprobs:
        given["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs:
        allowed = "it is allowed only together with logprobs: true"
        raise wrong("top_logprobs", body.top_logprobs, allowed)
    try:
        given["structured_outputs"] = _grammar(body)
    except InvalidValue as invalid:
        raise from_invalid(invalid) from None
    return checked(SamplingParams(**given), model)


def _grammar(body: OllamaBody) -> Grammar | None:
    if not body.format and body.format != {}:
        return None
    if body.format == "json":
        return Grammar("json_object", param="format")
    return of_schema(body.format, "format")


def chat_of(body: OllamaBody, messages: list[Message]) -> Chat:
    """The prompt that the chat template makes. Raises ``ApiError`` 400."""
    variables = TemplateVariables()
    if isinstance(body.think, bool):
        variables = TemplateVariables(enable_thinking=body.think, thinking=body.think)
    elif body.think is not None:
        variables = TemplateVariables(
            enable_thinking=True, thinking=True, reasoning_effort=body.think
        )
    try:
        return Chat(encode_messages(messages), msgspec.json.encode(variables))
    except InvalidValue as invalid:
        raise from_invalid(invalid) from None


def messages_of(given: list[OllamaMessage]) -> list[Message]:
    """The messages as other APIs write them. Ollama's calls have no ids: each gets one, and a
    result goes to the first call of its tool that has none yet."""
    found: list[Message] = []
    unanswered: list[tuple[str, str]] = []
    calls = 0
    for message in given:
        made = Message(
            role=message.role,
            content=message.content or "",
            reasoning_content=message.thinking or None,
        )
        if message.tool_calls:
            made.tool_calls = []
            for call in message.tool_calls:
                identity, name = call.id or f"call_{calls}", call.function.name
                arguments = msgspec.json.encode(call.function.arguments).decode()
                function = CalledFunction(name=name, arguments=arguments)
                made.tool_calls.append(ToolCall(id=identity, function=function))
                unanswered.append((identity, name))
                calls += 1
        if message.role == "tool":
            made.name = message.tool_name
            made.tool_call_id = _answered(message, unanswered)
        found.append(made)
    return found


def _answered(message: OllamaMessage, unanswered: list[tuple[str, str]]) -> str:
    """The id of the call whose result a message is; it counts as answered from here on."""
    for place, (identity, name) in enumerate(unanswered):
        if identity == message.tool_call_id or (
            message.tool_call_id is None and message.tool_name in (None, name)
        ):
            del unanswered[place]
            return identity
    return message.tool_call_id or "call_unknown"


def request_of(
    body: OllamaBody,
    model: ServedModel,
    name: str,
    prompt: Prompt | None,
    output: OutputFormat | None,
) -> GenerateRequest:
    """prompt: ``None`` where nothing is to be generated. Raises ``ApiError`` 400."""
    return GenerateRequest(
        model=name,
        served=model.name,
        prompts=[] if prompt is None else [prompt],
        params=params_of(body, model),
        stream=body.stream is not False,
        output=output,
        fits_window=True,
    )


def check_plain(body: Any, names: tuple[str, ...]) -> None:
    """Raise ``ApiError`` 400 for what cannot go together with ``raw``."""
    for name in names:
        if getattr(body, name):
            raise bad_request(
                f"raw and {name} contradict each other: a raw prompt has all that the model reads",
                param=name,
            )
