"""What the routes of Anthropic's Messages API give: messages, events of streams, errors, models."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from penstock.services.frontend.bodies.responses import Count, Given


class TextBlock(Given, kw_only=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(Given, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(Given, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class ThinkingTokens(Given, kw_only=True):
    thinking_tokens: Count


class MessageUsage(Given, kw_only=True):
    input_tokens: Annotated[Count, Meta(description="Of the prompt, not found in the cache.")]
    cache_creation_input_tokens: Count = 0
    cache_read_input_tokens: Annotated[Count, Meta(description="Of the prompt, found there.")]
    output_tokens: Count
    output_tokens_details: ThinkingTokens | UnsetType = UNSET


class AnsweredMessage(Given, kw_only=True, tag_field="type", tag="message"):
    """The answer of /v1/messages."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    stop_details: None = None
    usage: MessageUsage


class TokenCount(Given, kw_only=True):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: Count


# --- events of a stream


class MessageStart(Given, kw_only=True, tag_field="type", tag="message_start"):
    message: AnsweredMessage


class ContentBlockStart(Given, kw_only=True, tag_field="type", tag="content_block_start"):
    index: Count
    content_block: AnswerBlock


class TextDelta(Given, kw_only=True, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(Given, kw_only=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(Given, kw_only=True, tag_field="type", tag="signature_delta"):
    signature: str


class InputJsonDelta(Given, kw_only=True, tag_field="type", tag="input_json_delta"):
    partial_json: str


BlockDelta = TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockDelta(Given, kw_only=True, tag_field="type", tag="content_block_delta"):
    index: Count
    delta: BlockDelta


class ContentBlockStop(Given, kw_only=True, tag_field="type", tag="content_block_stop"):
    index: Count


class Ending(Given, kw_only=True):
    stop_reason: StopReason
    stop_sequence: str | None
    stop_details: None = None


class MessageEnd(Given, kw_only=True, tag_field="type", tag="message_delta"):
    delta: Ending
    usage: MessageUsage


class MessageStop(Given, kw_only=True, tag_field="type", tag="message_stop"):
    """The last event of a stream."""


class Ping(Given, kw_only=True, tag_field="type", tag="ping"):
    """Goes out in silence."""


class ErrorDetails(Given, kw_only=True):
    error_code: str


class MessageError(Given, kw_only=True):
    type: str
    message: Annotated[str, Meta(description="What is wrong, and what is allowed.")]
    details: ErrorDetails | UnsetType = UNSET


class MessageErrorBody(Given, kw_only=True, tag_field="type", tag="error"):
    """An answer with a status from 400 on, and the event that ends a stream instead of a stop."""

    error: MessageError
    request_id: str


MessageEvent = (
    MessageStart
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageEnd
    | MessageStop
    | Ping
    | MessageErrorBody
)


# --- models


class ModelInfo(Given, kw_only=True, tag_field="type", tag="model"):
    """A name under which a model is served, as Anthropic's clients read it."""

    id: str
    display_name: Annotated[str, Meta(description="The model's first name.")]
    created_at: Annotated[str, Meta(description="RFC 3339.")]
    lifecycle: Literal["active"] = "active"
    max_input_tokens: Count
    max_tokens: Count


class ModelInfoList(Given, kw_only=True):
    data: list[ModelInfo]
    has_more: Literal[False] = False
    first_id: str | None
    last_id: str | None
