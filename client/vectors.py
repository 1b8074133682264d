"""What the tasks ``embed``, ``score`` and ``classify`` bring."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Sequence

from penstock.client.answers import Answer
from penstock.protocol.wire.messages.tokens import Scores, Vector


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


def rank(score: float) -> float:
    """Lower for a better score; of what is no number the last."""
    return math.inf if math.isnan(score) else -score


def likeliest(shares: Sequence[float], labels: Sequence[str]) -> str:
    """The label with the highest share; one without a name has its number."""
    best = min(range(len(shares)), key=lambda label: rank(shares[label]))
    return labels[best] if best < len(labels) else f"LABEL_{best}"
