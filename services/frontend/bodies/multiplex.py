"""The frames of /v1/stream.

A client's frame has an id, a type and, where it begins a request, the body that the route over HTTP
takes. What comes back names the request by its id.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from penstock.protocol.validation import InvalidValue
from penstock.services.frontend.bodies.requests import ChatBody, CompletionBody, GenerationBody
from penstock.services.frontend.bodies.responses import (
    ErrorInfo,
    PromptTokenIds,
    TokenIds,
    UsageBody,
)

MAX_ID_LENGTH = 64


def _always_streams(body: GenerationBody) -> None:
    """Raises ``InvalidValue`` for a body that asks for a whole answer."""
    if body.stream is False:
        raise InvalidValue(
            "stream is false, but every answer on /v1/stream comes in pieces; leave it out, or "
            "POST to the route over HTTP",
            "stream",
        )
    body.stream = True


class StreamedChat(ChatBody, kw_only=True):
    """The body of a frame of the type chat: that of /v1/chat/completions."""

    def __post_init__(self) -> None:
        _always_streams(self)
        super().__post_init__()


class StreamedCompletion(CompletionBody, kw_only=True):
    """The body of a frame of the type completion: that of /v1/completions."""

    def __post_init__(self) -> None:
        _always_streams(self)
        super().__post_init__()


Name = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=MAX_ID_LENGTH,
        description="The client's, of a request: none that runs on the connection has it.",
    ),
]


class ChatFrame(Struct, kw_only=True, tag_field="type", tag="chat"):
    """Begins a chat."""

    id: Name
    body: ChatBody


class CompletionFrame(Struct, kw_only=True, tag_field="type", tag="completion"):
    """Begins a completion."""

    id: Name
    body: CompletionBody


class CancelFrame(Struct, kw_only=True, tag_field="type", tag="cancel"):
    """Ends a request."""

    id: Annotated[str, Meta(description="Of the request.")]


ClientFrame = ChatFrame | CompletionFrame | CancelFrame
Choice = Annotated[int, Meta(ge=0, description="Of the answer; left out where it is 0.")]


class _Delta(Struct, kw_only=True, omit_defaults=True, tag_field="type"):
    """A piece of an answer. Its text comes last of what is sent."""

    id: Annotated[str, Meta(description="The client's, of its request.")]
    choice: Choice = 0
    logprobs: Annotated[Any, Meta(description="As in the chunks of the route over HTTP.")] = UNSET
    usage: (
        Annotated[
            UsageBody, Meta(description="So far, with stream_options.continuous_usage_stats.")
        ]
        | UnsetType
    ) = UNSET
    token_ids: TokenIds | UnsetType = UNSET
    prompt_token_ids: (
        Annotated[PromptTokenIds, Meta(description="In a choice's first frame.")] | UnsetType
    ) = UNSET


class TextFrame(_Delta, kw_only=True, omit_defaults=True, tag="text"):
    """More of a choice's text."""

    text: str


class ReasoningFrame(_Delta, kw_only=True, omit_defaults=True, tag="reasoning"):
    """More of what the model thinks before it answers."""

    text: str


class ToolCallFrame(_Delta, kw_only=True, omit_defaults=True, tag="tool_call"):
    """The model begins to call a tool; its arguments follow."""

    index: Annotated[int, Meta(ge=0, description="The number of the call in its choice.")]
    call_id: str
    name: str


class ArgumentsFrame(_Delta, kw_only=True, omit_defaults=True, tag="arguments"):
    """More of a call's arguments, which are JSON."""

    index: Annotated[int, Meta(ge=0)]
    text: str


DeltaFrame = TextFrame | ReasoningFrame | ToolCallFrame | ArgumentsFrame


class EndedChoice(Struct, kw_only=True):
    """How one choice ended."""

    finish_reason: Literal["stop", "length", "tool_calls", "cancelled"]
    stop_reason: int | str | None


class EndFrame(Struct, kw_only=True, tag_field="type", tag="end"):
    """The one end of a request that no error has ended."""

    id: str
    request_id: Annotated[str, Meta(description="The server's name for it, in logs.")]
    model: str
    choices: Annotated[list[EndedChoice], Meta(description="All, in order.")]
    usage: UsageBody


class ErrorFrame(Struct, kw_only=True, omit_defaults=True, tag_field="type", tag="error"):
    """The one end of a request that an error has ended, or an answer to a frame that began none."""

    id: Annotated[str | None, Meta(description="null where no request ends by it.")]
    status: Annotated[int, Meta(ge=400, le=599, description="What HTTP would have said.")]
    error: ErrorInfo
    retry_after_s: Annotated[int, Meta(ge=1, description="When to try again.")] | UnsetType = UNSET


ServerFrame = DeltaFrame | EndFrame | ErrorFrame
