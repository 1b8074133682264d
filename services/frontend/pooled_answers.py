"""Vectors and scores, as answers hold them and as JSON writes them."""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Iterable

from penstock.client.answers import Answer
from penstock.client.meters import Usage
from penstock.protocol.wire.messages.tokens import Scores, Vector
from penstock.services.frontend.bodies.pooling import PromptUsage

BYTES_AT_ONCE = 128 * 1024
"""Bytes of JSON that are written without letting others run, which takes half a millisecond."""


def numbers(values: bytes) -> array[float]:
    """float32, little endian, as numbers."""
    found = array("f", values)
    if sys.byteorder == "big":
        found.byteswap()
    return found


def vector_of(answer: Answer) -> bytes:
    """float32, little endian. Raises ``TypeError`` for an answer of another task."""
    (event,) = answer.events()
    if not isinstance(event, Vector):
        raise TypeError(f"{type(event).__name__} is no vector")
    return event.values


def scores_of(answer: Answer) -> array[float]:
    """Raises ``TypeError`` for an answer of another task."""
    (event,) = answer.events()
    if not isinstance(event, Scores):
        raise TypeError(f"{type(event).__name__} holds no scores")
    return numbers(event.values)


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
