"""When the device worked on each step, on the host's clock.

CUDA events know only the time between them. A step's last event has passed when its result is
taken, so it lies before that moment; the host polls while steps are under way, so the least lag of
some steps is a few microseconds, and the device's clock is set by it, anew every second because the
two clocks drift. Nothing waits for the device.
"""

from __future__ import annotations

import time

import torch

from penstock.protocol.process.trace import DEVICE, STEP, TRACE

_LONGEST_SPAN = 1_000_000_000
"""The time between two events is a float of 24 bits: of a second the rounding is below 0.1 µs."""


class StepTimes:
    """Records the device's intervals of steps that are over, in their order."""

    def __init__(self) -> None:
        self._anchor: torch.cuda.Event | None = None
        self._anchor_at = 0
        """Host's time of the anchor, as far as is known; nanoseconds like all here."""
        self._last_end = 0

    def add(self, step: int, begun: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        """Both events have passed."""
        now = time.monotonic_ns()
        anchor = self._anchor
        if anchor is None or _between(anchor, ended) > _LONGEST_SPAN:
            self._anchor = anchor = begun
            self._anchor_at = now
        self._anchor_at = min(self._anchor_at, now - _between(anchor, ended))
        start = self._anchor_at + _between(anchor, begun)
        end = max(self._anchor_at + _between(anchor, ended), self._last_end)
        # A better setting of the clock may put a step before the end of the one ahead of it.
        TRACE.add(STEP, max(start, self._last_end), step, DEVICE, end)
        self._last_end = end


def _between(earlier: torch.cuda.Event, later: torch.cuda.Event) -> int:
    """Nanoseconds."""
    return round(float(earlier.elapsed_time(later)) * 1e6)
