"""The JSON of answers: SSE frames from pre-rendered bytes, and whole bodies.

A stream's frame is ``prefix + JSON string + suffix``. Prefix and suffix of a choice are rendered
once, so that a token costs a concatenation and the encoding of its text.
"""

from __future__ import annotations

from typing import Any

from penstock.client.answers import FINISH_REASONS, Answer
from penstock.client.meters import Usage
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.wire.messages.tokens import End, EndReason
from penstock.services.frontend.json_lines import encode
from penstock.services.frontend.logprobs import LogprobsRenderer, prompt_logprobs
from penstock.services.frontend.parameters import StreamOptions

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
_NO_END = End(0, EndReason.STOP)


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


class ChoiceFrames:
    """The frames of one choice. ``prefix``, the JSON string of a plain text and ``suffix`` are one;
    then ``later`` is the prefix of the next."""

    __slots__ = ("_logprobs", "_renderer", "_usage", "later", "prefix", "suffix")

    def __init__(self, renderer: Renderer, index: int, usage: Usage) -> None:
        self._renderer = renderer
        self._usage = usage
        self._logprobs = renderer.logprobs()
        self.prefix = renderer.prefix(index, first=True)
        self.later = renderer.prefix(index, first=False)
        self.suffix = renderer.suffix(usage)

    def render(self, answer: Answer) -> bytes:
        """The frame of what an answer has gathered; empty if there is nothing to say."""
        text, end, renderer = answer.text, answer.end, self._renderer
        member = self._logprobs.member(answer.details) if answer.details else None
        if not text and end is None and member is None:
            return b""
        prefix, self.prefix = self.prefix, self.later
        logprobs = encode(member)
        if end is not None:
            return renderer.last(prefix, text, end, self._usage, logprobs)
        return prefix + encode(text) + renderer.suffix(self._usage, logprobs)


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
        options: StreamOptions = StreamOptions(),  # noqa: B008 - it is frozen
    ) -> None:
        """lists_prompt: ``prompt_logprobs`` are part of the answer."""
        self._options = options
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

    def choice(self, index: int, usage: Usage) -> ChoiceFrames:
        """The frames of one choice; usage: of the request, as it is counted."""
        return ChoiceFrames(self, index, usage)

    def _usage_member(self, usage: Usage) -> bytes:
        """What a frame before the last one says of it."""
        if self._options.continuous_usage:
            return b',"usage":' + encode(usage_json(usage))
        return b',"usage":null' if self._options.include_usage else b""

    def suffix(self, usage: Usage, logprobs: bytes = b"null") -> bytes:
        """What comes after the JSON string."""
        close, member = b"}" if self.chat else b"", self._usage_member(usage)
        return b'%s,"logprobs":%s,"finish_reason":null}]%s}\n\n' % (close, logprobs, member)

    def last(self, prefix: bytes, text: str, end: End, usage: Usage, logprobs: bytes) -> bytes:
        """The frame that ends a choice, with its last text, if any."""
        close = b"}" if self.chat else b""
        return b'%s%s%s,"logprobs":%s,"finish_reason":%s,"stop_reason":%s}]%s}\n\n' % (
            prefix,
            encode(text),
            close,
            logprobs,
            encode(FINISH_REASONS[end.reason]),
            encode(end.stop),
            self._usage_member(usage),
        )

    def usage_frame(self, usage: Usage) -> bytes:
        return b'%s],"usage":%s}\n\n' % (self._head, encode(usage_json(usage)))

    def body(self, answers: list[Answer], usage: Usage) -> bytes:
        """The whole answer of an unstreamed request; in the order of their index."""
        rendered = []
        prompts = [prompt_logprobs(answer.details) for answer in answers]
        for index, answer in enumerate(answers):
            end, text = answer.end or _NO_END, answer.text
            message: dict[str, Any] = {"text": text}
            if self.chat:
                message = {"message": {"role": "assistant", "content": text, "refusal": None}}
            elif prompts[index] is not None and self.lists_prompt:
                message["prompt_logprobs"] = prompts[index]
            rendered.append(
                {
                    "index": index,
                    **message,
                    "logprobs": self.logprobs().member(answer.details),
                    "finish_reason": FINISH_REASONS[end.reason],
                    "stop_reason": end.stop,
                }
            )
        body = {**self._answer, "choices": rendered, "usage": usage_json(usage)}
        if self.chat and prompts[0] is not None:
            body["prompt_logprobs"] = prompts[0]
        return encode(body)

    def logprobs(self) -> LogprobsRenderer:
        """A new one, for one choice."""
        return LogprobsRenderer(self._params, chat=self.chat)


def error_frame(body: bytes) -> bytes:
    return b"data: %s\n\n" % body
