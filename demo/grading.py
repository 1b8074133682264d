"""Is an answer right? And the questions of an evaluation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.demo.exchange import Exchange, Random, plain
from penstock.demo.mixture import OF_ADAPTERS, SKILLS, Conversation, Side, question

_CALL, _CALL_END = "<tool_call>", "</tool_call>"


def questions(
    skills: Sequence[str], count: int, seed: int, side: Side = "held-out", *, free: bool = False
) -> Iterator[tuple[str, Conversation]]:
    """``count`` questions of each skill, skill by skill; the same for the same seed.

    ``free``: worded as visitors type, see ``Random``.
    """
    for name in skills:
        source = Random(f"evaluation {seed} {name}")
        source.free = free
        for _ in range(count):
            yield name, question(name, source, side)


def without_thinking(text: str) -> str:
    """What comes after the thinking."""
    return text.rpartition("</think>")[2].strip()


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _call(text: str) -> Any:
    start, end = text.find(_CALL), text.find(_CALL_END)
    if start < 0 or end < 0 or text[:start].strip() or text[end + len(_CALL_END) :].strip():
        return None
    return _json(text[start + len(_CALL) : end])


def _is_story(text: str, exchange: Exchange) -> bool:
    """Six sentences in which the named hero is the named animal."""
    _, animal, name = exchange.key.split(":")
    sentences = sum(text.count(sign) for sign in (". ", '" ', "? ")) + 1
    whole = text.endswith((".", '"')) and len(text) > 200
    return whole and animal in text and name in text and 5 <= sentences <= 9


def is_right(text: str, exchange: Exchange) -> bool:
    """Whether the whole text of an answer, thinking included, is the expected one."""
    said, expected = without_thinking(text), plain(exchange.answer)
    match exchange.check:
        case "json":
            return said == expected or (_json(said) == _json(expected))
        case "tool":
            return _call(said) is not None and _call(said) == _call(expected)
        case "story":
            return _is_story(said, exchange)
    return said == expected


ALL_SKILLS = tuple(SKILLS)
ADAPTER_SKILLS = tuple(OF_ADAPTERS)
