"""The way from what a task has made of a prompt to what its client gets."""

from __future__ import annotations

from array import array
from typing import TypeAlias

from penstock.protocol.ownership.choice import Delta
from penstock.protocol.tasks import Task
from penstock.protocol.wire.messages.tokens import (
    Content,
    Event,
    RowDetails,
    RowLogprobs,
    Scores,
    Vector,
)

TokenRow: TypeAlias = "memoryview[int] | array[int] | list[int]"
"""int32 token ids."""


class PooledStream:
    """The ``Stream`` of a choice that brings no tokens. It keeps nothing, so the choices of a batch
    share one."""

    stop: str | None = None
    reasoning_tokens = 0

    def __init__(self, task: Task) -> None:
        self._task = task

    def push(self, tokens: TokenRow, last_is_stop: bool = False) -> Delta:
        return Delta("", len(tokens), None)

    def finish(self, *, complete: bool = False) -> Content:
        return ""

    def replay(self, tokens: TokenRow) -> Content:
        return ""

    def pooled(self, values: bytes) -> Event:
        """What the task has made of a prompt. Raises ``TypeError`` where it made something else."""
        event = self._task.event(values)
        if not isinstance(event, Vector | Scores) or not isinstance(event.values, bytes):
            # It would be refused with the rows of all others in the same message.
            raise TypeError(f"the task {self._task.name} made no Vector or Scores of bytes")
        return event

    def details(
        self, row: int, first: bool, tokens: TokenRow, found: RowLogprobs | None
    ) -> RowDetails | None:
        return None
