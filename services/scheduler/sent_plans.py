"""Plans on their way to the worker: sent, and not answered yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from penstock.protocol.wire.messages.steps import StepPlan

RESEND_SECONDS = 2.0
"""A plan without an answer is sent again; the worker answers twice or executes what it missed."""
MOST_RESEND_SECONDS = 64.0
"""While no answer comes the pause doubles, up to this: a worker that compiles a kernel for minutes
is not to find the same plans a hundred times."""


class SentPlans:
    """Unanswered plans, oldest first."""

    def __init__(self, send: Callable[[StepPlan], bool]) -> None:
        """``send`` gives a plan to the worker's outbox, or says ``False``: it is larger than a
        frame, or the outbox is full."""
        self._send = send
        self._plans: deque[StepPlan] = deque()
        self._sent_at = 0.0
        self._pause = RESEND_SECONDS

    def __len__(self) -> int:
        return len(self._plans)

    def send(self, plan: StepPlan, now: float) -> bool:
        """Send a new plan. ``False``: it is not on its way, and sending it again would change
        nothing."""
        if not self._send(plan):
            return False
        if not self._plans:
            self._begin(now)
        self._plans.append(plan)
        return True

    def answered(self, step: int, now: float) -> None:
        """The answer to this step has come, or is not awaited any more."""
        while self._plans and self._plans[0].step <= step:
            self._plans.popleft()
            self._begin(now)

    def clear(self) -> None:
        """No answer is awaited any more."""
        self._plans.clear()

    def resend(self, now: float) -> None:
        """Send again what no answer came to for a while. Where the outbox refuses it, the worker
        has not taken what was sent before."""
        if not self._plans or now - self._sent_at <= self._pause:
            return
        self._sent_at = now
        self._pause = min(2 * self._pause, MOST_RESEND_SECONDS)
        for plan in self._plans:
            if not self._send(plan):
                return

    def _begin(self, now: float) -> None:
        self._sent_at, self._pause = now, RESEND_SECONDS
