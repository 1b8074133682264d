"""What OpenAI's Responses API gives: responses, their items, the events of a stream."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from penstock.services.frontend.bodies.responses import (
    CachedTokens,
    ChatTokenLogprob,
    Count,
    Given,
    ReasoningTokens,
)

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]


# --- items


class OutputText(Given, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[ChatTokenLogprob] = []


class ReasoningText(Given, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


class SummaryText(Given, kw_only=True, tag_field="type", tag="summary_text"):
    text: str


class OutputMessage(Given, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    content: list[OutputText]


class ReasoningOutput(Given, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    status: ItemStatus
    summary: list[SummaryText]
    content: list[ReasoningText]
    encrypted_content: str | UnsetType = UNSET


class FunctionCall(Given, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: Annotated[str, Meta(description="JSON.")]
    namespace: str | UnsetType = UNSET


class CustomCall(Given, kw_only=True, tag_field="type", tag="custom_tool_call"):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


OutputItem = OutputMessage | ReasoningOutput | FunctionCall | CustomCall


# --- responses


class InputTokensDetails(CachedTokens, kw_only=True):
    cache_write_tokens: Count = 0


class ResponseUsage(Given, kw_only=True):
    input_tokens: Count
    input_tokens_details: InputTokensDetails
    output_tokens: Count
    output_tokens_details: ReasoningTokens
    total_tokens: Count


class ResponseFault(Given, kw_only=True):
    code: str
    message: str


class IncompleteDetails(Given, kw_only=True):
    reason: Literal["max_output_tokens", "steered"]


class ResponseObject(Given, kw_only=True):
    """A response; fields of the request stand in it again."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus
    background: bool = False
    error: ResponseFault | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: dict[str, Any]
    safety_identifier: str | None = None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float | None = None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int = 0
    top_p: float | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
    metadata: dict[str, str] = {}


class DeletedResponse(Given, kw_only=True):
    id: str
    object: Literal["response.deleted"] = "response.deleted"
    deleted: Literal[True] = True


class ItemList(Given, kw_only=True):
    """Items of an input as they were given, each with its id."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(Given, kw_only=True):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: Count


# --- events


class ResponseEvent(Given, kw_only=True):
    """An event of a stream of /v1/responses; which fields it has depends on its type."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
        "response.output_item.added",
        "response.output_item.done",
        "response.content_part.added",
        "response.content_part.done",
        "response.output_text.delta",
        "response.output_text.done",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_part.done",
        "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "error",
    ]
    sequence_number: Count
    response: ResponseObject | UnsetType = UNSET
    output_index: Count | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    content_index: Count | UnsetType = UNSET
    summary_index: Count | UnsetType = UNSET
    part: OutputText | ReasoningText | SummaryText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    code: str | UnsetType | None = UNSET
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET


def replaced(response: ResponseObject, **changes: Any) -> ResponseObject:
    """The same response, later."""
    return msgspec.structs.replace(response, **changes)
