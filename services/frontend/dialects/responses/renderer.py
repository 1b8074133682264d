"""A response: the events of its stream, and the object that they add up to."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from penstock.client.answers import Answer
from penstock.client.meters import Usage
from penstock.protocol.wire.messages.tokens import (
    EndReason,
    Event,
    Reasoning,
    Text,
    ToolArguments,
    ToolCallOpened,
)
from penstock.services.frontend.bodies.openai_response import (
    IncompleteDetails,
    InputTokensDetails,
    ResponseFault,
    ResponseObject,
    ResponseUsage,
    replaced,
)
from penstock.services.frontend.bodies.openai_responses import ResponsesBody
from penstock.services.frontend.bodies.responses import ReasoningTokens
from penstock.services.frontend.dialects.interface import KEEP_ALIVE
from penstock.services.frontend.dialects.responses.events import EventWriter
from penstock.services.frontend.dialects.responses.items import response_id
from penstock.services.frontend.dialects.responses.output import Output
from penstock.services.frontend.dialects.responses.text_logprobs import TextLogprobs
from penstock.services.frontend.dialects.responses.turn import SEALED, Turn
from penstock.services.frontend.errors import ApiError
from penstock.services.frontend.json_lines import encode

Stop = Literal["cancelled", "steered", "warmed"]
"""Who has asked that a response ends before its answer does."""
_RATE_LIMIT = "rate_limit_exceeded"
_FAILURES = {429: _RATE_LIMIT, 400: "invalid_prompt"}


class ResponsesRenderer:
    """One response. It has one choice, whose frames it is itself."""

    direct = False
    """Events are numbered, and the last ones repeat the text: each row is rendered."""
    prefix = later = suffix = b""
    keep_alive = KEEP_ALIVE

    def __init__(
        self,
        turn: Turn,
        answer_id: str,
        *,
        stores: bool,
        writer: EventWriter | None = None,
    ) -> None:
        """stores: the response will be kept."""
        body = turn.body
        self.request = turn.request
        self.id = response_id(answer_id)
        self.writer = writer or EventWriter()
        options = body.reasoning
        self.output = Output(
            self.writer,
            answer_id,
            turn.tools,
            summarized=bool(options and (options.summary or options.generate_summary)),
            sealed=SEALED in (body.include or ()),
        )
        self.response = _begun(turn, self.id, stores=stores)
        """As it is now; its output only when it has ended."""
        self.why_stopped: Stop | None = None
        self._logprobs = None if turn.request.params.logprobs is None else TextLogprobs()

    @property
    def has_ended(self) -> bool:
        return self.response.status != "in_progress"

    # --- the stream

    def first(self, usage: Usage) -> bytes:
        """What begins the stream."""
        event = self.writer.event
        created = event("response.created", response=self.response)
        return created + event("response.in_progress", response=self.response)

    def choice(self, index: int, usage: Usage) -> ResponsesRenderer:
        return self

    def render(self, answer: Answer) -> bytes:
        content = answer.content
        if self._logprobs is None and len(content) == 1 and type(content[0]) is str:
            told = [self.output.text(content[0], [])]
        else:
            told = list(self._told(answer))
        if answer.end is not None:
            told.append(self._ended(answer.end.reason))
        return b"".join(told)

    def _told(self, answer: Answer) -> Iterator[bytes]:
        held = self._logprobs
        if held is None:
            for event in answer.events():
                yield self._event(event)
            return
        end = answer.end
        by_token = (
            end is not None and end.reason is EndReason.STOP and not isinstance(end.stop, str)
        )
        for details, events in answer.rows():
            if details is not None and details.tokens is not None:
                held.hold(details.tokens, ends=by_token and details is answer.details[-1])
            for place, event in enumerate(events, 1):
                if isinstance(event, Text):
                    begins, is_followed = not self.output.is_saying, place < len(events)
                    logprobs = held.of_text(event.text, begins=begins, is_followed=is_followed)
                    yield self.output.text(event.text, logprobs)
                else:
                    yield self._event(event)
            if events:
                held.drop()

    def _event(self, event: Event) -> bytes:
        match event:
            case Text(text):
                return self.output.text(text, [])
            case Reasoning(text):
                return self.output.reasoning(text)
            case ToolCallOpened(number, call_id, name):
                return self.output.call(number, call_id, name)
            case ToolArguments(number, text):
                return self.output.arguments(number, text)
        raise TypeError(f"{type(event).__name__} has no place in a response")

    def _ended(self, reason: EndReason) -> bytes:
        is_cut = reason is EndReason.LENGTH
        rest = [] if self._logprobs is None else self._logprobs.rest()
        told = self.output.text("", rest) if rest and self.output.is_saying else b""
        told += self.output.close("incomplete" if is_cut else "completed")
        if not self.output.items:
            told = self.output.text("", rest) + self.output.close("completed")
        if is_cut:
            self._conclude("incomplete", incomplete_details="max_output_tokens")
        else:
            self._conclude("completed", completed_at=int(time.time()))
        return told

    def stop(self, why: Stop) -> None:
        """Nothing more comes, because somebody has asked for that. Call it before the generation
        is abandoned; ``last`` tells it."""
        if self.why_stopped is None:
            self.why_stopped = why

    def cancelled(self) -> ResponseObject:
        """What a response will be that is cancelled now."""
        return replaced(self.response, status="cancelled", output=self.output.items)

    def _stopped(self) -> bytes:
        told = self.output.close("incomplete")
        if self.why_stopped == "warmed":  # the prompt is computed, and no more was wanted
            self._conclude("completed", completed_at=int(time.time()))
        elif self.why_stopped == "steered":
            self._conclude("incomplete", incomplete_details="steered")
        else:
            self._conclude("cancelled")
        return told

    def _conclude(self, status: str, *, incomplete_details: Any = None, **changes: Any) -> None:
        if incomplete_details is not None:
            changes["incomplete_details"] = IncompleteDetails(reason=incomplete_details)
        self.response = replaced(self.response, status=status, output=self.output.items, **changes)

    def last(self, usage: Usage) -> bytes:
        """What ends the stream. From here on the response is what it will be."""
        told = b"" if self.has_ended else self._stopped()
        self.response = replaced(self.response, usage=usage_of(usage))
        kind = "completed" if self.response.status == "completed" else "incomplete"
        return told + self.writer.event(f"response.{kind}", response=self.response)

    def failed(self, error: ApiError) -> bytes:
        told = self.output.close("incomplete")
        fault = ResponseFault(
            code=_FAILURES.get(error.status, "server_error"), message=error.message
        )
        self._conclude("failed", error=fault)
        told += self.writer.error(error)
        return told + self.writer.event("response.failed", response=self.response)

    # --- the whole

    def body(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        self.render(answers[0])
        self.last(usage)
        return encode(self.response)


def usage_of(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.cached),
        output_tokens=usage.completion,
        output_tokens_details=ReasoningTokens(reasoning_tokens=usage.reasoning),
        total_tokens=usage.prompt + usage.completion,
    )


def _begun(turn: Turn, response: str, *, stores: bool) -> ResponseObject:
    body: ResponsesBody = turn.body
    choice, reasoning, format = body.tool_choice, body.reasoning, body.text and body.text.format
    return ResponseObject(
        id=response,
        created_at=int(time.time()),
        status="in_progress",
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        model=turn.request.model,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning={
            "effort": reasoning.effort if reasoning else None,
            "summary": (reasoning.summary or reasoning.generate_summary) if reasoning else None,
        },
        safety_identifier=body.safety_identifier,
        store=stores,
        temperature=body.temperature,
        text={"format": msgspec.to_builtins(format) if format else {"type": "text"}},
        tool_choice=(
            choice if isinstance(choice, str) else msgspec.to_builtins(choice) if choice else "auto"
        ),
        tools=list(map(_listed, body.tools or ())),
        top_logprobs=body.top_logprobs or 0,
        top_p=body.top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
        metadata=body.metadata or {},
    )


_DEMANDED: dict[str, dict[str, Any]] = {
    "function": {"parameters": None, "strict": None},
    "namespace": {"description": ""},
}


def _listed(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as it is given back, with the fields that clients demand of it."""
    return {**_DEMANDED.get(tool["type"], {}), **tool}
