"""What a chat of OpenAI's asks for, once its body is checked."""

from __future__ import annotations

import msgspec

from penstock.client.cache_breakpoints import hints_of_chat
from penstock.client.gateway_interface import ServedModel
from penstock.client.messages import TemplateVariables, encode_messages
from penstock.client.tools import chosen, output_format
from penstock.protocol.validation import InvalidValue
from penstock.protocol.wire.messages.cache_hints import CacheHints
from penstock.protocol.wire.messages.requests import Chat, OutputFormat
from penstock.services.frontend.beam_request import with_beams
from penstock.services.frontend.bodies.requests import ChatBody
from penstock.services.frontend.errors import bad_request, from_invalid
from penstock.services.frontend.parameters import sampling_of, wrong
from penstock.services.frontend.parse import GenerateRequest, find_model, generate_request

_NO_VARIABLES = b"{}"


def chat_request(body: ChatBody, models: list[ServedModel]) -> GenerateRequest:
    """Raises ``ApiError``."""
    model, called = find_model(body.model, models)
    for name, what in (("return_token_ids", "ids"), ("logprobs", "logprobs")):
        if body.include_reasoning is False and getattr(body, name):
            raise bad_request(
                f"{name} and include_reasoning: false contradict each other: the {what} are those "
                "of all generated tokens, thinking too; send one of them alone",
                param=name,
            )
    params, cache = sampling_of(body, model, logprobs=_logprobs(body)), _cache(body)
    request = generate_request(body, model, called, params, [_chat(body)], _output(body), cache)
    return with_beams(request, body, model)


def _cache(body: ChatBody) -> CacheHints | None:
    """What the body says of the prefix cache; ``_chat`` forgets it. Raises ``ApiError`` 400."""
    try:
        return hints_of_chat(body.cache_control, body.messages, body.tools or ())
    except InvalidValue as invalid:
        raise from_invalid(invalid) from None


def _logprobs(body: ChatBody) -> int | None:
    """``logprobs`` and ``top_logprobs`` as one number, as elsewhere."""
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        allowed = "it is allowed only together with logprobs: true"
        raise wrong("top_logprobs", body.top_logprobs, allowed)
    return None


def _chat(body: ChatBody) -> Chat:
    """The messages and the template's variables. Raises ``ApiError`` 400."""
    try:
        messages = encode_messages(body.messages)
    except InvalidValue as invalid:
        raise from_invalid(invalid) from None
    variables = _variables(body)
    encoded = _NO_VARIABLES if variables is None else msgspec.json.encode(variables)
    if end := end_of_prompt(body.add_generation_prompt, body.continue_final_message):
        encoded = msgspec.json.encode({**msgspec.json.decode(encoded), **end})
    return Chat(messages, encoded)


def end_of_prompt(adds: bool | None, continues: bool | None) -> dict[str, bool]:
    """The template's variables where a prompt does not end with the opening of a new message.
    Raises ``ApiError`` 400 where a body asks for both."""
    if adds and continues:
        raise bad_request(
            "continue_final_message and add_generation_prompt contradict each other: the answer "
            "either continues the last message or begins a new one; send one of them as false",
            param="continue_final_message",
        )
    if continues:
        return {"add_generation_prompt": False, "continue_final_message": True}
    return {"add_generation_prompt": False} if adds is False else {}


def _variables(body: ChatBody) -> TemplateVariables | None:
    """The template's variables. Raises ``ApiError`` 400 where two say how much to think."""
    given, effort = body.chat_template_kwargs, body.reasoning_effort
    if effort is None:
        return given
    variables = given or TemplateVariables()
    if variables.reasoning_effort not in (None, effort):
        raise wrong(
            "reasoning_effort", effort, "chat_template_kwargs.reasoning_effort says otherwise"
        )
    if effort != "none":
        return msgspec.structs.replace(variables, reasoning_effort=effort)
    if variables.enable_thinking or variables.thinking:
        raise wrong("reasoning_effort", effort, "chat_template_kwargs ask for thinking")
    return msgspec.structs.replace(variables, enable_thinking=False, thinking=False)


def _output(body: ChatBody) -> OutputFormat:
    """How the answer is read. Raises ``ApiError`` 400."""
    tools = [tool.function for tool in body.tools or ()]
    try:
        return output_format(
            tools,
            chosen(body.tool_choice),
            parallel=body.parallel_tool_calls is not False,
            reasoning="hidden" if body.include_reasoning is False else "apart",
            thinking_budget=body.thinking_token_budget,
        )
    except InvalidValue as invalid:
        raise from_invalid(invalid) from None
