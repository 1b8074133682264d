"""One answer of a model, gathered from the chunks of its stream."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Literal

Kind = Literal["thinking", "text"]


class Answer:
    """What has come so far."""

    def __init__(self) -> None:
        self.text = ""
        self.thinking = ""
        self.calls: list[dict[str, Any]] = []
        """In the form that the next request wants them in."""
        self.finish = ""
        self.usage: dict[str, Any] = {}
        self.began = time.monotonic()
        self.first_at = 0.0
        """Monotonic time of the first token; 0 before it."""
        self.interrupted = False

    def take(self, chunk: dict[str, Any]) -> Iterator[tuple[Kind, str]]:
        """Add a chunk; gives its pieces of text."""
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            self.finish = choice.get("finish_reason") or self.finish
            thinking = delta.get("reasoning") or delta.get("reasoning_content") or ""
            text = delta.get("content") or ""
            calls = delta.get("tool_calls") or ()
            if not self.first_at and (thinking or text or calls):
                self.first_at = time.monotonic()
            for call in calls:
                self._take_call(call)
            if thinking:
                self.thinking += thinking
                yield "thinking", thinking
            if text:
                self.text += text
                yield "text", text

    def _take_call(self, delta: dict[str, Any]) -> None:
        index = delta.get("index", 0)
        while len(self.calls) <= index:
            number = len(self.calls)
            self.calls.append(
                {
                    "id": f"call_{number}",
                    "type": "function",
                    "function": {"name": "", "arguments": ""},
                }
            )
        call, function = self.calls[index], delta.get("function") or {}
        call["id"] = delta.get("id") or call["id"]
        for name in ("name", "arguments"):
            call["function"][name] += function.get(name) or ""

    @property
    def empty(self) -> bool:
        return not (self.text or self.calls)

    def message(self) -> dict[str, Any]:
        """As a message of the conversation; thinking is no part of it."""
        found: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.calls and not self.interrupted:
            found["tool_calls"] = self.calls
        return found

    def notes(self) -> list[str]:
        """What a reader may want to know of it: why it ended, how long it is, how fast it came."""
        found = []
        if self.interrupted:
            found.append("interrupted")
        elif self.finish == "length":
            found.append("cut: the limit of tokens is reached")
        elif self.finish not in ("", "stop", "tool_calls"):
            found.append(f"ended: {self.finish}")
        count = self.usage.get("completion_tokens")
        if isinstance(count, int):
            took = time.monotonic() - self.first_at if self.first_at else 0.0
            speed = f", {count / took:.0f} a second" if took > 0.2 and count > 1 else ""
            found.append(f"{count} tokens{speed}")
        return found
