"""Which logprobs belong to the text of a response: those of the tokens that became text.

Logprobs come with the row of their tokens, whatever these become: text, thinking, a call, a mark
between them, or for now nothing, while a character or a possible mark is unfinished.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.protocol.logprobs import NamedLogprobs
from penstock.services.frontend.bodies.responses import ChatTokenLogprob
from penstock.services.frontend.dialects.logprobs import chat_tokens


class TextLogprobs:
    """Holds the logprobs of tokens until their text comes, or something else in its place."""

    def __init__(self) -> None:
        self._held: list[ChatTokenLogprob] = []
        self._end: list[ChatTokenLogprob] = []

    def hold(self, tokens: NamedLogprobs, *, ends: bool) -> None:
        """Take those of a row. ends: its last token ended the answer and is no text."""
        self._held += chat_tokens(tokens)
        if ends:
            self._end, self._held = self._held[-1:], self._held[:-1]

    def of_text(self, text: str, *, begins: bool, is_followed: bool) -> list[ChatTokenLogprob]:
        """Those of a text that has come with the row.

        begins: it begins a message, so that marks may lie before it. is_followed: the row goes on
        with something else.
        """
        if is_followed:
            return _covering(text, self._held)
        if begins:
            return _covering(text, self._held[::-1])[::-1]
        return self._held

    def drop(self) -> None:
        """What the held tokens became is known."""
        self._held = []

    def rest(self) -> list[ChatTokenLogprob]:
        """Those that are still held when the answer ends, and that of the token that ended it."""
        held, self._held = [*self._held, *self._end], []
        return held


def _covering(text: str, tokens: Sequence[ChatTokenLogprob]) -> list[ChatTokenLogprob]:
    """As many of the first tokens as a text needs by its bytes."""
    left, found = len(text.encode()), []
    for token in tokens:
        if left <= 0:
            break
        found.append(token)
        left -= len(token.bytes)
    return found
