"""JSON that stays on its line, whatever a client takes for the end of one.

JSON leaves three characters as they are that end a line for Python's ``str.splitlines``, and so for
``httpx``'s ``iter_lines``, which clients of event streams use: a model that writes one of them
would cut the event in two.
"""

from __future__ import annotations

from typing import Any

import msgspec

to_json = msgspec.json.encode
"""In one line, if it is ASCII."""
_ESCAPES = tuple((mark.encode(), b"\\u%04x" % ord(mark)) for mark in "\u0085\u2028\u2029")


def encode(value: Any) -> bytes:
    """``value`` as JSON in one line."""
    rendered = to_json(value)
    return rendered if rendered.isascii() else one_line(rendered)


def one_line(rendered: bytes) -> bytes:
    """JSON that is not ASCII, without what may end a line."""
    if not (b"\xe2\x80" in rendered or b"\xc2\x85" in rendered):
        return rendered
    for mark, escape in _ESCAPES:
        rendered = rendered.replace(mark, escape)
    return rendered
