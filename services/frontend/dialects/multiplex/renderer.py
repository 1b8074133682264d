"""From the events of an answer to frames.

A row that is plain text, as nearly every token's is, costs one concatenation and the header of its
message: all that stands before the text is the same for every row of a choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

from penstock.client.answers import FINISH_REASONS, Answer
from penstock.client.meters import Usage
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.wire.messages.tokens import (
    End,
    Event,
    Reasoning,
    Text,
    ToolArguments,
    ToolCallOpened,
)
from penstock.services.frontend.bodies.multiplex import (
    ArgumentsFrame,
    DeltaFrame,
    EndedChoice,
    EndFrame,
    ReasoningFrame,
    TextFrame,
    ToolCallFrame,
)
from penstock.services.frontend.dialects.logprobs import ChatLogprobs, CompletionLogprobs
from penstock.services.frontend.dialects.multiplex.encodings import Encoding
from penstock.services.frontend.dialects.openai import calls_tools, finish_reason, usage_body
from penstock.services.frontend.dialects.token_ids import listed
from penstock.services.frontend.errors import ApiError
from penstock.services.frontend.parse import GenerateRequest
from penstock.services.frontend.stream import EventStream, StreamedAnswer

MakeLogprobs = Callable[[SamplingParams], ChatLogprobs | CompletionLogprobs]
_CANCELLED = EndedChoice(finish_reason="cancelled", stop_reason=None)


class MultiplexRenderer:
    """Writes the frames of one request, each as a whole message."""

    keep_alive = b""

    def __init__(
        self,
        request: GenerateRequest,
        name: str,
        request_id: str,
        encoding: Encoding,
        logprobs: MakeLogprobs,
    ) -> None:
        """name: the request's, by its client. logprobs: makes those of a choice."""
        self.request = request
        self.name = name
        self.encoding = encoding
        self.with_usage = bool(request.options.continuous_usage_stats)
        self.direct = not self.with_usage
        self.make_logprobs = logprobs
        self._request_id = request_id
        self.ended: list[EndedChoice] = [_CANCELLED] * (len(request.prompts) * request.params.n)
        """How each choice has ended; until it has, as if nobody wanted the rest."""

    def choice(self, index: int, usage: Usage) -> MultiplexFrames:
        return MultiplexFrames(self, index, usage)

    def last(self, usage: Usage) -> bytes:
        return self.encoding.frame(
            EndFrame(
                id=self.name,
                request_id=self._request_id,
                model=self.request.model,
                choices=self.ended,
                usage=usage_body(usage),
            )
        )

    def failed(self, error: ApiError) -> bytes:
        return self.encoding.error(error, self.name)

    def body(self, answers: Sequence[Answer], usage: Usage) -> NoReturn:
        raise TypeError("answers on /v1/stream are never whole")


class MultiplexFrames:
    """The frames of one choice."""

    __slots__ = (
        "_called",
        "_encode",
        "_index",
        "_logprobs",
        "_message",
        "_renderer",
        "_usage",
        "later",
        "prefix",
        "suffix",
    )

    def __init__(self, renderer: MultiplexRenderer, index: int, usage: Usage) -> None:
        encoding = renderer.encoding
        self._renderer = renderer
        self._index = index
        self._usage = usage
        self._logprobs = renderer.make_logprobs(renderer.request.params)
        self._called = False
        self._encode = encoding.encode
        self._message = encoding.message
        self.prefix = self.later = encoding.opening(
            TextFrame(id=renderer.name, choice=index, text="")
        )
        self.suffix = encoding.closing

    def text(self, text: str) -> bytes:
        """The frame of a row that is plain text."""
        return self._message(self.prefix + self._encode(text) + self.suffix)

    def render(self, answer: Answer) -> bytes:
        events, renderer = answer.events(), self._renderer
        frames = list(map(self._frame, events))
        logprobs = self._logprobs.member(answer.details) if answer.details else None
        if not frames and (logprobs is not None or answer.ids):
            frames.append(self._frame(Text("")))  # of tokens whose text is still to come, or none
        if logprobs is not None:
            frames[-1].logprobs = logprobs
        if answer.ids:
            frames[0].token_ids = listed(answer.ids)
        if answer.prompt is not None and frames:
            frames[0].prompt_token_ids = listed([answer.prompt])
        if renderer.with_usage:
            for frame in frames:
                frame.usage = usage_body(self._usage)
        self._called = self._called or calls_tools(events)
        if answer.end is not None:
            renderer.ended[self._index] = self._ended(answer.end)
        return b"".join(map(renderer.encoding.frame, frames))

    def _frame(self, event: Event) -> DeltaFrame:
        name, choice = self._renderer.name, self._index
        match event:
            case Text(text):
                return TextFrame(id=name, choice=choice, text=text)
            case Reasoning(text):
                return ReasoningFrame(id=name, choice=choice, text=text)
            case ToolCallOpened(number, call_id, called):
                return ToolCallFrame(
                    id=name, choice=choice, index=number, call_id=call_id, name=called
                )
            case ToolArguments(number, text):
                return ArgumentsFrame(id=name, choice=choice, index=number, text=text)
        raise TypeError(f"{type(event).__name__} has no place in a chat or completion")

    def _ended(self, end: End) -> EndedChoice:
        reason = finish_reason(FINISH_REASONS[end.reason], called=self._called)
        return EndedChoice(finish_reason=reason, stop_reason=end.stop)


class MultiplexAnswer(StreamedAnswer):
    """The answer of one choice, which leaves it as whole messages."""

    __slots__ = ("_text",)

    def __init__(self, stream: EventStream, frames: MultiplexFrames) -> None:
        super().__init__(stream, frames)
        self._text = frames.text

    def add_text(self, text: str) -> None:
        stream = self._stream
        if stream.direct:
            stream.write(self._text(text))
        else:
            super().add_text(text)


class MultiplexStream(EventStream):
    """The frames of one request on a connection that carries several."""

    _renderer: MultiplexRenderer

    def answer(self, index: int) -> MultiplexAnswer:
        return MultiplexAnswer(self, self._renderer.choice(index, self._generation.usage))
