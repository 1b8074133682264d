"""The rows of a step whose slots have a task other than to generate, and what is made of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from penstock.protocol.tasks import GENERATE
from penstock.protocol.wire.messages.steps import RowFailure
from penstock.protocol.wire.messages.tokens import RowPooled

States = npt.NDArray[np.float32]
Hidden = Callable[[list[int]], States]
"""Gives the states [rows, hidden size] of some rows of a step, one for each prompt."""


class PromptTask(Protocol):
    """The part of a task (``penstock.protocol.tasks.Task``) that a worker does."""

    name: str

    def pool(self, hidden: States) -> bytes:
        """hidden: [hidden size], of one prompt. Returns its payload."""


class BatchTask(ABC):
    """A ``PromptTask`` that computes all prompts of a step at once."""

    name: str

    @abstractmethod
    def transformed(self, states: States) -> States:
        """[prompts, numbers], one row for each of ``states`` [prompts, hidden size]. A row that is
        no number makes its own result none, and no other's."""

    def pool(self, hidden: States) -> bytes:
        """See ``PromptTask.pool``."""
        return floats(self.transformed(hidden[None])[0])


def floats(values: States) -> bytes:
    """As ``Vector`` and ``Scores`` carry them. Raises ``ValueError`` for what is no number."""
    if not np.isfinite(values).all():
        raise ValueError("the model's output is not a number (NaN or infinity)")
    return values.astype("<f4").tobytes()


def pool_rows(
    named: Mapping[int, str],
    count: int,
    tasks: Mapping[str, PromptTask],
    hidden: Hidden,
    *,
    generates: bool = True,
) -> tuple[list[RowPooled], list[RowFailure]]:
    """The payloads of a step's rows that have a task, and the rows that get nothing: their task is
    not done here, or failed. named: ``SlotTable.task_rows``; count: of all rows. generates: rows
    without a task get a token from somebody else."""
    failures = [] if generates else _no_tokens(count, named)
    if not named:
        return [], failures
    pooled: list[RowPooled] = []
    rows_of: dict[str, list[int]] = {}
    for row, name in named.items():
        if name in tasks:
            rows_of.setdefault(name, []).append(row)
        else:
            failures.append(RowFailure(row, f"this engine does not do the task {name!r}", 500))
    for name, rows in rows_of.items():
        found, failed = _pooled(tasks[name], rows, hidden(rows))
        pooled += found
        failures += failed
    return pooled, failures


def _no_tokens(rows: int, named: Mapping[int, str]) -> list[RowFailure]:
    reason = f"this engine does not do the task {GENERATE!r}"
    return [RowFailure(row, reason, 500) for row in range(rows) if row not in named]


def _pooled(
    task: PromptTask, rows: list[int], states: States
) -> tuple[list[RowPooled], list[RowFailure]]:
    """What a task makes of its rows; what it raises ends the row that it was called for."""
    make: Callable[[States], bytes] = task.pool
    if isinstance(task, BatchTask):
        states, make = task.transformed(states), floats
        if np.isfinite(states).all():
            packed = states.astype("<f4")
            return [
                RowPooled(row, one.tobytes()) for row, one in zip(rows, packed, strict=True)
            ], []
    pooled: list[RowPooled] = []
    failures: list[RowFailure] = []
    for row, state in zip(rows, states, strict=True):
        try:
            pooled.append(RowPooled(row, bytes(make(state))))
        except Exception as error:
            reason = f"the task {task.name!r} failed: {type(error).__name__}: {error}"
            failures.append(RowFailure(row, reason, 500))
    return pooled, failures
