"""How much of the syntax of calls is read in one output."""

from __future__ import annotations

MAX_PARTS = 8_192
"""Marks, keys, values and brackets of one output that are read as such."""
LITERAL = 4
"""What a value costs that is no JSON and may be a literal of Python's, in parts; and the characters
of it for each further part."""


class Budget:
    """The parts that an output may still have. Each takes a few microseconds, however short it is,
    so a text of nothing but marks is content from some place on."""

    __slots__ = ("_left",)

    def __init__(self, parts: int = MAX_PARTS) -> None:
        self._left = parts

    def spend(self, parts: int = 1) -> bool:
        """Take so many. ``False``: there were too many."""
        self._left -= parts
        return self._left >= 0
