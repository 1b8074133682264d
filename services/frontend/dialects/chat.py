"""OpenAI's chat completions: /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from penstock.client.answers import Answer
from penstock.client.gateway_interface import ServedModel
from penstock.client.messages import encode_messages
from penstock.client.meters import Usage
from penstock.client.tools import chosen, output_format
from penstock.protocol.validation import InvalidValue
from penstock.protocol.wire.messages.requests import Chat, OutputFormat
from penstock.protocol.wire.messages.tokens import (
    Event,
    Reasoning,
    Text,
    ToolArguments,
    ToolCallOpened,
)
from penstock.services.frontend.bodies.requests import ChatBody, TemplateVariables
from penstock.services.frontend.bodies.responses import (
    AnswerMessage,
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    FunctionDelta,
    MessageDelta,
    ToolCall,
    ToolCallDelta,
)
from penstock.services.frontend.bodies.routes import RouteBodies
from penstock.services.frontend.body import Pause, decode_body, no_pause
from penstock.services.frontend.dialects.logprobs import ChatLogprobs, prompt_logprobs
from penstock.services.frontend.dialects.openai import (
    OpenAIRenderer,
    calls_tools,
    finish_reason,
    usage_body,
)
from penstock.services.frontend.errors import ApiError, bad_request, from_invalid
from penstock.services.frontend.json_lines import encode
from penstock.services.frontend.parameters import sampling_of, wrong
from penstock.services.frontend.parse import GenerateRequest, find_model, generate_request

_NO_VARIABLES = b"{}"


class ChatDialect:
    name = "chat"
    routes: tuple[str, ...] = ("/v1/chat/completions",)
    bodies = (
        RouteBodies(
            "POST",
            routes[0],
            ChatCompletion,
            ChatBody,
            ChatChunk,
            summary="Answer a conversation",
            group="OpenAI",
        ),
    )

    def parse(
        self, raw: bytes, models: list[ServedModel], pause: Pause | None = None
    ) -> GenerateRequest:
        body = decode_body(raw, ChatBody, pause or no_pause)
        model, name = find_model(body.model, models)
        params = sampling_of(body, model, logprobs=_logprobs(body))
        return generate_request(body, model, name, params, [_chat(body)], _output(body))

    def renderer(self, request: GenerateRequest, answer_id: str, created: int) -> ChatRenderer:
        return ChatRenderer(request, answer_id, created)

    def error(self, error: ApiError) -> bytes:
        return error.body()


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
    adds, continues = body.add_generation_prompt, body.continue_final_message
    if adds and continues:
        raise bad_request(
            "continue_final_message and add_generation_prompt contradict each other: the answer "
            "either continues the last message or begins a new one; send one of them as false",
            param="continue_final_message",
        )
    if continues or adds is False:  # the prompt does not end with the opening of a new message
        end = {"add_generation_prompt": False}
        if continues:
            end["continue_final_message"] = True
        encoded = msgspec.json.encode({**msgspec.json.decode(encoded), **end})
    return Chat(messages, encoded)


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


class ChatRenderer(OpenAIRenderer):
    """A choice is a message. The first frame of each has the role."""

    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl"
    first_text = b'"delta":{"role":"assistant","content":'
    later_text = b'"delta":{"content":'
    close = b"}"

    def members(self, events: list[Event], *, first: bool) -> list[bytes]:
        if not events and not first:
            return [b'"delta":{}']
        found: list[bytes] = []
        for event in events or [Text("")]:
            if isinstance(event, Reasoning) and (found or not first):  # most rows while it thinks
                text = encode(event.text)
                found.append(b'"delta":{"reasoning":%s,"reasoning_content":%s}' % (text, text))
                continue
            delta = _delta(event)
            if first and not found:
                delta.role = "assistant"
            found.append(b'"delta":' + encode(delta))
        return found

    def body(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        prompt = prompt_logprobs(answers[0].details)
        return encode(
            ChatCompletion(
                id=self.id,
                created=self.created,
                model=self.request.model,
                choices=[self._choice(index, answer) for index, answer in enumerate(answers)],
                usage=usage_body(usage),
                prompt_logprobs=UNSET if prompt is None else prompt,
            )
        )

    def _choice(self, index: int, answer: Answer) -> ChatChoice:
        reason, stop = answer.finish
        events = answer.events()
        return ChatChoice(
            index=index,
            message=_message(events),
            logprobs=self.logprobs().member(answer.details),
            finish_reason=finish_reason(reason, called=calls_tools(events)),
            stop_reason=stop,
        )

    def logprobs(self) -> ChatLogprobs:
        return ChatLogprobs(self.request.params)


def _message(events: list[Event]) -> AnswerMessage:
    """The whole message that events make."""
    content = thought = ""
    calls: dict[int, ToolCall] = {}
    for event in events:
        match event:
            case Text(text):
                content += text
            case Reasoning(text):
                thought += text
            case ToolCallOpened(index, number, name):
                function = CalledFunction(name=name, arguments="")
                calls[index] = ToolCall(id=number, type="function", function=function)
            case ToolArguments(index, text):
                calls[index].function.arguments += text
            case _:
                raise _unexpected(event)
    return AnswerMessage(
        role="assistant",
        content=content if content or not calls else None,
        refusal=None,
        reasoning=thought or UNSET,
        reasoning_content=thought or UNSET,
        tool_calls=list(calls.values()) or UNSET,
    )


def _delta(event: Event) -> MessageDelta:
    """What an event adds to its message."""
    match event:
        case Text(text):
            return MessageDelta(content=text)
        case Reasoning(text):
            return MessageDelta(reasoning=text, reasoning_content=text)
        case ToolCallOpened(index, number, name):
            function = FunctionDelta(name=name, arguments="")
            call = ToolCallDelta(index=index, id=number, type="function", function=function)
            return MessageDelta(tool_calls=[call])
        case ToolArguments(index, text):
            call = ToolCallDelta(index=index, function=FunctionDelta(arguments=text))
            return MessageDelta(tool_calls=[call])
    raise _unexpected(event)


def _unexpected(event: Event) -> TypeError:
    return TypeError(f"{type(event).__name__} has no place in a chat completion")
