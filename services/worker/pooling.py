"""The rows of a step whose slots have a task other than to generate, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from penstock.protocol.wire.messages.steps import RowFailure
from penstock.protocol.wire.messages.tokens import RowPooled
from penstock.services.worker.slots import PlannedStep, SlotTable

States = npt.NDArray[np.float32]
Hidden = Callable[[list[int]], States]
"""Gives the states [rows, hidden size] of some rows of a step, one for each prompt."""


class PromptTask(Protocol):
    """The part of a task (``penstock.protocol.tasks.Task``) that a worker does."""

    name: str

    def pool(self, hidden: States) -> bytes:
        """hidden: [hidden size], of one prompt. Returns its payload."""


def floats(values: States) -> bytes:
    """As ``Vector`` and ``Scores`` carry them. Raises ``ValueError`` for what is no number."""
    if not np.isfinite(values).all():
        raise ValueError("the model's output is not a number (NaN or infinity)")
    return values.astype("<f4").tobytes()


def pool_rows(
    slots: SlotTable, step: PlannedStep, tasks: Mapping[str, PromptTask], hidden: Hidden
) -> tuple[list[RowPooled], list[RowFailure]]:
    """The payloads of a step's rows that have a task, and the rows whose task cannot be done."""
    rows = slots.task_rows(step)
    if not rows:
        return [], []
    pooled: list[RowPooled] = []
    failures: list[RowFailure] = []
    for (row, name), state in zip(rows, hidden([row for row, _ in rows]), strict=True):
        task = tasks.get(name)
        if task is None:
            failures.append(RowFailure(row, f"this engine does not do the task {name!r}", 500))
            continue
        try:
            pooled.append(RowPooled(row, bytes(task.pool(state))))
        except Exception as error:
            reason = f"the task {name!r} failed: {type(error).__name__}: {error}"
            failures.append(RowFailure(row, reason, 500))
    return pooled, failures
