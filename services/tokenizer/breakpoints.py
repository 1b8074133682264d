"""How many tokens of a prompt lie ahead of the places that a client has marked in its chat.

A template may do anything with messages. So a text that nobody can type is put at each place, and
what the template writes ahead of it, encoded, is compared with the prompt.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from penstock.protocol.wire.messages.cache_hints import Breakpoint, CacheHints, RetainedSpan
from penstock.protocol.wire.messages.requests import (
    TOKEN_BYTES,
    Chat,
    Work,
)
from penstock.services.tokenizer.control_tokens import Rendered
from penstock.services.tokenizer.prompt_encoding import shown_tools
from penstock.services.tokenizer.prompt_error import PromptError
from penstock.services.tokenizer.text_model import TextModel

_MARK_BYTES = 16


def retained_spans(
    work: Work, hints: CacheHints, text_model: TextModel, prompt: bytes
) -> list[RetainedSpan]:
    """What is to be retained of a prompt, given as int32 ids, the longest first.

    A place that the template does not print marks nothing, and neither does one within a prompt
    that came as ids, as that of a continued request does.
    """
    whole = len(prompt) // TOKEN_BYTES
    inner = [one for one in hints.breakpoints if one.message is not None]
    found = [RetainedSpan(whole, one.seconds) for one in hints.breakpoints if one.message is None]
    if inner and isinstance(work.prompt, Chat):
        prefixes = _rendered_before(inner, work.prompt, text_model, shown_tools(work))
        for one, prefix in zip(inner, prefixes, strict=False):
            if tokens := _shared(text_model.encode_rendered(prefix), prompt):
                found.append(RetainedSpan(tokens, one.seconds))
    return found


def _rendered_before(
    places: Sequence[Breakpoint], chat: Chat, text_model: TextModel, tools: bytes
) -> list[Rendered]:
    """What the template writes ahead of each place; none where it refuses the marked messages."""
    messages: list[dict[str, Any]] = msgspec.json.decode(chat.messages)
    marks = [secrets.token_hex(_MARK_BYTES) for _ in places]
    for place, mark in sorted(zip(places, marks, strict=True), key=_position, reverse=True):
        if place.message is None or place.message >= len(messages):
            return []
        content = messages[place.message].get("content") or ""
        begin, end = content[: place.characters], content[place.characters :]
        messages[place.message]["content"] = f"{begin}{mark}{end}"
    try:
        marked = text_model.rendered(msgspec.json.encode(messages), chat.template_kwargs, tools)
    except PromptError:
        return []
    any_mark = re.compile("|".join(marks))
    return [_before(max(0, marked.text.find(mark)), marked, any_mark) for mark in marks]


def _before(end: int, marked: Rendered, any_mark: re.Pattern[str]) -> Rendered:
    """What a template wrote ahead of a place, without marks."""
    text, own = any_mark.sub("", marked.text[:end]), marked.own
    if own is None:
        return Rendered(text, None)
    cuts = [mark.end() for mark in any_mark.finditer(marked.text, 0, end)]
    length = 2 * _MARK_BYTES
    moved = ((span, length * bisect_right(cuts, span[0])) for span in own if span[1] <= end)
    return Rendered(text, [(first - by, last - by) for (first, last), by in moved])


def _position(marked: tuple[Breakpoint, str]) -> tuple[int, int]:
    place, _ = marked
    return place.message or 0, place.characters


def _shared(first: bytes, second: bytes) -> int:
    """Tokens that two rows of int32 ids begin with alike."""
    length = min(len(first), len(second)) // TOKEN_BYTES
    apart = np.frombuffer(first, "<i4", length) != np.frombuffer(second, "<i4", length)
    return int(apart.argmax()) if apart.any() else length
