"""OpenAI's completions of plain prompts: /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from penstock.client.answers import Answer
from penstock.client.gateway_interface import ServedModel
from penstock.client.meters import Usage
from penstock.protocol.wire.messages.tokens import Event, Text
from penstock.services.frontend.bodies.requests import CompletionBody
from penstock.services.frontend.bodies.responses import (
    Completion,
    CompletionChoice,
    CompletionChunk,
)
from penstock.services.frontend.bodies.routes import RouteBodies
from penstock.services.frontend.body import Pause
from penstock.services.frontend.completion_request import completion_request
from penstock.services.frontend.dialects.logprobs import (
    CompletionLogprobs,
    likeliest,
    prompt_logprobs,
)
from penstock.services.frontend.dialects.openai import OpenAIRenderer, usage_body
from penstock.services.frontend.dialects.token_ids import listed, prompt_token_ids, token_ids
from penstock.services.frontend.errors import ApiError
from penstock.services.frontend.json_lines import encode
from penstock.services.frontend.parse import GenerateRequest
from penstock.services.frontend.token_arrays import decode_with_ids


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
        return completion_request(decode_with_ids(raw, CompletionBody, pause), models)

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
        if keeps := self.request.keeps:
            answers = likeliest(answers, self.request.params.n, keeps)
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
            token_ids=listed(answer.ids) if self.request.returns_ids else UNSET,
            prompt_token_ids=UNSET if answer.prompt is None else listed([answer.prompt]),
        )

    def logprobs(self) -> CompletionLogprobs:
        return CompletionLogprobs(self.request.params, shown=not self.request.hides_logprobs)

    def ids(self, answer: Answer) -> tuple[bytes, bytes]:
        """The first chunk of a choice tells its prompt."""
        return token_ids(answer.ids) + prompt_token_ids(answer.prompt), b""


def _text(event: Event) -> str:
    if not isinstance(event, Text):
        raise TypeError(f"{type(event).__name__} has no place in a completion")
    return event.text
