"""The grammar of an answer whose messages stand in channels (harmony): thinking and words to the
user in messages of their own, then calls or the final message.

A call and a final message begin alike, so there is no token from which on calls could be watched:
such an answer is held to a form from its first token on, or not at all. With a budget of thinking
it has one message of that at most, at its beginning.
"""

from __future__ import annotations

import enum

import msgspec

from penstock.protocol.grammar.request import Grammar, ToolGrammar
from penstock.services.tokenizer.output.family import Family
from penstock.services.tokenizer.output.machine import Vocabulary
from penstock.services.tokenizer.prompt_error import PromptError

_TEXT = "/(?s:.*)/"
_ROLE = '"assistant"'


class Turn(enum.Enum):
    """Where in the model's turn a prompt ends."""

    HEADER = enum.auto()
    """The channel of its first message comes next."""
    THINKING = enum.auto()
    """Within a message of thinking."""
    REPLY = enum.auto()
    """Within words to the user. (Harmony's are ``ELSEWHERE``.)"""
    ELSEWHERE = enum.auto()
    """Within another message, or behind one."""


class Channels:
    """Writes the messages before calls, and those that may stand instead of them."""

    def __init__(
        self, family: Family, vocabulary: Vocabulary, turn: Turn, budget: int | None = None
    ) -> None:
        """budget: tokens of thinking, at most."""

        def token(mark: str) -> str:
            return f"<[{vocabulary.added[family.marks[mark]]}]>"

        self._token = token
        self._next = f"{token('end')} {token('start')} {_ROLE}"
        self._turn = turn
        self._budget = budget

    def around(
        self, calls: ToolGrammar | None, content: Grammar | None, *, required: bool = False
    ) -> ToolGrammar:
        """The grammar of the whole answer.

        Args:
            calls: what calls look like, if some may come.
            content: what the final message must look like.
            required: no final message may come instead of calls.

        Raises ``PromptError`` where the prompt ends where no call can begin.
        """
        if self._turn is Turn.ELSEWHERE:
            raise PromptError(
                "tool_choice, strict tools and a response format need a prompt that ends where "
                "the model's message, or its thinking, begins; this one ends within or behind "
                "another message: leave out continue_final_message",
                "messages",
            )
        final = self._message("final", "TEXT" if content is None else "@content")
        rules = [f"final: {final}", f"words: {self._message('commentary', 'TEXT')} {self._next}"]
        answers = [] if required else ["final"]
        source = ToolGrammar("", {}, None if required else content)
        if calls is not None:
            answers.append("calls")
            rules.append(calls.lark.replace("start: ", "calls: ", 1))
            source = msgspec.structs.replace(source, schemas=calls.schemas)
        before = self._thoughts(with_words=not required)
        return self._written(source, f"{before} ({' | '.join(answers)})", *rules)

    def free(self) -> ToolGrammar:
        """The grammar of an answer that is held to its budget of thinking alone."""
        token = self._token
        channel = f"({token('channel')} OTHER)? ({token('constrain')} TEXT)?"
        rules = [
            f"other: TEXT {channel} {token('message')} TEXT",
            f"next: ({token('end')} | {token('call')}) {token('start')} {_ROLE} other",
            "OTHER: /(commentary|final)(?s:.*)/",
        ]
        begun = "TEXT" if self._turn is Turn.ELSEWHERE else f"{self._thoughts()} other"
        return self._written(ToolGrammar(""), f"{begun} next* {token('call')}?", *rules)

    def _message(self, channel: str, text: str) -> str:
        return f'{self._token("channel")} "{channel}" {self._token("message")} {text}'

    def _thoughts(self, *, with_words: bool = False) -> str:
        """What may come before an answer, perhaps with words to the user."""
        begun = self._turn is Turn.THINKING
        if self._budget is None:
            before = "(thoughts | words)*" if with_words else "thoughts*"
            return f"TEXT {self._next} {before}" if begun else before
        thinks = "thoughts?" if self._budget else ""
        if begun:
            thinks = f"{'thought' if self._budget else ''} {self._next}"
        return f"{thinks} words*" if with_words else thinks

    def _written(self, source: ToolGrammar, start: str, *rules: str) -> ToolGrammar:
        thought = "thought" if self._budget else "TEXT"
        thoughts = f"thoughts: {self._message('analysis', thought)} {self._next}"
        lines = [f"start: {start}", *rules, thoughts, f"TEXT: {_TEXT}"]
        if self._budget:
            lines.append(f"thought[max_tokens={self._budget}]: {_TEXT}")
        return msgspec.structs.replace(source, lark="\n".join(lines))


def in_channels(family: Family, vocabulary: Vocabulary) -> bool:
    """Whether there is a grammar of messages: it is harmony's, and needs its marks as tokens."""
    return "channel" in family.marks and vocabulary.added.keys() >= set(family.marks.values())
