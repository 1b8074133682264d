"""One streamed answer: server-sent events in, the time of every piece of text out."""

from __future__ import annotations

import time
from array import array
from typing import Any

import msgspec

MAX_EVENT_BYTES = 16 * 1024 * 1024
MAX_ERROR_BYTES = 64 * 1024
SHOWN = 300
"""Characters of a server's message that are kept."""


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Of the prompt, found in the prefix cache; ``None``: the server does not tell."""
        details = self.prompt_tokens_details
        return None if details is None else details.cached_tokens


class _Event(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class Failure(msgspec.Struct, frozen=True):
    """Why a request counts as failed."""

    kind: str
    """Few different ones, for counting: ``http 429``, ``timeout``, ``truncated`` …"""
    message: str


class AnswerStream:
    """Receives one response (see ``http_response.Receiver``) and keeps what is measured.

    Times are ``time.perf_counter`` seconds, taken when the bytes are handed over.
    """

    __slots__ = (
        "_buffer", "_error_body", "_keep_text", "_streams", "done", "failure", "finish_reason",
        "last", "stamps", "status", "text", "token_ids", "usage",
    )  # fmt: skip

    def __init__(self, *, keep_text: bool = False) -> None:
        self.status = 0
        self.stamps = array("d")
        """When each chunk with content came. A chunk with only a role has none."""
        self.last = 0.0
        """When the last chunk with a choice came: the end of the answer. 0: none came."""
        self.usage: Usage | None = None
        self.finish_reason: str | None = None
        self.done = False
        """``[DONE]`` came."""
        self.failure: Failure | None = None
        self.text: list[str] = []
        self.token_ids: list[int] = []
        """Kept with the text, where the server was asked for them (``return_token_ids``)."""
        self._keep_text = keep_text
        self._streams = False
        self._buffer = b""
        self._error_body = b""

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        kind = headers.get("content-type", "")
        self._streams = status == 200 and kind.startswith("text/event-stream")
        if status == 200 and not self._streams:
            self.failure = Failure("no stream", f"expected text/event-stream, got {kind!r}")

    def body(self, data: bytes) -> None:
        if not self._streams:
            if len(self._error_body) < MAX_ERROR_BYTES:
                self._error_body += data
            return
        now = time.perf_counter()
        if self._buffer:
            data = self._buffer + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._buffer = data.split(b"\n\n")
        for event in events:
            if event.startswith(b"data: {") and b"\n" not in event:
                self._event(event[6:], now)
            else:
                self._unusual_event(event, now)
        if len(self._buffer) > MAX_EVENT_BYTES:
            self._fail("malformed", f"an event of more than {MAX_EVENT_BYTES} bytes")
            self._buffer = b""

    def close(self) -> Failure | None:
        """The response is whole. Returns why it counts as failed, or ``None``."""
        if self.failure is None and self.status != 200:
            self._fail(f"http {self.status}", _message(self._error_body))
        if self.failure is None and not self.done and self.finish_reason is None:
            self._fail("truncated", "the stream ended without finish_reason and without [DONE]")
        if self.failure is None and not self.last:
            self._fail("no tokens", "the stream had no chunk with a choice")
        return self.failure

    def _fail(self, kind: str, message: str) -> None:
        if self.failure is None:
            self.failure = Failure(kind, message[:SHOWN])

    def _unusual_event(self, event: bytes, now: float) -> None:
        """Comments, several ``data`` lines, other fields, ``[DONE]``."""
        data = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line[:5] == b"data:"]
        payload = b"\n".join(data)
        if payload.strip() == b"[DONE]":
            self.done = True
        elif payload.strip():
            self._event(payload, now)

    def _event(self, payload: bytes, now: float) -> None:
        try:
            event = _decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._fail("malformed", f"{error}: {payload[:100]!r}")
            return
        if event.error:
            self._fail("error event", _message(payload))
        if event.usage is not None:
            self.usage = event.usage
        if not event.choices:
            return
        self.last = now
        content = False
        for choice in event.choices:
            text = choice.text
            delta = choice.delta
            if delta is not None:
                text = delta.content or delta.reasoning_content or delta.reasoning
                content |= bool(delta.tool_calls)
            if text:
                content = True
                if self._keep_text:
                    self.text.append(text)
            if choice.token_ids and self._keep_text:
                self.token_ids += choice.token_ids
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason
        if content:
            self.stamps.append(now)


def _message(body: bytes) -> str:
    """The message in an OpenAI error body, else the body itself."""
    try:
        error = msgspec.json.decode(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError):
        return body[: 4 * SHOWN].decode("utf-8", "replace").strip()
