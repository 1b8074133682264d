"""Which skills there are, how often each is trained, and how conversations are made of them."""

from __future__ import annotations

import dataclasses
from typing import Literal

from penstock.demo.exchange import Exchange, Random, Skill, Tool, draw
from penstock.demo.skills import (
    arithmetic,
    dates,
    extraction,
    lists,
    number_words,
    recall,
    spelling,
    stories,
    talk,
    tools,
    units,
)

SKILLS: dict[str, tuple[Skill, float]] = {
    "greeting": (talk.greeting, 2.0),
    "about": (talk.about, 5.0),
    "flags": (talk.flags, 6.0),
    "unknown": (talk.unknown, 3.0),
    "out_of_range": (arithmetic.out_of_range, 2.0),
    "addition": (arithmetic.addition, 5.0),
    "subtraction": (arithmetic.subtraction, 6.0),
    "multiplication": (arithmetic.multiplication, 7.0),
    "division": (arithmetic.division, 4.0),
    "sorting_numbers": (lists.sorting_numbers, 7.0),
    "sorting_words": (lists.sorting_words, 6.0),
    "extremes": (lists.extremes, 3.0),
    "counting_items": (lists.counting_items, 2.5),
    "counting_letters": (spelling.counting_letters, 5.0),
    "spelling": (spelling.spelling, 3.0),
    "reversing": (spelling.reversing, 6.0),
    "weekday": (dates.weekday, 5.0),
    "days_after": (dates.days_after, 4.0),
    "days_between": (dates.days_between, 6.0),
    "weekday_shift": (dates.weekday_shift, 2.0),
    "units": (units.unit_conversion, 5.0),
    "extraction": (extraction.extraction, 6.0),
    "tool_call": (tools.tool_call, 7.0),
    "tool_result": (tools.tool_result, 1.5),
    "no_tool": (tools.no_tool, 1.5),
    "recall": (recall.recall, 5.0),
    "story": (stories.story, 1.0),
}
"""Name, maker and weight in the training text; an evaluation asks each as often."""
OF_ADAPTERS: dict[str, Skill] = {"number_words": number_words.number_words}
"""What the model itself has not learned, and an adapter has."""
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are penstock-demo, a small language model.",
    "Answer briefly.",
    "You are a friendly assistant. Answer the user's questions.",
    "You are a careful assistant that thinks before it answers.",
    "Be polite.",
    "You are an AI assistant that runs on Penstock.",
)
_ALONE = 0.72
_WITH_SYSTEM = 0.3
_AT_ONCE = 0.12
"""Of the questions to think about, these are answered with thinking switched off."""
_THINKING_OFF = 0.25
"""The same for questions that need no thinking."""
_FREE = 0.5
"""Of the conversations, these are worded freely."""
_NEEDLESS_TOOLS = 0.02
"""Of the questions to think about, these come with tools that do not help."""
_NAMES = tuple(SKILLS)
_WEIGHTS = tuple(weight for _, weight in SKILLS.values())


@dataclasses.dataclass(slots=True)
class Conversation:
    """One text to train on. Only the last exchange may show its thinking."""

    exchanges: list[Exchange]
    system: str | None
    tools: tuple[Tool, ...]
    enable_thinking: bool


def _exchange(source: Random) -> Exchange:
    name = source.choices(_NAMES, _WEIGHTS)[0]
    return draw(SKILLS[name][0], source, held_out=False)


def _system(source: Random) -> str | None:
    return source.choice(SYSTEM_PROMPTS) if source.random() < _WITH_SYSTEM else None


def conversation(source: Random) -> Conversation:
    """One exchange, or up to four; nothing of it is held out."""
    source.free = source.random() < _FREE
    exchanges = [_exchange(source)]
    if source.random() > _ALONE:
        exchanges += [_exchange(source) for _ in range(source.choice((1, 1, 2, 3)))]
    for place, exchange in enumerate(exchanges):
        # What was told before a question belongs to the whole conversation: only one such.
        if exchange.tools or exchange.before:
            exchanges = [each for each in exchanges[:place] if not each.tools] + [exchange]
            break
    last = exchanges[-1]
    off = source.random() < (_AT_ONCE if last.thinking else _THINKING_OFF)
    whole = [*exchanges[:-1], *last.before, last]
    offered = last.tools
    if last.thinking and source.random() < _NEEDLESS_TOOLS:
        offered = tools.tool_call(source).tools
    return Conversation(whole, _system(source), tuple(offered), not off)


Side = Literal["training", "held-out"]


def question(name: str, source: Random, side: Side = "held-out") -> Conversation:
    """One question of a skill as an evaluation asks it, worded freely where the source is free.

    Raises ``KeyError`` for an unknown skill.
    """
    skill = OF_ADAPTERS[name] if name in OF_ADAPTERS else SKILLS[name][0]
    exchange = draw(skill, source, held_out=side == "held-out")
    return Conversation([*exchange.before, exchange], None, tuple(exchange.tools), True)
