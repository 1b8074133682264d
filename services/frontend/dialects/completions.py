"""OpenAI's completions of plain prompts: /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from penstock.client.answers import Answer
from penstock.client.gateway_interface import ServedModel
from penstock.client.meters import Usage
from penstock.protocol.sampling import DEFAULT_COMPLETION_TOKENS
from penstock.protocol.wire.messages.tokens import Event, Text
from penstock.services.frontend.bodies.requests import CompletionBody
from penstock.services.frontend.bodies.responses import (
    Completion,
    CompletionChoice,
    CompletionChunk,
)
from penstock.services.frontend.bodies.routes import RouteBodies
from penstock.services.frontend.body import Pause, decode_body
from penstock.services.frontend.dialects.logprobs import CompletionLogprobs, prompt_logprobs
from penstock.services.frontend.dialects.openai import OpenAIRenderer, usage_body
from penstock.services.frontend.errors import ApiError
from penstock.services.frontend.json_lines import encode
from penstock.services.frontend.parameters import sampling_of
from penstock.services.frontend.parse import GenerateRequest, find_model, generate_request
from penstock.services.frontend.prompts import parse_prompts
from penstock.services.frontend.token_arrays import decode_completion


class CompletionsDialect:
    name = "completions"
    routes: tuple[str, ...] = ("/v1/completions",)
    bodies = (
        RouteBodies(
            "POST",
            routes[0],
            Completion,
            CompletionBody,
            CompletionChunk,
            summary="Continue texts or token ids",
            group="OpenAI",
        ),
    )

    def parse(
        self, raw: bytes, models: list[ServedModel], pause: Pause | None = None
    ) -> GenerateRequest:
        if pause is None:
            body = decode_body(raw, CompletionBody)
        else:
            body = decode_completion(raw, pause)
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

    def renderer(
        self, request: GenerateRequest, answer_id: str, created: int
    ) -> CompletionsRenderer:
        return CompletionsRenderer(request, answer_id, created)

    def error(self, error: ApiError) -> bytes:
        return error.body()


class CompletionsRenderer(OpenAIRenderer):
    """A choice is a text."""

    chunk_name = "text_completion"
    id_prefix = "cmpl"
    first_text = later_text = b'"text":'
    close = b""

    def members(self, events: list[Event], *, first: bool) -> list[bytes]:
        return [b'"text":' + encode(_text(event)) for event in events or [Text("")]]

    def body(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        return encode(
            Completion(
                id=self.id,
                created=self.created,
                model=self.request.model,
                choices=[self._choice(index, answer) for index, answer in enumerate(answers)],
                usage=usage_body(usage),
            )
        )

    def _choice(self, index: int, answer: Answer) -> CompletionChoice:
        reason, stop = answer.finish
        prompt = prompt_logprobs(answer.details) if self.request.lists_prompt else None
        return CompletionChoice(
            index=index,
            text="".join(map(_text, answer.events())),
            prompt_logprobs=UNSET if prompt is None else prompt,
            logprobs=self.logprobs().member(answer.details),
            finish_reason=reason,
            stop_reason=stop,
        )

    def logprobs(self) -> CompletionLogprobs:
        return CompletionLogprobs(self.request.params)


def _text(event: Event) -> str:
    if not isinstance(event, Text):
        raise TypeError(f"{type(event).__name__} has no place in a completion")
    return event.text
