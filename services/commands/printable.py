"""What may reach a terminal of a text that somebody else wrote: a model, its server, a file.

A terminal obeys what stands between its characters: it can be told to move the cursor over what
was shown before, to rename its window, to write the clipboard, or to type an answer.
"""

from __future__ import annotations

import re

_PICTURES = 0x2400
"""Unicode's pictures of the control characters stand in their order from here."""
_OBEYED = {
    **{code: chr(_PICTURES + code) for code in range(0x20) if code not in (0x09, 0x0A, 0x0D)},
    0x0D: None,  # ahead of a newline it means nothing; elsewhere it would overwrite the line
    0x7F: "\u2421",
    **{code: f"\\x{code:02x}" for code in range(0x80, 0xA0)},
    # These turn the order of what follows, so that a reader sees other words than he copies.
    **{code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))},
    # Halves of surrogate pairs cannot be written at all.
    **dict.fromkeys(range(0xD800, 0xE000), "\ufffd"),
}
_COLOUR = re.compile(r"(\x1b\[[0-9;]*m)")


def printable(text: str) -> str:
    """``text`` with a visible sign for all that a terminal would obey; tabs and newlines stay."""
    return text.translate(_OBEYED)


def one_line(text: str) -> str:
    """The same without newlines and tabs, for names and messages within a line."""
    return " ".join(printable(text).split())


def only_colours(text: str) -> str:
    """What a renderer made: colours stay, of other control sequences none."""
    parts = _COLOUR.split(text)
    return "".join(part if number % 2 else printable(part) for number, part in enumerate(parts))
