"""Answers of Ollama's API: whole, or lines of JSON of which the last one says what it took."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from penstock.client.answers import Answer, FinishReason
from penstock.client.meters import Usage
from penstock.protocol.wire.messages.tokens import (
    Event,
    Reasoning,
    RowDetails,
    Text,
    ToolArguments,
    ToolCallOpened,
)
from penstock.services.frontend.bodies.ollama import (
    GivenCall,
    GivenFunction,
    OllamaError,
    OllamaHead,
)
from penstock.services.frontend.bodies.responses import ChatTokenLogprob
from penstock.services.frontend.bodies.routes import JSON_LINES
from penstock.services.frontend.dialects.logprobs import ChatLogprobs
from penstock.services.frontend.errors import ApiError
from penstock.services.frontend.json_lines import encode
from penstock.services.frontend.parse import GenerateRequest


class Part(NamedTuple):
    """What a line adds to the answer."""

    text: str = ""
    thinking: str = ""
    calls: tuple[GivenCall, ...] = ()


class Parts:
    """Makes parts of events. A call waits until all of its arguments are there, since they are an
    object here; what is none becomes text."""

    __slots__ = ("_arguments", "_call")

    def __init__(self) -> None:
        self._call: ToolCallOpened | None = None
        self._arguments = ""

    def take(self, events: list[Event], *, ended: bool) -> list[Part]:
        """ended: nothing comes behind these."""
        found: list[Part] = []
        for event in events:
            if isinstance(event, ToolArguments):
                self._arguments += event.text
                continue
            found += self._called()
            match event:
                case Text(text):
                    found.append(Part(text))
                case Reasoning(text):
                    found.append(Part(thinking=text))
                case ToolCallOpened():
                    self._call = event
                case _:
                    raise TypeError(f"{type(event).__name__} has no place in Ollama's answers")
        return [*found, *self._called()] if ended else found

    def _called(self) -> list[Part]:
        call, self._call = self._call, None
        arguments, self._arguments = self._arguments, ""
        if call is None:
            return []
        try:
            read: dict[str, Any] = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError, ValueError):
            return [Part(arguments)]
        function = GivenFunction(index=call.index, name=call.name, arguments=read)
        return [Part(calls=(GivenCall(id=call.id, function=function),))]


class OllamaRenderer(ABC):
    """The bytes of one answer, but for what it holds."""

    media_type = JSON_LINES
    keep_alive = b""
    """Nothing may stand between two lines: clients decode every line."""
    before_text: ClassVar[bytes]
    """What stands between the head and a text, and behind the text."""
    behind_text: ClassVar[bytes]
    no_answer: ClassVar[str] = "load"

    def __init__(self, request: GenerateRequest, created: int) -> None:
        self.request = request
        at = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.created_at = at
        self.opening = encode(OllamaHead(model=request.model, created_at=at))[:-1] + b","
        output = request.output
        self.direct = output is None or not output.tools
        self.reason: FinishReason = "stop"

    @abstractmethod
    def answer(self, part: Part, **fields: Any) -> msgspec.Struct:
        """A whole answer or a line, with these fields besides."""

    def choice(self, index: int, usage: Usage) -> OllamaFrames:
        return OllamaFrames(self)

    def last(self, usage: Usage) -> bytes:
        return encode(self.answer(Part(), **self._end(usage))) + b"\n"

    def failed(self, error: ApiError) -> bytes:
        return error_body(error) + b"\n"

    def body(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        if not answers:
            return encode(self.answer(Part(), done=True, done_reason="load"))
        (answer,) = answers
        self.reason, _ = answer.finish
        parts = Parts().take(answer.events(), ended=True)
        whole = Part(
            "".join(part.text for part in parts),
            "".join(part.thinking for part in parts),
            tuple(call for part in parts for call in part.calls),
        )
        logprobs = self.logprobs(answer.details)
        return encode(self.answer(whole, logprobs=logprobs, **self._end(usage)))

    def logprobs(self, details: list[RowDetails]) -> list[ChatTokenLogprob] | UnsetType:
        found = ChatLogprobs(self.request.params).member(details)
        return UNSET if found is None else found.content

    def _end(self, usage: Usage) -> dict[str, Any]:
        """What the end says: the reason, times in nanoseconds, tokens."""
        first, total = (int(1e9 * s) for s in (usage.first_token_s, usage.total_s))
        first = first or total
        return {
            "done": True,
            "done_reason": self.reason,
            "total_duration": total,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt,
            "prompt_eval_duration": first,
            "eval_count": usage.completion,
            "eval_duration": max(0, total - first),
        }


class OllamaFrames:
    """The lines of the answer, but for the last one."""

    __slots__ = ("_parts", "_renderer", "later", "prefix", "suffix")

    def __init__(self, renderer: OllamaRenderer) -> None:
        self._renderer = renderer
        self._parts = Parts()
        self.prefix = self.later = renderer.opening + renderer.before_text
        self.suffix = renderer.behind_text + b',"done":false}\n'

    def render(self, answer: Answer) -> bytes:
        renderer, end = self._renderer, answer.end
        if end is not None:
            renderer.reason, _ = answer.finish
        parts = self._parts.take(answer.events(), ended=end is not None)
        logprobs = renderer.logprobs(answer.details) if answer.details else UNSET
        if logprobs is not UNSET and not parts:
            parts = [Part()]
        lines = [renderer.answer(part, done=False) for part in parts[:-1]]
        lines += [renderer.answer(part, done=False, logprobs=logprobs) for part in parts[-1:]]
        return b"".join(encode(line) + b"\n" for line in lines)


def error_body(error: ApiError) -> bytes:
    return encode(OllamaError(error=error.message))
