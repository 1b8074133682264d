"""Answers in Anthropic's shape: whole messages, and the events of a stream.

A stream is ``message_start``, then block after block (``content_block_start``, its deltas,
``content_block_stop``), then ``message_delta`` with the reason and the usage, and ``message_stop``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from penstock.client.answers import Answer
from penstock.client.meters import Usage
from penstock.protocol.wire.messages.tokens import (
    End,
    EndReason,
    Event,
    Reasoning,
    Text,
    ToolArguments,
    ToolCallOpened,
)
from penstock.services.frontend.bodies.anthropic_answers import (
    AnswerBlock,
    AnsweredMessage,
    BlockDelta,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    Ending,
    InputJsonDelta,
    MessageEnd,
    MessageEvent,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    SignatureDelta,
    StopReason,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ThinkingTokens,
    ToolUseBlock,
)
from penstock.services.frontend.dialects.anthropic.errors import error_body
from penstock.services.frontend.dialects.anthropic.signature import Signature, sign
from penstock.services.frontend.dialects.interface import KEEP_ALIVE
from penstock.services.frontend.errors import ApiError
from penstock.services.frontend.json_lines import encode
from penstock.services.frontend.parse import GenerateRequest

BROKEN_INPUT = "INVALID_JSON"
"""The one key of a call's input that is no JSON object: its value is what the model wrote."""


class MessagesRequest(GenerateRequest, frozen=True):
    """What a client of this API asked for."""

    shows_thinking: bool = True
    """Thinking blocks have their text; else they are empty."""


class MessagesRenderer:
    """The bytes of one answer."""

    direct = True

    def __init__(self, request: MessagesRequest, answer_id: str) -> None:
        self.request = request
        self._id = f"msg_{answer_id}"
        self._frames: MessageFrames | None = None

    # --- whole answers

    def body(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        (answer,) = answers
        if answer.end is None:
            raise ValueError("the answer has not ended")
        content = _blocks(answer.events(), shows_thinking=self.request.shows_thinking)
        called = any(isinstance(block, ToolUseBlock) for block in content)
        reason, sequence = self._why(answer.end, usage, called=called)
        return encode(self._message(content, usage, reason, sequence))

    def _message(
        self,
        content: list[AnswerBlock],
        usage: Usage,
        reason: StopReason | None = None,
        sequence: str | None = None,
    ) -> AnsweredMessage:
        return AnsweredMessage(
            id=self._id,
            model=self.request.model,
            content=content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=message_usage(usage),
        )

    def _why(self, end: End, usage: Usage, *, called: bool) -> tuple[StopReason, str | None]:
        """Why an answer ended, and the stop sequence that was found."""
        if isinstance(end.stop, str):
            return "stop_sequence", end.stop
        if end.reason == EndReason.STOP:
            return "tool_use" if called else "end_turn", None
        most = self.request.params.max_tokens
        fits = most is None or usage.completion >= most
        return "max_tokens" if fits else "model_context_window_exceeded", None

    # --- streams

    def choice(self, index: int, usage: Usage) -> MessageFrames:
        self._frames = MessageFrames(self, usage)
        return self._frames

    def opening(self, usage: Usage) -> bytes:
        """The first event. How much is thought is known at the end: a client that adds events up
        would keep what stands here."""
        message = self._message([], usage)
        message.usage.output_tokens_details = UNSET
        return event(MessageStart(message=message))

    @property
    def keep_alive(self) -> bytes:
        """A ping is an event, and the first one must be another."""
        started = self._frames is not None and self._frames.started
        return event(Ping()) if started else KEEP_ALIVE

    def last(self, usage: Usage) -> bytes:
        frames = self._frames
        if frames is None or frames.end is None:
            raise ValueError("the answer has not ended")
        reason, sequence = self._why(frames.end, usage, called=frames.called)
        ending = Ending(stop_reason=reason, stop_sequence=sequence)
        delta = MessageEnd(delta=ending, usage=message_usage(usage))
        return event(delta) + event(MessageStop())

    def failed(self, error: ApiError) -> bytes:
        return b"event: error\ndata: %s\n\n" % error_body(error)


def event(one: MessageEvent) -> bytes:
    """A frame of a stream."""
    kind = str(one.__struct_config__.tag).encode()
    return b"event: %s\ndata: %s\n\n" % (kind, encode(one))


def message_usage(usage: Usage) -> MessageUsage:
    thought = usage.reasoning
    return MessageUsage(
        input_tokens=max(0, usage.prompt - usage.cached),
        cache_read_input_tokens=usage.cached,
        output_tokens=usage.completion,
        output_tokens_details=ThinkingTokens(thinking_tokens=thought) if thought else UNSET,
    )


# --- blocks of a whole message


def _blocks(events: Sequence[Event], *, shows_thinking: bool) -> list[AnswerBlock]:
    found: list[AnswerBlock] = []
    arguments: dict[int, str] = {}
    calls: dict[int, ToolUseBlock] = {}
    for one in events:
        match one:
            case Text(text):
                if text:
                    found.append(TextBlock(text=text))
            case Reasoning(text):
                if text:
                    signature = sign(text, keeps=not shows_thinking)
                    shown = text if shows_thinking else ""
                    found.append(ThinkingBlock(thinking=shown, signature=signature))
            case ToolCallOpened(index, number, name):
                calls[index] = ToolUseBlock(id=number, name=name, input={})
                found.append(calls[index])
            case ToolArguments(index, text):
                arguments[index] = arguments.get(index, "") + text
            case _:
                raise unexpected(one)
    for index, call in calls.items():
        call.input = _input(arguments.get(index, ""))
    return found


def _input(arguments: str) -> dict[str, Any]:
    """The arguments of a call as an object, whatever the model has written."""
    if not arguments.strip():
        return {}
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return {BROKEN_INPUT: arguments}


def unexpected(one: Event) -> TypeError:
    return TypeError(f"{type(one).__name__} has no place in a message")


# --- blocks of a stream


class MessageFrames:
    """The events of the one choice.

    Plain text that follows text is written by ``prefix`` alone, without a call: ``prefix`` is
    ``later`` from then on, which tells that the block of text is open.
    """

    __slots__ = (
        "_index",
        "_is_started",
        "_open",
        "_prefix",
        "_renderer",
        "_signature",
        "_usage",
        "called",
        "end",
        "later",
        "suffix",
    )

    def __init__(self, renderer: MessagesRenderer, usage: Usage) -> None:
        self._renderer = renderer
        self._usage = usage
        self._index = -1
        """Of the newest block."""
        self._open: str | int | None = None
        """The kind of the block that is open; of a call its number."""
        self._signature = Signature()
        self._is_started = False
        self._prefix: bytes | None = None
        self.later = _text_prefix(0)
        self.suffix = b"}}\n\n"
        self.called = False
        self.end: End | None = None

    @property
    def started(self) -> bool:
        """Something has gone out."""
        return self._is_started or self._prefix is self.later

    @property
    def prefix(self) -> bytes:
        if self._prefix is not None:
            return self._prefix
        block = ContentBlockStart(index=self._index + 1, content_block=TextBlock(text=""))
        return self._opening() + self._closing() + event(block) + self.later

    @prefix.setter
    def prefix(self, later: bytes) -> None:
        self._prefix = later

    def render(self, answer: Answer) -> bytes:
        if self._prefix is self.later and self._open != "text":  # a row was written by it
            self._start(TextBlock(text=""), "text")
        frames = [self._opening()]
        self._is_started = True
        for one in answer.events():
            frames += self._frames(one)
        self.end = answer.end
        if self.end is not None:
            frames.append(self._closing())
            self._open = None
        self._prefix = self.later if self._open == "text" else None
        return b"".join(frames)

    def _opening(self) -> bytes:
        return b"" if self.started else self._renderer.opening(self._usage)

    def _closing(self) -> bytes:
        """The end of the block that is open."""
        if self._open is None:
            return b""
        stop = event(ContentBlockStop(index=self._index))
        if self._open == "thinking":
            return self._delta(SignatureDelta(signature=self._signature.value)) + stop
        return stop

    def _start(self, block: AnswerBlock, kind: str | int) -> bytes:
        """End the block that is open and begin one."""
        closing = self._closing()
        self._index += 1
        self._open = kind
        self._is_started = True
        self.later = _text_prefix(self._index if kind == "text" else self._index + 1)
        return closing + event(ContentBlockStart(index=self._index, content_block=block))

    def _delta(self, delta: BlockDelta) -> bytes:
        return event(ContentBlockDelta(index=self._index, delta=delta))

    def _frames(self, one: Event) -> list[bytes]:
        match one:
            case Text("") | Reasoning("") | ToolArguments(text=""):
                return []
            case Text(text):
                start = [] if self._open == "text" else [self._start(TextBlock(text=""), "text")]
                return [*start, self._delta(TextDelta(text=text))]
            case Reasoning(text):
                return self._thinking(text)
            case ToolCallOpened(index, number, name):
                self.called = True
                return [self._start(ToolUseBlock(id=number, name=name, input={}), index)]
            case ToolArguments(index, text) if index == self._open:
                return [self._delta(InputJsonDelta(partial_json=text))]
        raise unexpected(one)

    def _thinking(self, text: str) -> list[bytes]:
        frames, shows = [], self._renderer.request.shows_thinking
        if self._open != "thinking":
            frames.append(self._start(ThinkingBlock(thinking="", signature=""), "thinking"))
            self._signature = Signature(keeps=not shows)
        self._signature.add(text)
        if shows:
            frames.append(self._delta(ThinkingDelta(thinking=text)))
        return frames


def _text_prefix(index: int) -> bytes:
    """What stands before a text within the block of this index."""
    whole = event(ContentBlockDelta(index=index, delta=TextDelta(text="")))
    return whole[: -len(b'""}}\n\n')]
