"""The grammar of an answer in channels other than harmony's, which have their own
(``channel_grammar``): thinking and words to the user in messages of their own, then calls, or words
instead.

As in harmony, a call begins as other messages do: such an answer is held to a form from its first
token on, or not at all. With a budget, thinking comes at the beginning, once, and has so many
tokens at most.
"""

from __future__ import annotations

import re

import msgspec

from penstock.protocol.grammar.request import Grammar, ToolGrammar
from penstock.services.tokenizer.channel_grammar import Turn
from penstock.services.tokenizer.lark_text import quoted
from penstock.services.tokenizer.output.family import ChannelThinking, Family
from penstock.services.tokenizer.output.machine import Vocabulary

_TEXT = "/(?s:.*)/"


def tells_messages(family: Family, vocabulary: Vocabulary) -> bool:
    """Whether the channels are told by tokens, which a grammar needs."""
    return family.channel_thinking is not None and all(
        mark in vocabulary.added for mark in family.marks.values() if mark.startswith("<|")
    )


def in_messages(family: Family, vocabulary: Vocabulary) -> bool:
    """Whether these grammars are those of the family."""
    return "channel" not in family.marks and tells_messages(family, vocabulary)


class Messages:
    """Writes the messages before calls, and those that may stand instead of them."""

    def __init__(
        self, family: Family, vocabulary: Vocabulary, turn: Turn, budget: int | None = None
    ) -> None:
        """budget: tokens of thinking, at most."""
        if family.channel_thinking is None:
            raise ValueError(f"{family.name} has no channels")
        self._thinking: ChannelThinking = family.channel_thinking
        self._marks = {
            text: vocabulary.added[text]
            for text in family.marks.values()
            if text in vocabulary.added
        }
        self._turn = turn
        self._budget = budget
        thinking = family.channel_thinking
        self._opened, self._closed, self._following, self._ending = map(
            self._written,
            (thinking.opened, thinking.closed, thinking.following, thinking.ending),
        )
        self._said, self._unsaid = map(self._written, thinking.reply)

    def around(
        self, calls: ToolGrammar | None, content: Grammar | None, *, required: bool = False
    ) -> ToolGrammar:
        """The grammar of the whole answer.

        Args:
            calls: what calls look like, if some may come.
            content: what the words to the user must look like; then no calls stand behind them.
            required: no words may come instead of calls.
        """
        free = content is None and not required
        body = "TEXT" if content is None else "@content"
        rules = [f"ended: ({self._unsaid} {self._ended})?"]
        source = ToolGrammar("", {}, None if required else content)
        answers = [] if required else ["final"]
        if not required:
            rules.append(f"final: {self._said} {body} ended")
        if free:
            rules.append(f"words: {self._said} TEXT {self._unsaid} {self._following}")
        if calls is not None:
            answers.append("calls")
            silent = ""
            if self._thinking.always_replies:
                silent = f"({self._said} {self._unsaid} {self._following})?"
            rules.append(f"calls: {silent} called {self._ended}")
            rules.append(calls.lark.replace("start: ", "called: ", 1))
            source = msgspec.structs.replace(source, schemas=calls.schemas)
        start = f"{self._thoughts(with_words=free)} ({' | '.join(answers)})"
        if self._turn is Turn.REPLY:
            start = self._from_reply(body, calls is not None, free=free, required=required)
        rules.append(f"thoughts: {self._opened} {self._thought} {self._closed} {self._following}")
        return msgspec.structs.replace(source, lark=self._lark(start, *rules))

    def free(self) -> ToolGrammar:
        """The grammar of an answer that is held to its budget of thinking alone."""
        thinking, others = self._thinking, dict(self._marks)
        opening = others.pop(thinking.mark)
        closing = ",".join(map(str, others.values()))
        rules = [f"piece: <[^{opening}]>"]
        answer = "piece*"
        if thinking.header:  # the mark begins other messages as well, whose header is another one
            rules[0] += f" | <[{opening}]> OTHER <[{closing}]>"
            rules.append(f"OTHER: {_TEXT} & ~/{thinking.header}(?s:.*)/")
        if thinking.in_header:
            answer = f"OTHER (<[{closing}]> piece*)?"
        start = answer
        if self._turn is Turn.THINKING:
            start = f"{self._thought} {self._closed} piece*"
        elif self._budget:
            start = f"{self._opened} {self._thought} {self._closed} piece* | {answer}"
        return ToolGrammar(self._lark(start, *rules))

    def _from_reply(self, body: str, calls: bool, *, free: bool, required: bool) -> str:
        """An answer that begins within words to the user."""
        behind = f"{self._unsaid} {self._following}"
        if required:
            return f"{behind} calls"
        start = f"{body} ended"
        if free:
            return f"{start} | TEXT {behind} {self._repeated(with_words=True)} (final | calls)"
        return f"{start} | {behind} calls" if calls else start

    def _thoughts(self, *, with_words: bool) -> str:
        """What may come before the answer, perhaps with words to the user."""
        if self._turn is Turn.THINKING:
            begun = f"{self._thought} {self._closed} {self._following}"
            return f"{begun} {self._repeated(with_words)}"
        once = "thoughts? " if self._budget else ""
        return once + self._repeated(with_words)

    def _repeated(self, with_words: bool) -> str:
        """Messages that may come again and again."""
        if self._budget is None:
            return "(thoughts | words)*" if with_words else "thoughts*"
        return "words*" if with_words else ""

    @property
    def _ended(self) -> str:
        return f"({self._ending})?" if self._ending else ""

    @property
    def _thought(self) -> str:
        """The text of a message of thinking."""
        if self._budget is None:
            return "TEXT"
        return "thought" if self._budget else ""

    def _lark(self, start: str, *rules: str) -> str:
        lines = [f"start: {start}", *rules, f"TEXT: {_TEXT}"]
        if self._budget:
            lines.append(f"thought[max_tokens={self._budget}]: {_TEXT}")
        return "\n".join(lines)

    def _written(self, text: str) -> str:
        """An expression for a text whose marks are tokens."""
        parts = filter(None, re.split(r"(<\|[^|]+\|>)", text))
        return " ".join(
            f"<[{self._marks[part]}]>" if part in self._marks else quoted(part) for part in parts
        )
