"""What the two generating endpoints of OpenAI's API have in common.

A stream's frame is ``prefix + JSON string + suffix``. Prefix and suffix of a choice are rendered
once, so that a token costs a concatenation and the encoding of its text.
https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol

from msgspec import UNSET, UnsetType

from penstock.client.answers import FINISH_REASONS, Answer, FinishReason
from penstock.client.meters import Usage
from penstock.protocol.wire.messages.tokens import (
    End,
    Event,
    RowDetails,
    ToolCallOpened,
)
from penstock.services.frontend.bodies.responses import (
    AnswerHead,
    CachedTokens,
    ChatFinishReason,
    CompletionDetails,
    Given,
    UsageBody,
)
from penstock.services.frontend.dialects.interface import KEEP_ALIVE
from penstock.services.frontend.dialects.token_ids import NONE_MORE
from penstock.services.frontend.errors import ApiError
from penstock.services.frontend.json_lines import encode
from penstock.services.frontend.parse import GenerateRequest

DONE = b"data: [DONE]\n\n"


class Logprobs(Protocol):
    """The ``logprobs`` member of one choice, for its rows in order."""

    def member(self, details: Iterable[RowDetails]) -> Given | None:
        """``None`` where logprobs are not wanted or none are there."""


class OpenAIRenderer(ABC):
    """The bytes of one answer, but for the content of its choices."""

    chunk_name: ClassVar[str]
    id_prefix: ClassVar[str]
    first_text: ClassVar[bytes]
    """What stands before the first text of a choice, ``later_text`` before every other."""
    later_text: ClassVar[bytes]
    close: ClassVar[bytes]
    """What stands behind a text."""
    keep_alive = KEEP_ALIVE

    def __init__(self, request: GenerateRequest, answer_id: str, created: int) -> None:
        self.request = request
        self.direct = not request.options.continuous_usage_stats
        self.id = f"{self.id_prefix}-{answer_id}"
        self.created = created
        chunk = AnswerHead(id=self.id, object=self.chunk_name, created=created, model=request.model)
        self._head = b"data: " + encode(chunk)[:-1] + b',"choices":['

    # --- what an endpoint adds

    @abstractmethod
    def members(self, events: list[Event], *, first: bool) -> list[bytes]:
        """One rendered member of a choice for each event, or one that says nothing. first: of the
        choice."""

    @abstractmethod
    def body(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        """The whole answer. One for each choice, in order."""

    @abstractmethod
    def logprobs(self) -> Logprobs:
        """A new one, for one choice."""

    @abstractmethod
    def ids(self, answer: Answer) -> tuple[bytes, bytes]:
        """What a frame says of the ids of an answer's tokens and prompt: in its choice, behind its
        choices."""

    # --- streams

    def choice(self, index: int, usage: Usage) -> OpenAIFrames:
        return OpenAIFrames(self, index, usage)

    def opening(self, index: int) -> bytes:
        """The beginning of a frame of this choice."""
        return b'%s{"index":%d,' % (self._head, index)

    def ending(
        self,
        usage: Usage,
        end: End | None = None,
        logprobs: bytes = b"null",
        *,
        called: bool = False,
        ids: tuple[bytes, bytes] = (b"", b""),
    ) -> bytes:
        """The rest of a frame, behind the content of its choice. called: tools were, in it. ids: as
        ``ids`` says them."""
        reasons = b'"finish_reason":null'
        if end is not None:
            reason, stop = (
                encode(finish_reason(FINISH_REASONS[end.reason], called=called)),
                encode(end.stop),
            )
            reasons = b'"finish_reason":%s,"stop_reason":%s' % (reason, stop)
        in_choice, behind = ids
        behind += self._usage_member(usage)
        return b',"logprobs":%s,%s%s}]%s}\n\n' % (logprobs, reasons, in_choice, behind)

    def _usage_member(self, usage: Usage) -> bytes:
        """What a frame before the last one says of it."""
        options = self.request.options
        if options.continuous_usage_stats:
            return b',"usage":' + encode(usage_body(usage))
        return b',"usage":null' if options.include_usage else b""

    def last(self, usage: Usage) -> bytes:
        if not self.request.options.include_usage:
            return DONE
        return b'%s],"usage":%s}\n\n%s' % (self._head, encode(usage_body(usage)), DONE)

    def failed(self, error: ApiError) -> bytes:
        """A stream that ends with an error has no ``[DONE]``."""
        return b"data: %s\n\n" % error.body()


class OpenAIFrames:
    """The frames of one choice."""

    __slots__ = (
        "_called",
        "_logprobs",
        "_opening",
        "_renderer",
        "_usage",
        "later",
        "prefix",
        "suffix",
    )

    def __init__(self, renderer: OpenAIRenderer, index: int, usage: Usage) -> None:
        self._renderer = renderer
        self._usage = usage
        self._logprobs = renderer.logprobs()
        self._called = False
        self._opening = renderer.opening(index)
        self.prefix = self._opening + renderer.first_text
        self.later = self._opening + renderer.later_text
        self.suffix = renderer.close + renderer.ending(usage)

    def render(self, answer: Answer) -> bytes:
        events, end, renderer = answer.events(), answer.end, self._renderer
        logprobs = self._logprobs.member(answer.details) if answer.details else None
        if not events and end is None and logprobs is None and not answer.ids:
            return b""
        *earlier, last = renderer.members(events, first=self.prefix is not self.later)
        self.prefix = self.later
        ids, no_more = (b"", b""), (b"", b"")
        if renderer.request.returns_ids:
            ids, no_more = renderer.ids(answer), (NONE_MORE, b"")
        frames = []
        for member in earlier:
            frames.append(self._opening + member + renderer.ending(self._usage, ids=ids))
            ids = no_more
        self._called = self._called or calls_tools(events)
        ending = renderer.ending(self._usage, end, encode(logprobs), called=self._called, ids=ids)
        return b"".join((*frames, self._opening, last, ending))


def calls_tools(events: Iterable[Event]) -> bool:
    return any(isinstance(event, ToolCallOpened) for event in events)


def finish_reason(reason: FinishReason, *, called: bool) -> ChatFinishReason:
    """Why a choice ended; one that has called tools and was not cut waits for their results."""
    return "tool_calls" if called and reason == "stop" else reason


def usage_body(usage: Usage) -> UsageBody:
    return UsageBody(
        prompt_tokens=usage.prompt,
        completion_tokens=usage.completion,
        total_tokens=usage.prompt + usage.completion,
        prompt_tokens_details=CachedTokens(cached_tokens=usage.cached),
        completion_tokens_details=_completion_details(usage),
    )


def _completion_details(usage: Usage) -> CompletionDetails | UnsetType:
    """``UNSET`` where there is nothing to say."""
    drafted = usage.accepted_drafts + usage.rejected_drafts
    if not usage.reasoning and not drafted:
        return UNSET
    return CompletionDetails(
        reasoning_tokens=usage.reasoning or UNSET,
        accepted_prediction_tokens=usage.accepted_drafts if drafted else UNSET,
        rejected_prediction_tokens=usage.rejected_drafts if drafted else UNSET,
    )
