"""Keeps control tokens that a client typed from becoming control tokens.

A rendered chat holds two kinds of ``<|im_end|>``: those that the template wrote and those that a
user wrote. Only the text before rendering tells them apart, so user strings that contain a control
token's text are marked there: an invisible private-use character before and after the text, which
survives what templates do with content (strip, split, startswith of something else, ``tojson``).
After rendering, ``read`` takes the marks away again and says which control tokens are the
template's own.

A user string that ends with the beginning of a control token (or begins with the end of one) gets
a mark there too, so that two strings that a template joins cannot form a control token together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

_PRIVATE_USE = range(0xF0000, 0xFFFFE)


class Marks(NamedTuple):
    """Three characters that occur nowhere in the request."""

    start: str
    end: str
    edge: str


class Rendered(NamedTuple):
    """A rendered chat without marks."""

    text: str
    own: list[tuple[int, int]] | None
    """Spans of the control tokens that the template wrote, in order; ``None`` when every control
    token in the text is the template's."""


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


class ControlTokens:
    """Finds the texts of a tokenizer's control (special) tokens."""

    def __init__(self, texts: Iterable[str]) -> None:
        longest_first = sorted({text for text in texts if text}, key=len, reverse=True)
        # An empty alternation would match everywhere; (?!) matches nowhere.
        pattern = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._exact = re.compile(pattern)
        # Templates may change the case of what they print: mark whatever could become a token.
        self._any_case = re.compile(pattern, re.IGNORECASE)
        self._beginnings = {text[:n] for text in longest_first for n in range(1, len(text))}
        self._endings = {text[n:] for text in longest_first for n in range(1, len(text))}
        self._longest = len(longest_first[0]) if longest_first else 0

    def _suspicious(self, text: str) -> bool:
        return bool(self._any_case.search(text)) or any(self._edges(text))

    def _edges(self, text: str) -> tuple[bool, bool]:
        """Whether the text begins with the end, or ends with the beginning, of a token."""
        reach = range(1, min(self._longest, len(text) + 1))
        return (
            any(text[:n] in self._endings for n in reach),
            any(text[-n:] in self._beginnings for n in reach),
        )

    def mark(self, values: list[Any]) -> tuple[list[Any], Marks | None]:
        """Mark what users wrote in JSON values. ``None`` where nothing needed a mark."""
        texts = [text for value in values for text in _strings(value)]
        if not any(map(self._suspicious, texts)):
            return values, None
        used = set().union(*texts)
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
        marks = Marks(next(free), next(free), next(free))
        return [self._marked(value, marks) for value in values], marks

    def _marked(self, value: Any, marks: Marks) -> Any:
        if isinstance(value, str):
            starts, ends = self._edges(value)
            inner = self._any_case.sub(lambda m: f"{marks.start}{m[0]}{marks.end}", value)
            return f"{marks.edge if starts else ''}{inner}{marks.edge if ends else ''}"
        if isinstance(value, dict):
            return {self._marked(k, marks): self._marked(v, marks) for k, v in value.items()}
        if isinstance(value, list):
            return [self._marked(item, marks) for item in value]
        return value

    def read(self, rendered: str, marks: Marks | None) -> Rendered:
        """Take the marks out and tell the template's control tokens from the users'."""
        if marks is None:
            return Rendered(rendered, None)
        for mark in marks:  # a template may print JSON in ASCII
            rendered = rendered.replace(json.dumps(mark)[1:-1], mark)
        places: dict[str, set[int]] = {mark: set() for mark in marks}
        pieces = []
        length = 0
        for piece in re.split(f"([{''.join(marks)}])", rendered):
            if piece in places:
                places[piece].add(length)
            else:
                pieces.append(piece)
                length += len(piece)
        text = "".join(pieces)
        everywhere = set().union(*places.values())
        own, foreign = [], False
        for match in self._exact.finditer(text):
            begin, end = match.span()
            if (
                begin in places[marks.start]
                or end in places[marks.end]
                or not everywhere.isdisjoint(range(begin + 1, end))
            ):
                foreign = True
            else:
                own.append((begin, end))
        return Rendered(text, own if foreign else None)
