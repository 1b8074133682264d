"""Which plan may come next."""

from __future__ import annotations

from penstock.protocol.wire.messages.steps import StepPlan
from penstock.services.worker.block_tables import PlanError


class PlanOrder:
    """Plans of one epoch come by their numbers, behind one that is full."""

    def __init__(self) -> None:
        self._epoch = 0
        self._expected: int | None = None

    def reset(self) -> None:
        """The next plan must be full."""
        self._expected = None

    def take(self, plan: StepPlan) -> None:
        """Raises ``PlanError`` for a plan that is not the next one."""
        if not plan.full:
            if self._expected is None:
                raise PlanError(f"plan {plan.step}: a full plan is needed first")
            if plan.epoch != self._epoch:
                raise PlanError(
                    f"plan of epoch {plan.epoch}: epoch {self._epoch} is being executed"
                )
            if plan.step != self._expected:
                raise PlanError(f"plan {plan.step} came, plan {self._expected} was due")
        self._epoch, self._expected = plan.epoch, plan.step + 1
