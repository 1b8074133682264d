"""What a skill makes: one question with its answer. Conversations are made of these.

Only the standard library is needed here, so that the generator runs wherever Python does.
"""

from __future__ import annotations

import dataclasses
import random
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

Check = Literal["text", "json", "tool", "story"]
Tool = Mapping[str, Any]
"""One offered tool, as clients of OpenAI's API write it."""

Choice = TypeVar("Choice")


class Random(random.Random):
    """The seeded source of all that a skill draws.

    ``free``: questions are worded as visitors type them: without capitals and signs, with
    contractions, with words around them. Otherwise only as the skill's first list has them.
    """

    free = False

    def wording(self, known: Sequence[Choice], more: Sequence[Choice]) -> Choice:
        """One of the ways to ask; of ``more`` too where the wording is free."""
        return self.choice([*known, *more] if self.free else known)


SPLIT = "\x1f"
"""Between two characters of an answer that are learned as two tokens, whatever the merges."""
HELD_OUT_SHARE = 20
"""One key in this many is held out."""


@dataclasses.dataclass(slots=True)
class Exchange:
    """A question and what the model should say. ``key`` is what it is about."""

    question: str
    answer: str
    key: str
    thinking: str = ""
    """The text between the think tags; empty: the model answers at once."""
    role: Literal["user", "tool"] = "user"
    check: Check = "text"
    tools: Sequence[Tool] = ()
    before: Sequence[Exchange] = ()
    """What was said before in the same conversation."""
    system: str | None = None
    """A system prompt that belongs to the question; ``None``: any or none."""


Skill = Callable[[Random], Exchange]


def is_held_out(key: str) -> bool:
    """Whether questions of this key are asked in evaluations only, and never trained on."""
    return zlib.crc32(key.encode()) % HELD_OUT_SHARE == 0


def draw(skill: Skill, source: Random, *, held_out: bool) -> Exchange:
    """An exchange of the wanted side of the split; what was said before it is never held out."""
    while True:
        exchange = skill(source)
        if is_held_out(exchange.key) == held_out and not any(
            is_held_out(earlier.key) for earlier in exchange.before
        ):
            return exchange


def letters(text: str) -> str:
    """The text as an answer that is learned character by character."""
    return SPLIT.join(text)


def plain(text: str) -> str:
    """The text as it is read."""
    return text.replace(SPLIT, "")


_BEFORE = (
    "Please ", "please ", "Can you tell me: ", "Hi, ", "hi! ", "hey, ", "Hello! ", "ok, ", "and ",
    "can you help me? ", "Tell me: ", "quick question: ", "so ", "Now: ", "Another one: ",
    "I have a question: ", "could you please answer: ", "I want to know: ", "I need help. ",
)  # fmt: skip
_BEHIND = (
    " please", ", please", " thanks", " Thanks!", "?", "??", "!", " ?", ".", "...", " :)",
)  # fmt: skip
_CONTRACTIONS = tuple(
    (re.compile(rf"\b{long}\b"), short)
    for long, short in (
        ("What is", "What's"), ("what is", "what's"), ("How is", "How's"), ("Who is", "Who's"),
        ("I am", "I'm"), ("It is", "It's"), ("Where is", "Where's"), ("do not", "don't"),
    )
)  # fmt: skip

_APOSTROPHE = re.compile(r"(?<=[A-Za-z])'s\b")


def _freely(source: Random, text: str, *, lower: bool) -> str:
    if source.random() < 0.35:
        for long, short in _CONTRACTIONS:
            text = long.sub(short, text)
    if source.random() < 0.4:
        text = _APOSTROPHE.sub("s" if source.random() < 0.5 else "’s", text)
    if source.random() < 0.5:
        text = text.rstrip("?.!")
    dice = source.random()
    if lower and dice < 0.5:
        text = text.lower()
    elif lower and dice < 0.7:
        text = text[0].lower() + text[1:]
    if source.random() < 0.2:
        text = source.choice(_BEFORE) + text
    if text[-1] not in "?.!" and source.random() < 0.2:
        text += source.choice(_BEHIND)
    return text


def vary(source: Random, text: str, *, lower: bool = True) -> str:
    """The question as people type it: now and then without capitals, signs or manners.

    ``lower``: it keeps its meaning in small letters.
    """
    if source.free:
        return _freely(source, text, lower=lower)
    dice = source.random()
    if dice < 0.08:
        return text[0].lower() + text[1:]
    if dice < 0.14:
        return text.rstrip("?.!")
    if dice < 0.20:
        return "Please " + text[0].lower() + text[1:] if text[-1] != "?" else text
    if dice < 0.24:
        return text + " Thank you."
    if dice < 0.27:
        return text.rstrip("?.!") + " please"
    if dice < 0.29:
        return text.rstrip("?.!") + "??"
    return text
