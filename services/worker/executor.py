"""What the worker's process asks of whatever computes its steps."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from penstock.protocol.process.trace import DEVICE, STEP, TRACE
from penstock.protocol.wire.messages.engine import Adapter, EngineSizes, StepShape
from penstock.protocol.wire.messages.steps import StepPlan, StepResult
from penstock.services.worker.memory_account import MemoryAccount
from penstock.services.worker.pooling import PromptTask

if TYPE_CHECKING:
    from penstock.services.worker.adapters.adapter_loader import AdapterLoader
    from penstock.services.worker.kv_copies import BlockAccess
    from penstock.services.worker.rank_group import Meeting
    from penstock.services.worker.speculation.drafting import DraftCounts

PLAIN_KERNELS = "plain torch kernels"
"""How the summary of an executor begins that could not have the kernels of its device."""


class DeviceFailed(RuntimeError):
    """The device reported an error for steps that were under way."""


class Rests(Protocol):
    """Takes an executor's memory off its device and brings it back; called from any thread, while
    the executor is not used."""

    def leave(self) -> None:
        """Weights go to the host's memory, KV memory to nowhere. Raises ``OSError`` and
        ``RuntimeError``."""

    def come_back(self) -> None:
        """The executor may be used again. Raises ``RuntimeError`` where the device has no room."""


class Executor(Protocol):
    """Executes step plans, in order. Used from one thread."""

    capacity: EngineSizes
    shape: StepShape
    """How its device likes its steps."""
    device: str
    """Where it computes: ``cpu``, the name of a GPU, or ``null``."""
    dtype: str
    """Type of the weights and of KV memory: ``bfloat16``, …; empty where there is no model."""
    summary: str
    """What was decided for it and why, for the log; may be empty."""
    account: MemoryAccount | None
    """What its memory is used for; ``None`` where there is no model."""
    max_in_flight: int
    """Steps that may be launched and not yet collected."""
    tasks: Mapping[str, PromptTask]
    """What it does beside to generate, by name."""
    generates: bool
    """Whether it generates."""
    repeats: bool
    """Whether the answer of a seed has the same bits whatever else a step computes."""
    labels: list[str]
    """What the scores of ``classify`` stand for."""
    described: str
    """What it does and why, for the log."""
    adapters: list[Adapter]
    """Those that are loaded."""
    loader: AdapterLoader | None
    """Loads further ones; ``None``: it takes none."""
    rests: Rests | None
    """Lets it keep what it has prepared while its model sleeps; ``None``: it cannot."""

    @property
    def draft_counts(self) -> DraftCounts | None:
        """What its drafts have come to; ``None``: it makes none."""

    @property
    def in_flight(self) -> int:
        """Steps that are launched and not yet collected."""

    def meet(self, meeting: Meeting) -> None:
        """Find the other ranks of the engine, where the model is divided among them; ahead of the
        first plan of an epoch. Raises ``RuntimeError`` where they do not come in time."""

    def reset(self) -> None:
        """Drop all slots and steps; the next plan must be full. KV memory is kept, its content
        is not."""

    def launch(self, plan: StepPlan) -> None:
        """Begin one step; it may run on while this returns.

        Raises ``penstock.services.worker.slots.PlanError`` for a plan that contradicts the slots,
        and whatever the computation raises. All slots are then dropped already; steps that were
        launched before can still be collected.
        """

    def prepare(self) -> None:
        """Do now, in a pause, what the first request of some kind would have to wait for."""

    def improve(self, now: float, pause: float) -> bool:
        """Look whether later steps could be computed faster, in a pause that has lasted ``pause``
        seconds: no more than a step's time. Returns whether there is more to do at once.

        Once that is done, ``summary`` says what was found.
        """

    def finished(self, wait: bool = False) -> StepResult | None:
        """Collect the oldest step; ``None`` when there is none, or, without ``wait``, when it
        still runs."""


class DirectExecutor(ABC):
    """The part of an executor that computes each step at once, in ``execute``."""

    capacity: EngineSizes
    shape = StepShape()
    max_in_flight = 1
    account: MemoryAccount | None = None
    draft_counts: DraftCounts | None = None
    rests: Rests | None = None
    kv_blocks: BlockAccess | None = None
    """Its KV memory, to be copied from and to; ``None``: that cannot be done."""

    def __init__(self) -> None:
        self.tasks: Mapping[str, PromptTask] = {}
        self.generates = True
        self.repeats = False
        self.labels: list[str] = []
        self.described = ""
        self.adapters: list[Adapter] = []
        self.loader: AdapterLoader | None = None
        self._results: deque[StepResult] = deque()

    @property
    def in_flight(self) -> int:
        return len(self._results)

    @abstractmethod
    def execute(self, plan: StepPlan) -> StepResult:
        """Execute one step; raises as ``Executor.launch`` does."""

    def launch(self, plan: StepPlan) -> None:
        began = time.monotonic_ns() if TRACE.on else 0
        self._results.append(self.execute(plan))
        if began:
            TRACE.add(STEP, began, plan.step, DEVICE)

    def meet(self, meeting: Meeting) -> None:
        """See ``Executor.meet``."""
        return

    def finished(self, wait: bool = False) -> StepResult | None:
        return self._results.popleft() if self._results else None

    def prepare(self) -> None:
        """See ``Executor.prepare``."""
        return

    def improve(self, now: float, pause: float) -> bool:
        """See ``Executor.improve``."""
        return False

    def reset(self) -> None:
        self._results.clear()
