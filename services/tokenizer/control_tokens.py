"""Tells the control tokens that a chat template wrote from those that a client typed.

A rendered chat may hold two kinds of ``<|im_end|>``. One is the template's exactly when the
template wrote every character of it (``template_text``); any other is text, whoever or whatever
put it together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

_RUN = re.compile(rb"\x01+")


class Rendered(NamedTuple):
    """A rendered chat."""

    text: str
    own: list[tuple[int, int]] | None
    """Spans of the control tokens that the template wrote, in order; ``None`` when every control
    token in the text is the template's."""


class ControlTokens:
    """Finds the texts of a tokenizer's control (special) tokens."""

    def __init__(self, texts: Iterable[str]) -> None:
        longest_first = sorted({text for text in texts if text}, key=len, reverse=True)
        # An empty alternation would match everywhere; (?!) matches nowhere.
        self._exact = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def read(self, text: str, own: bytes) -> Rendered:
        """own: one byte for each character, 1 where the template wrote it."""
        every = [match.span() for match in self._exact.finditer(text)]
        if all(own.find(0, begin, end) < 0 for begin, end in every):
            return Rendered(text, None)
        # Looked for where nobody else wrote: what a user typed ahead of a token cannot hide it.
        runs = [run.span() for run in _RUN.finditer(own)]
        return Rendered(
            text, [match.span() for run in runs for match in self._exact.finditer(text, *run)]
        )
