"""The dialects of /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.client.answers import Answer
from penstock.client.gateway_interface import ServedModel
from penstock.client.messages import Message, encode_messages
from penstock.client.meters import Usage
from penstock.client.request_terms import terms_of
from penstock.client.tools import AUTO, Choice, FunctionTool, output_format
from penstock.protocol.grammar.request import from_output_config
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.tasks import TOKENIZE
from penstock.protocol.validation import InvalidValue
from penstock.protocol.wire.messages.requests import Chat, OutputFormat
from penstock.services.frontend.bodies.anthropic import (
    ConversationBody,
    CountTokensBody,
    CustomTool,
    MessagesBody,
    ToolSelection,
)
from penstock.services.frontend.bodies.anthropic_answers import (
    AnsweredMessage,
    MessageErrorBody,
    MessageEvent,
    TokenCount,
)
from penstock.services.frontend.bodies.routes import RouteBodies
from penstock.services.frontend.body import Pause, decode_body, no_pause
from penstock.services.frontend.dialects.anthropic.breakpoints import hints_of
from penstock.services.frontend.dialects.anthropic.conversation import continues, conversation
from penstock.services.frontend.dialects.anthropic.errors import error_body
from penstock.services.frontend.dialects.anthropic.offered_tools import offered_tools
from penstock.services.frontend.dialects.anthropic.renderer import (
    MessagesRenderer,
    MessagesRequest,
)
from penstock.services.frontend.dialects.interface import Unstreamed
from penstock.services.frontend.errors import ApiError, from_invalid
from penstock.services.frontend.json_lines import encode
from penstock.services.frontend.parse import GenerateRequest, find_model

MESSAGES = "/v1/messages"


class MessagesDialect:
    name = "messages"
    routes: tuple[str, ...] = (MESSAGES,)
    bodies = (
        RouteBodies(
            "POST",
            MESSAGES,
            AnsweredMessage,
            MessagesBody,
            MessageEvent,
            MessageErrorBody,
            summary="Answer a conversation",
            group="Anthropic",
        ),
    )

    def parse(
        self, raw: bytes, models: list[ServedModel], pause: Pause | None = None
    ) -> MessagesRequest:
        body = decode_body(raw, MessagesBody, pause or no_pause)
        model, name = find_model(body.model, models)
        try:
            messages = conversation(body.system, body.messages)
            cache = hints_of(body, messages)
            chat, output, params = _chat(body, messages), _output(body), _sampling(body)
        except InvalidValue as invalid:
            raise from_invalid(invalid) from None
        thinking = body.thinking
        return MessagesRequest(
            model=name,
            served=model.name,
            prompts=[chat],
            params=params,
            stream=bool(body.stream),
            terms=terms_of(body, user=body.metadata.user_id if body.metadata else None),
            output=output,
            fits_window=True,
            cache=cache,
            shows_thinking=thinking is None or thinking.display != "omitted",
        )

    def renderer(self, request: GenerateRequest, answer_id: str, created: int) -> MessagesRenderer:
        if not isinstance(request, MessagesRequest):
            raise TypeError(f"{type(request).__name__} is no request of this dialect")
        return MessagesRenderer(request, answer_id)

    def error(self, error: ApiError) -> bytes:
        return error_body(error)


class CountTokensDialect:
    """Counts what the same body would have as its prompt. No engine hears of it."""

    name = "count_tokens"
    routes: tuple[str, ...] = (f"{MESSAGES}/count_tokens",)
    bodies = (
        RouteBodies(
            "POST",
            routes[0],
            TokenCount,
            CountTokensBody,
            fails=MessageErrorBody,
            summary="Count the tokens of what would be the prompt",
            group="Anthropic",
        ),
    )

    def parse(
        self, raw: bytes, models: list[ServedModel], pause: Pause | None = None
    ) -> GenerateRequest:
        body = decode_body(raw, CountTokensBody, pause or no_pause)
        model, name = find_model(body.model, models)
        try:
            chat = _chat(body, conversation(body.system, body.messages))
            output = _output(body)
        except InvalidValue as invalid:
            raise from_invalid(invalid) from None
        return GenerateRequest(
            model=name,
            served=model.name,
            prompts=[chat],
            terms=terms_of(body),
            task=TOKENIZE,
            output=output,
        )

    def renderer(self, request: GenerateRequest, answer_id: str, created: int) -> TokenCounter:
        return TokenCounter()

    def error(self, error: ApiError) -> bytes:
        return error_body(error)


# --- what a body asks for; all raise InvalidValue


def _chat(body: ConversationBody, messages: list[Message]) -> Chat:
    """The messages and the template's variables."""
    variables: dict[str, Any] = {}
    if continues(messages):
        variables |= {"add_generation_prompt": False, "continue_final_message": True}
    thinks = _thinks(body)
    variables |= {"enable_thinking": thinks, "thinking": thinks}
    if body.output_config and body.output_config.effort:
        variables["reasoning_effort"] = body.output_config.effort
    return Chat(encode_messages(messages), msgspec.json.encode(variables))


def _thinks(body: ConversationBody) -> bool:
    return body.thinking is not None and body.thinking.type != "disabled"


def _output(body: ConversationBody) -> OutputFormat:
    """How the answer is read. What a model thinks all the same is not shown to a client that did
    not ask for it: it expects a block of text."""
    choice = body.tool_choice
    return output_format(
        [_tool(tool) for tool in offered_tools(body.tools or (), body.messages)],
        _choice(choice),
        parallel=choice is None or not choice.disable_parallel_tool_use,
        reasoning="apart" if _thinks(body) else "hidden",
        thinking_budget=body.thinking.budget_tokens if body.thinking else None,
    )


def _tool(tool: CustomTool) -> FunctionTool:
    return FunctionTool(
        name=tool.name,
        description=tool.description,
        parameters=tool.input_schema,
        strict=tool.strict,
    )


def _choice(choice: ToolSelection | None) -> Choice:
    match choice:
        case ToolSelection(type="tool", name=str(name)):
            return Choice("required", [name])
        case ToolSelection(type="any"):
            return Choice("required")
        case ToolSelection(type="none"):
            return Choice("none")
    return AUTO


def _sampling(body: MessagesBody) -> SamplingParams:
    config = body.output_config
    given = {name: getattr(body, name) for name in ("temperature", "top_p", "top_k", "seed")}
    return SamplingParams(
        **given,
        max_tokens=body.max_tokens,
        stop=body.stop_sequences or [],
        structured_outputs=from_output_config(config.format.schema)
        if config and config.format
        else None,
    )


class TokenCounter(Unstreamed):
    """The renderer of a count."""

    def body(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        return encode(TokenCount(input_tokens=usage.prompt))
