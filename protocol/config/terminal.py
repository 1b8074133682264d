"""What a terminal can show, and what its user wants to see there."""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

_RESET, _BOLD, _DIM = "\x1b[0m", "\x1b[1m", "\x1b[2m"


class Style(msgspec.Struct, frozen=True):
    """What a descriptor can show."""

    colour: bool = False
    cursor: bool = False
    """It obeys escape sequences that move the cursor and erase: a line can be drawn again."""

    def paint(self, code: str, text: str) -> str:
        return f"{code}{text}{_RESET}" if self.colour and text else text

    def bold(self, text: str) -> str:
        return self.paint(_BOLD, text)

    def dim(self, text: str) -> str:
        return self.paint(_DIM, text)


def style_of(descriptor: int, environment: Mapping[str, str] | None = None) -> Style:
    """Plain unless ``descriptor`` is a terminal that is not dumb; without colour where NO_COLOR
    is set (https://no-color.org)."""
    found = os.environ if environment is None else environment
    cursor = is_terminal(descriptor) and found.get("TERM", "dumb") != "dumb"
    return Style(colour=cursor and not found.get("NO_COLOR"), cursor=cursor)


def is_terminal(descriptor: int) -> bool:
    try:
        return os.isatty(descriptor)
    except OSError:
        return False
