"""Ollama's /api/generate: the completion of a prompt, with or without the chat template."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET

from penstock.client.gateway_interface import ServedModel
from penstock.client.messages import Message
from penstock.client.tools import output_format
from penstock.protocol.wire.messages.requests import PromptText
from penstock.services.frontend.bodies.ollama import OllamaError as Error
from penstock.services.frontend.bodies.ollama import OllamaGenerateBody, OllamaGenerated
from penstock.services.frontend.bodies.routes import JSON_LINES, RouteBodies
from penstock.services.frontend.body import Pause, decode_body, no_pause
from penstock.services.frontend.dialects.ollama.render import OllamaRenderer, Part, error_body
from penstock.services.frontend.dialects.ollama.request import (
    chat_of,
    check_plain,
    model_of,
    request_of,
)
from penstock.services.frontend.errors import ApiError
from penstock.services.frontend.parse import GenerateRequest


class OllamaGenerateDialect:
    name = "ollama-generate"
    routes: tuple[str, ...] = ("/api/generate",)
    bodies = (
        RouteBodies(
            "POST",
            routes[0],
            OllamaGenerated,
            OllamaGenerateBody,
            OllamaGenerated,
            summary="Answer or continue a prompt",
            fails=Error,
            stream_type=JSON_LINES,
            group="Ollama",
        ),
    )

    def parse(
        self, raw: bytes, models: list[ServedModel], pause: Pause | None = None
    ) -> GenerateRequest:
        body = decode_body(raw, OllamaGenerateBody, pause or no_pause)
        model, name = model_of(body.model, models)
        if not body.prompt:
            return request_of(body, model, name, None, None)
        if body.raw:
            check_plain(body, ("system", "think"))
            return request_of(body, model, name, PromptText(body.prompt), None)
        messages = [Message(role="user", content=body.prompt)]
        if body.system:
            messages.insert(0, Message(role="system", content=body.system))
        output = output_format((), reasoning="hidden" if body.think is False else "apart")
        return request_of(body, model, name, chat_of(body, messages), output)

    def renderer(self, request: GenerateRequest, answer_id: str, created: int) -> GenerateRenderer:
        return GenerateRenderer(request, created)

    def error(self, error: ApiError) -> bytes:
        return error_body(error)


class GenerateRenderer(OllamaRenderer):
    """The answer is a text."""

    before_text = b'"response":'
    behind_text = b""

    def answer(self, part: Part, **fields: Any) -> msgspec.Struct:
        return OllamaGenerated(
            model=self.request.model,
            created_at=self.created_at,
            response=part.text,
            thinking=part.thinking or UNSET,
            **fields,
        )
