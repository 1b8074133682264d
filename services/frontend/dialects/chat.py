"""OpenAI's chat completions: /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from penstock.client.answers import Answer
from penstock.client.gateway_interface import ServedModel
from penstock.client.meters import Usage
from penstock.protocol.wire.messages.tokens import (
    Event,
    Reasoning,
    Text,
    ToolArguments,
    ToolCallOpened,
)
from penstock.services.frontend.bodies.requests import ChatBody
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
from penstock.services.frontend.chat_request import chat_request
from penstock.services.frontend.dialects.logprobs import ChatLogprobs, prompt_logprobs
from penstock.services.frontend.dialects.openai import (
    OpenAIRenderer,
    calls_tools,
    finish_reason,
    usage_body,
)
from penstock.services.frontend.dialects.token_ids import listed, prompt_token_ids, token_ids
from penstock.services.frontend.errors import ApiError
from penstock.services.frontend.json_lines import encode
from penstock.services.frontend.parse import GenerateRequest


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
        return chat_request(decode_body(raw, ChatBody, pause or no_pause), models)

    def renderer(self, request: GenerateRequest, answer_id: str, created: int) -> ChatRenderer:
        return ChatRenderer(request, answer_id, created)

    def error(self, error: ApiError) -> bytes:
        return error.body()


class ChatRenderer(OpenAIRenderer):
    """A choice is a message. The first frame of each has the role."""

    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl"
    first_text = b'"delta":{"role":"assistant","content":'
    later_text = b'"delta":{"content":'
    close = b"}"

    def __init__(self, request: GenerateRequest, answer_id: str, created: int) -> None:
        super().__init__(request, answer_id, created)
        self._prompt_was_told = False

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
        first = answers[0]
        prompt = prompt_logprobs(first.details)
        return encode(
            ChatCompletion(
                id=self.id,
                created=self.created,
                model=self.request.model,
                choices=[self._choice(index, answer) for index, answer in enumerate(answers)],
                usage=usage_body(usage),
                prompt_logprobs=UNSET if prompt is None else prompt,
                prompt_token_ids=UNSET if first.prompt is None else listed([first.prompt]),
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
            token_ids=listed(answer.ids) if self.request.returns_ids else UNSET,
        )

    def logprobs(self) -> ChatLogprobs:
        return ChatLogprobs(self.request.params)

    def ids(self, answer: Answer) -> tuple[bytes, bytes]:
        """All choices have one prompt: the first chunk of the stream tells it."""
        prompt = None if self._prompt_was_told else answer.prompt
        self._prompt_was_told |= prompt is not None
        return token_ids(answer.ids), prompt_token_ids(prompt)


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
