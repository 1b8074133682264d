"""Spans of prompts in a worker: from the first step that computes some of one to the step that
draws behind it."""

from __future__ import annotations

from penstock.protocol.process.spans import SPANS
from penstock.protocol.wire.messages.steps import StepPlan


class SlotSpans:
    """The traced slots whose prompts are being computed. Only to be told while ``SPANS.on``."""

    def __init__(self) -> None:
        self._begun: dict[int, tuple[str, float, int]] = {}
        """Slot → (traceparent, since when, positions that the cache had)."""
        self._last: dict[int, list[int]] = {}
        """Steps under way → slots whose prompts end with them."""

    def launched(self, plan: StepPlan, began: float) -> None:
        """A step was put on the device at ``began``, monotonic seconds."""
        if plan.full:
            self.drop()
        for new in plan.added:
            self._begun.pop(new.slot, None)
            if new.trace:
                self._begun[new.slot] = (new.trace, began, new.num_computed)
        if self._begun:
            last = [one.slot for one in plan.chunks if one.sample and one.slot in self._begun]
            if last:
                self._last[plan.step] = last

    def finished(self, step: int, now: float) -> None:
        """The result of a step is here."""
        for slot in self._last.pop(step, ()):
            if (found := self._begun.pop(slot, None)) is not None:
                trace, began, cached = found
                attributes = {"penstock.slot": slot, "penstock.cached_positions": cached}
                SPANS.record("compute prompt", trace, began, now, attributes)

    def drop(self) -> None:
        """Nothing is under way any more."""
        self._begun.clear()
        self._last.clear()
