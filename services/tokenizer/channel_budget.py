"""Grammars of answers in channels other than harmony's, which have their own (``channel_grammar``):
one that is held to its budget of thinking alone, and calls that are a must behind thinking.

With a budget, thinking comes at the beginning, once, and has so many tokens at most.
"""

from __future__ import annotations

import re

from penstock.protocol.grammar.request import ToolGrammar
from penstock.services.tokenizer.lark_text import quoted
from penstock.services.tokenizer.output.family import Family
from penstock.services.tokenizer.output.machine import Vocabulary

_TEXT = "/(?s:.*)/"


def in_other_channels(family: Family, vocabulary: Vocabulary) -> bool:
    """Whether these grammars are those of the family."""
    return "channel" not in family.marks and has_channel_budget(family, vocabulary)


def has_channel_budget(family: Family, vocabulary: Vocabulary) -> bool:
    """Whether the channels are told by tokens, which the grammar needs."""
    return family.channel_thinking is not None and all(
        mark in vocabulary.added for mark in family.marks.values() if mark.startswith("<|")
    )


def within_channel_budget(
    family: Family, vocabulary: Vocabulary, tokens: int, *, begun: bool
) -> ToolGrammar:
    """tokens: of thinking. begun: the prompt has opened it."""
    thinking = family.channel_thinking
    if thinking is None:
        raise ValueError(f"{family.name} has no channels")
    marks = {
        text: vocabulary.added[text] for text in family.marks.values() if text in vocabulary.added
    }
    opening = marks.pop(thinking.mark)
    others = ",".join(map(str, marks.values()))
    opened, closed = (_written(text, vocabulary) for text in (thinking.opened, thinking.closed))
    thought = "thought" if tokens else ""
    rules = [f"piece: <[^{opening}]>"]
    answer = "piece*"
    if thinking.header:  # the mark begins other messages as well, whose header is another one
        rules[0] += f" | <[{opening}]> OTHER <[{others}]>"
        rules.append(f"OTHER: {_TEXT} & ~/{thinking.header}(?s:.*)/")
    if thinking.in_header:
        answer = f"OTHER (<[{others}]> piece*)?"
    start = f"{thought} {closed} piece*" if begun else answer
    if not begun and tokens:
        start = f"{opened} {thought} {closed} piece* | {answer}"
    if tokens:
        rules.append(f"thought[max_tokens={tokens}]: {_TEXT}")
    return ToolGrammar("\n".join([f"start: {start}", *rules]))


def behind_thinking(
    family: Family, vocabulary: Vocabulary, calls: ToolGrammar, *, begun: bool, budget: int | None
) -> ToolGrammar:
    """Calls, which must come, behind thinking. begun: the prompt has opened it. budget: its
    tokens; ``None``: as many as the model likes."""
    thinking = family.channel_thinking
    if thinking is None:
        raise ValueError(f"{family.name} has no channels")
    limit = "" if budget is None else f"[max_tokens={budget}]"
    thought = "" if budget == 0 else "thought"
    closed = f"{_written(thinking.closed, vocabulary)} {_written(thinking.following, vocabulary)}"
    opened, *reply = (_written(text, vocabulary) for text in (thinking.opened, *thinking.reply))
    before = f"({opened} {thought} {closed})?" if thought else ""
    if begun:
        before = f"{thought} {closed}"
    if any(reply):
        before += f" (({reply[0]})? {reply[1]})?"
    rules = [f"start: {before} calls", calls.lark.replace("start: ", "calls: ", 1)]
    if thought:
        rules.append(f"thought{limit}: {_TEXT}")
    return ToolGrammar("\n".join(rules), calls.schemas)


def _written(text: str, vocabulary: Vocabulary) -> str:
    """An expression for a text whose marks are tokens."""
    parts = filter(None, re.split(r"(<\|[^|]+\|>)", text))
    return " ".join(
        f"<[{vocabulary.added[part]}]>" if part in vocabulary.added else quoted(part)
        for part in parts
    )
