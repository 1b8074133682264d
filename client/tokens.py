"""What the task ``tokenize`` brings."""

from __future__ import annotations

import sys
from array import array

from penstock.client.answers import Answer
from penstock.protocol.tasks import TOKENIZE
from penstock.protocol.wire.messages.tokens import TokenIds


def ids_of(answer: Answer) -> list[int]:
    """The token ids in an answer. Raises ``TypeError`` for one of another task."""
    (event,) = answer.events()
    if not isinstance(event, TokenIds):
        raise TypeError(f"{type(event).__name__} is no answer of the task {TOKENIZE}")
    ids = array("i", event.values)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()
