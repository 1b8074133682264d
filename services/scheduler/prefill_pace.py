"""How much prefill a step may carry while others decode: bounded by time, not by tokens alone.

Every stream waits for the whole step. A step full of prefill lasts many times as long as one that
only decodes, and each waiting reader sees a pause. So while sequences decode, the prefill of a step
is cut to what is predicted to take ``FACTOR`` times a decode step, or ``LEAST_SECONDS`` if that is
more: below that no reader notices, and larger chunks cost less a token. Where many sequences wait
beside those that decode, as after a burst, the pause may be longer by their share, up to
``PATIENCE_SECONDS``: cut small, the burst would pay a decode step of few rows for every chunk, and
all would be served later. With nobody decoding there is no bound. The prediction is a running mean
of what steps took.
"""

from __future__ import annotations

FACTOR = 3.0
LEAST_SECONDS = 0.008
PATIENCE_SECONDS = 0.1
LEAST_TOKENS = 64
"""A chunk is never cut below this: its fixed costs would exceed it."""
_SMOOTHING = 0.1
_MEASURABLE_TOKENS = 128
"""Prefills below this say little about the time of a token: fixed costs outweigh it."""
_FASTEST = 1e-8
"""Seconds of a token at least: 100 million tokens a second."""


class PrefillPace:
    """Learns from the steps that are over."""

    def __init__(self) -> None:
        self._decode_seconds = 0.0
        """Of a step that only decodes; 0 while unknown."""
        self._token_seconds = 0.0
        """Of one prefill token more; 0 while unknown."""

    def observe(self, decoding: int, prefill_tokens: int, seconds: float) -> None:
        """A step of so many decode rows and prefill tokens took so long."""
        if seconds <= 0:
            return
        if not prefill_tokens:
            self._decode_seconds = _mean(self._decode_seconds, seconds)
        elif prefill_tokens >= _MEASURABLE_TOKENS:
            rest = seconds - self._decode_seconds if decoding else seconds
            if rest > 0:  # else noise: this step was no longer than one that only decodes
                self._token_seconds = _mean(self._token_seconds, rest / prefill_tokens)

    def most_tokens(self, decoding: int, waiting: int) -> int | None:
        """Prefill tokens for a step that decodes so many rows, at least one, while so many
        sequences have computed no token yet; ``None`` while nothing is known."""
        if not (self._token_seconds and self._decode_seconds):
            return None
        fair = max(LEAST_SECONDS, FACTOR * self._decode_seconds)
        seconds = max(fair, min(PATIENCE_SECONDS, fair * (1 + waiting / decoding)))
        return max(LEAST_TOKENS, int(seconds / max(self._token_seconds, _FASTEST)))


def _mean(old: float, new: float) -> float:
    return old + _SMOOTHING * (new - old) if old else new
