"""The JSON of answers: SSE frames from pre-rendered bytes, and whole bodies.

A stream's frame is ``prefix + JSON string + suffix``. Prefix and suffix of a choice are rendered
once, so that a token costs a concatenation and the encoding of its text.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from penstock.protocol.sampling import SamplingParams
from penstock.protocol.wire.messages.tokens import End, EndReason, RowDetails
from penstock.services.frontend.json_lines import encode
from penstock.services.frontend.logprobs import LogprobsRenderer, prompt_logprobs

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
FINISH_REASONS = {EndReason.STOP: "stop", EndReason.LENGTH: "length"}
"""The ends that are no errors."""


class Usage:
    """Tokens of a whole HTTP request, counted as its rows arrive."""

    __slots__ = ("cached", "completion", "prompt")

    def __init__(self) -> None:
        self.prompt = 0
        self.completion = 0
        self.cached = 0

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Answer(NamedTuple):
    """A choice that has ended."""

    text: str
    end: End
    details: list[RowDetails]
    """Of its rows, in order."""


class Renderer:
    """The bytes of one answer of one endpoint. ``chat`` and ``completion`` differ in names."""

    def __init__(
        self,
        *,
        chat: bool,
        answer_id: str,
        created: int,
        model: str,
        params: SamplingParams = SamplingParams(),  # noqa: B008 - it is frozen
        lists_prompt: bool = False,
    ) -> None:
        """lists_prompt: ``prompt_logprobs`` are part of the answer."""
        self.chat = chat
        self.lists_prompt = lists_prompt
        self._params = params
        self._object = "chat.completion" if chat else "text_completion"
        self._answer: dict[str, Any] = {
            "id": answer_id,
            "object": self._object,
            "created": created,
            "model": model,
        }
        chunk = {**self._answer, "object": "chat.completion.chunk" if chat else self._object}
        self._head = b"data: " + encode(chunk)[:-1] + b',"choices":['

    def prefix(self, index: int, *, first: bool) -> bytes:
        """What comes before the JSON string. The first frame of a chat's choice has the role."""
        role = b'"role":"assistant",' if first else b""
        key = b'"delta":{' + role + b'"content":' if self.chat else b'"text":'
        return b'%s{"index":%d,%s' % (self._head, index, key)

    def suffix(self, usage: bytes = b"", logprobs: bytes = b"null") -> bytes:
        """What comes after the JSON string; ``usage`` is a rendered member, or nothing."""
        close = b"}" if self.chat else b""
        return b'%s,"logprobs":%s,"finish_reason":null}]%s}\n\n' % (close, logprobs, usage)

    def last(
        self, prefix: bytes, text: str, end: End, usage: bytes = b"", logprobs: bytes = b"null"
    ) -> bytes:
        """The frame that ends a choice, with its last text, if any."""
        close = b"}" if self.chat else b""
        return b'%s%s%s,"logprobs":%s,"finish_reason":%s,"stop_reason":%s}]%s}\n\n' % (
            prefix,
            encode(text),
            close,
            logprobs,
            encode(FINISH_REASONS[end.reason]),
            encode(end.stop),
            usage,
        )

    def usage_frame(self, usage: Usage) -> bytes:
        return b'%s],"usage":%s}\n\n' % (self._head, encode(usage.as_json()))

    def body(self, choices: list[Answer], usage: Usage) -> bytes:
        """The whole answer of an unstreamed request; choices in the order of their index."""
        rendered = []
        prompts = [prompt_logprobs(choice.details) for choice in choices]
        for index, (text, end, details) in enumerate(choices):
            message: dict[str, Any] = {"text": self.echo(details) + text}
            if self.chat:
                message = {"message": {"role": "assistant", "content": text, "refusal": None}}
            elif prompts[index] is not None and self.lists_prompt:
                message["prompt_logprobs"] = prompts[index]
            rendered.append(
                {
                    "index": index,
                    **message,
                    "logprobs": self.logprobs().member(details),
                    "finish_reason": FINISH_REASONS[end.reason],
                    "stop_reason": end.stop,
                }
            )
        answer = {**self._answer, "choices": rendered, "usage": usage.as_json()}
        if self.chat and prompts[0] is not None:
            answer["prompt_logprobs"] = prompts[0]
        return encode(answer)

    def logprobs(self) -> LogprobsRenderer:
        """A new one, for one choice."""
        return LogprobsRenderer(self._params, chat=self.chat)

    @staticmethod
    def echo(details: list[RowDetails]) -> str:
        return "".join(row.echo for row in details)


def usage_member(usage: Usage) -> bytes:
    """``,"usage":{…}`` for a frame of a stream with continuous usage."""
    return b',"usage":' + encode(usage.as_json())


NO_USAGE = b',"usage":null'
"""In every frame before the last one of a stream that asked for usage."""


def error_frame(body: bytes) -> bytes:
    return b"data: %s\n\n" % body
