"""What the routes give: answers, chunks of streams, errors, and what the server says of itself.

A field that may be ``UNSET`` is left out where there is nothing to say; one that may be ``None`` is
``null`` then.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from penstock.client.answers import FinishReason

StopReason = Annotated[
    int | str | None,
    Meta(description="The string of stop, or the token of stop_token_ids, that was found."),
]
Index = Annotated[int, Meta(ge=0, description="Which choice; those of one prompt follow another.")]
Count = Annotated[int, Meta(ge=0)]
Created = Annotated[int, Meta(description="Seconds since 1970, UTC.")]


class Given(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An object that a route gives."""


# --- errors


class ErrorInfo(Given, kw_only=True):
    message: Annotated[str, Meta(description="What is wrong, and what is allowed.")]
    type: str
    param: Annotated[str | None, Meta(description="The parameter at fault.")]
    code: str | None


class ErrorBody(Given, kw_only=True):
    """Every answer with a status from 400 on; in a stream, the event that ends it instead."""

    error: ErrorInfo


# --- what all generated answers have


class CachedTokens(Given, kw_only=True):
    cached_tokens: Annotated[Count, Meta(description="Of the prompt, found in the prefix cache.")]


class ReasoningTokens(Given, kw_only=True):
    reasoning_tokens: Annotated[Count, Meta(description="Of the answer: thinking.")]


class CompletionDetails(Given, kw_only=True):
    """Of the completion; what it has nothing of is left out."""

    reasoning_tokens: Annotated[Count, Meta(description="Of the answer: thinking.")] | UnsetType = (
        UNSET
    )
    accepted_prediction_tokens: (
        Annotated[Count, Meta(description="Of the answer: drafted ahead by the server.")]
        | UnsetType
    ) = UNSET
    rejected_prediction_tokens: (
        Annotated[Count, Meta(description="Drafted, and not in the answer; they cost nothing.")]
        | UnsetType
    ) = UNSET


class UsageBody(Given, kw_only=True):
    """Tokens of all prompts and choices of a request."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


class AnswerHead(Given, kw_only=True):
    """How a whole answer and each event of its stream begin."""

    id: str
    object: str
    created: Created
    model: str


class PromptLogprob(Given, kw_only=True):
    logprob: float
    rank: Annotated[int, Meta(ge=1)]
    decoded_token: str


PromptLogprobs = Annotated[
    list[dict[str, PromptLogprob] | None],
    Meta(description="For each token of the prompt, by token id; null for the first."),
]

Ids = list[Annotated[int, Meta(ge=0)]]
TokenIds = Annotated[
    Ids,
    Meta(description="Ids of all generated tokens, with return_token_ids; of a chunk, its own."),
]
PromptTokenIds = Annotated[Ids, Meta(description="Ids of the prompt's tokens, likewise.")]


# --- chat completions


class TokenLogprob(Given, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenLogprob, kw_only=True):
    top_logprobs: list[TokenLogprob]


class ChatLogprobsBody(Given, kw_only=True):
    content: list[ChatTokenLogprob]
    refusal: None


class CalledFunction(Given, kw_only=True):
    name: str
    arguments: Annotated[str, Meta(description="JSON.")]


class ToolCall(Given, kw_only=True):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(Given, kw_only=True):
    role: Literal["assistant"]
    content: Annotated[str | None, Meta(description="null where tools are called and no more.")]
    refusal: None
    reasoning: Annotated[str, Meta(description="What was thought before.")] | UnsetType = UNSET
    reasoning_content: Annotated[str, Meta(description="The same.")] | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


ChatFinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoice(Given, kw_only=True):
    index: Index
    message: AnswerMessage
    logprobs: ChatLogprobsBody | None
    finish_reason: ChatFinishReason
    stop_reason: StopReason
    token_ids: TokenIds | UnsetType = UNSET


class ChatCompletion(AnswerHead, kw_only=True):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: PromptTokenIds | UnsetType = UNSET


class FunctionDelta(Given, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(Given, kw_only=True):
    index: Count
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class MessageDelta(Given, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Given, kw_only=True):
    index: Index
    delta: MessageDelta
    logprobs: ChatLogprobsBody | None
    finish_reason: ChatFinishReason | None
    stop_reason: StopReason | UnsetType = UNSET
    token_ids: TokenIds | UnsetType = UNSET


class ChatChunk(AnswerHead, kw_only=True):
    """An event of a stream of /v1/chat/completions."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    prompt_token_ids: (
        Annotated[PromptTokenIds, Meta(description="In a stream's first chunk.")] | UnsetType
    ) = UNSET
    usage: UsageBody | UnsetType | None = UNSET


# --- completions


class LogprobColumns(Given, kw_only=True):
    """Columns with one entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[Count]


class CompletionChoice(Given, kw_only=True):
    index: Index
    text: str
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    logprobs: LogprobColumns | None
    finish_reason: FinishReason
    stop_reason: StopReason
    token_ids: TokenIds | UnsetType = UNSET
    prompt_token_ids: PromptTokenIds | UnsetType = UNSET


class Completion(AnswerHead, kw_only=True):
    """The answer of /v1/completions."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: UsageBody


class CompletionChunkChoice(Given, kw_only=True):
    index: Index
    text: str
    logprobs: LogprobColumns | None
    finish_reason: FinishReason | None
    stop_reason: StopReason | UnsetType = UNSET
    token_ids: TokenIds | UnsetType = UNSET
    prompt_token_ids: (
        Annotated[PromptTokenIds, Meta(description="In a choice's first chunk.")] | UnsetType
    ) = UNSET


class CompletionChunk(AnswerHead, kw_only=True):
    """An event of a stream of /v1/completions."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET


# --- the server


class ModelCard(Given, kw_only=True):
    """A name under which a model is served."""

    id: str
    object: Literal["model"] = "model"
    created: Created
    owned_by: str = "penstock"
    root: Annotated[str, Meta(description="The model's first name.")]
    parent: Annotated[
        str | None, Meta(description="Of an adapter: the model that it is added to.")
    ] = None
    max_model_len: Annotated[Count, Meta(description="Tokens of prompt and output together.")]
    tasks: Annotated[list[str], Meta(description="What it does: generate, embed, score, classify.")]
    state: Annotated[
        str | UnsetType,
        Meta(description="Of one that is not awake: falling asleep, asleep, or waking."),
    ] = UNSET


class ModelList(Given, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Live(Given, kw_only=True):
    status: Literal["live"] = "live"


class Ready(Given, kw_only=True):
    ready: bool
    status: Literal["ready", "not ready", "draining"]
    parts: Annotated[dict[str, str], Meta(description="What each part is doing, for people.")]
    models: Annotated[dict[str, str], Meta(description="Of each model ready, or what it lacks.")]


class Version(Given, kw_only=True):
    version: str
