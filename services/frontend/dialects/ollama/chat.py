"""Ollama's /api/chat, and the routes that tell about models."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET

from penstock.client.gateway_interface import ServedModel
from penstock.client.tools import output_format
from penstock.protocol.validation import InvalidValue
from penstock.services.frontend.bodies.ollama import GivenMessage, OllamaChat, OllamaChatBody
from penstock.services.frontend.bodies.ollama import OllamaError as Error
from penstock.services.frontend.bodies.routes import JSON_LINES, RouteBodies
from penstock.services.frontend.body import Pause, decode_body, no_pause
from penstock.services.frontend.dialects.ollama import models as about
from penstock.services.frontend.dialects.ollama.render import OllamaRenderer, Part, error_body
from penstock.services.frontend.dialects.ollama.request import (
    chat_of,
    messages_of,
    model_of,
    request_of,
)
from penstock.services.frontend.errors import ApiError, from_invalid
from penstock.services.frontend.parse import GenerateRequest


class OllamaChatDialect:
    name = "ollama-chat"
    routes: tuple[str, ...] = ("/api/chat",)
    endpoints = about.ENDPOINTS
    bodies = (
        RouteBodies(
            "POST",
            routes[0],
            OllamaChat,
            OllamaChatBody,
            OllamaChat,
            summary="Answer a conversation",
            fails=Error,
            stream_type=JSON_LINES,
            group="Ollama",
        ),
        *about.BODIES,
    )

    def parse(
        self, raw: bytes, models: list[ServedModel], pause: Pause | None = None
    ) -> GenerateRequest:
        body = decode_body(raw, OllamaChatBody, pause or no_pause)
        model, name = model_of(body.model, models)
        if not body.messages:
            return request_of(body, model, name, None, None)
        tools = [tool.function for tool in body.tools or ()]
        try:
            output = output_format(tools, reasoning="hidden" if body.think is False else "apart")
        except InvalidValue as invalid:
            raise from_invalid(invalid) from None
        return request_of(body, model, name, chat_of(body, messages_of(body.messages)), output)

    def renderer(self, request: GenerateRequest, answer_id: str, created: int) -> ChatRenderer:
        return ChatRenderer(request, created)

    def error(self, error: ApiError) -> bytes:
        return error_body(error)


class ChatRenderer(OllamaRenderer):
    """The answer is a message."""

    before_text = b'"message":{"role":"assistant","content":'
    behind_text = b"}"

    def answer(self, part: Part, **fields: Any) -> msgspec.Struct:
        message = GivenMessage(
            content=part.text,
            thinking=part.thinking or UNSET,
            tool_calls=list(part.calls) or UNSET,
        )
        return OllamaChat(
            model=self.request.model, created_at=self.created_at, message=message, **fields
        )
