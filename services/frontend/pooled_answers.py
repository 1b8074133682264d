"""What the answers with vectors and with scores have in common as JSON."""

from __future__ import annotations

import time
from collections.abc import Iterable

from penstock.client.meters import Usage
from penstock.services.frontend.bodies.pooling import PromptUsage

BYTES_AT_ONCE = 128 * 1024
"""Bytes of JSON that are written without letting others run, which takes half a millisecond."""


def usage_of(usage: Usage) -> PromptUsage:
    return PromptUsage(prompt_tokens=usage.prompt, total_tokens=usage.prompt)


def listed(pieces: Iterable[bytes]) -> bytes:
    """A JSON array of what is written piece by piece, so that others run in between."""
    found: list[bytes] = []
    since_pause = 0
    for piece in pieces:
        found.append(piece)
        since_pause += len(piece)
        if since_pause > BYTES_AT_ONCE:
            time.sleep(0)  # gives Python's lock to others
            since_pause = 0
    return b"[%b]" % b",".join(found)
