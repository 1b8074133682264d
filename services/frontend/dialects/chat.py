"""OpenAI's chat completions: /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.client.answers import Answer
from penstock.client.interface import ServedModel
from penstock.client.messages import encode_messages
from penstock.protocol.validation import InvalidValue
from penstock.protocol.wire.messages.requests import Chat
from penstock.protocol.wire.messages.tokens import (
    Event,
    Reasoning,
    Text,
    ToolArguments,
    ToolCallOpened,
)
from penstock.services.frontend.bodies.requests import ChatBody
from penstock.services.frontend.body import Pause, decode_body, no_pause
from penstock.services.frontend.dialects.logprobs import ChatLogprobs, prompt_logprobs
from penstock.services.frontend.dialects.openai import OpenAIRenderer
from penstock.services.frontend.errors import ApiError, bad_request, from_invalid
from penstock.services.frontend.json_lines import encode
from penstock.services.frontend.parameters import sampling_of, wrong
from penstock.services.frontend.parse import GenerateRequest, find_model, generate_request

_NO_VARIABLES = b"{}"


class ChatDialect:
    name = "chat"
    routes: tuple[str, ...] = ("/v1/chat/completions",)

    def parse(
        self, raw: bytes, models: list[ServedModel], pause: Pause | None = None
    ) -> GenerateRequest:
        body = decode_body(raw, ChatBody, pause or no_pause)
        model, name = find_model(body.model, models)
        params = sampling_of(body, model, logprobs=_logprobs(body))
        return generate_request(body, model, name, params, [_chat(body)])

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
    variables = body.chat_template_kwargs
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


class ChatRenderer(OpenAIRenderer):
    """A choice is a message. The first frame of each has the role."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl"
    first_text = b'"delta":{"role":"assistant","content":'
    later_text = b'"delta":{"content":'
    close = b"}"

    def members(self, events: list[Event], *, first: bool) -> list[bytes]:
        found: list[bytes] = []
        for event in events:
            role = {"role": "assistant"} if first and not found else {}
            found.append(b'"delta":' + encode({**role, **_delta(event)}))
        return found

    def content(self, answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
        calls: dict[int, dict[str, Any]] = {}
        for event in answer.events():
            match event:
                case Text(text):
                    message["content"] += text
                case Reasoning(text):
                    message["reasoning_content"] = message.get("reasoning_content", "") + text
                case ToolCallOpened(index):
                    calls[index] = _opened(event)
                case ToolArguments(index, text):
                    calls[index]["function"]["arguments"] += text
                case _:
                    raise _unexpected(event)
        if calls:
            message["tool_calls"] = list(calls.values())
        return {"message": message}

    def logprobs(self) -> ChatLogprobs:
        return ChatLogprobs(self.request.params)

    def more(self, answers: Sequence[Answer]) -> dict[str, Any]:
        found = prompt_logprobs(answers[0].details)
        return {} if found is None else {"prompt_logprobs": found}


def _delta(event: Event) -> dict[str, Any]:
    """What an event adds to its message."""
    match event:
        case Text(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case ToolCallOpened(index):
            return {"tool_calls": [{"index": index, **_opened(event)}]}
        case ToolArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
    raise _unexpected(event)


def _opened(event: ToolCallOpened) -> dict[str, Any]:
    return {
        "id": event.id,
        "type": "function",
        "function": {"name": event.name, "arguments": ""},
    }


def _unexpected(event: Event) -> TypeError:
    return TypeError(f"{type(event).__name__} has no place in a chat completion")
