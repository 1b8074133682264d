"""How much prefill a step may carry while others decode: bounded by time, not by tokens alone.

Every stream waits for the whole step. A step full of prefill lasts many times as long as one that
only decodes, and each waiting reader sees a pause. So while sequences decode, a step takes only as
much prefill as is predicted to fit into ``STEP_SECONDS`` beside its decode rows. Where that is less
than a chunk worth computing, because the model is large or the device slow, it takes
``chunk_tokens``, but no more than ``prefill_factor`` times the time of its decode rows while one
prompt waits, ``prefill_factor_each`` more for each beside it, ``most_prefill_factor`` at most: the
worker says what these are for its device. Small chunks beside few rows are cheap, as the weights
are read anyway, and a load that never ends is computed in larger ones, with steps between them that
only decode. Where many sequences wait beside those that decode, as after a burst, the prefill may
take longer by their share, up to ``PATIENCE_SECONDS``: cut small, the burst would pay a decode step
of few rows for every chunk, and all would be served later. The planner asks only while somebody
reads along: an answer that is sent whole knows no pauses. A prefill engine does not shorten its
steps while another engine is there to go on with its sequences.

The prediction is a line through the latest steps: seconds of a step that only decodes, and of one
token of prefill more. Where these steps are too alike to tell the two apart, both change by the
factor by which the prediction is off: contexts grow, and both with them.
"""

from __future__ import annotations

from penstock.protocol.wire.messages.engine import StepShape

STEP_SECONDS = 0.0085
"""Half of the 17 ms that a screen shows a picture for; what it costs is in docs/benchmarks.md."""
PATIENCE_SECONDS = 0.1
LEAST_TOKENS = 64
"""A chunk is never cut below this: its fixed costs would exceed it."""
_SMOOTHING = 0.05
_LEAST_SPREAD = 0.2
"""Standard deviation of the steps' prefill, as a share of its mean, from which a slope is told."""
_LEAST_SHARE = 0.01
"""Decoding takes at least this share of the mean step."""
_MEASURABLE_TOKENS = LEAST_TOKENS
"""Prefills below this say little about the time of a token: fixed costs outweigh it. Not more than
the least chunk, or a wrong estimate could keep chunks too small to be corrected."""
_MOST_GROWTH = 1.5
"""Decoding beside prefill counts as at most this many times slower than its rows were when last
seen alone; more rows count in proportion."""
_MOST_OFF = 2.0
"""A step counts as at most this many times its prediction: a pause of the machine is no trend."""
_FASTEST = 1e-8
"""Seconds of a token at least: 100 million tokens a second."""


class PrefillBudget:
    """Learns from the steps that are over."""

    def __init__(self, shape: StepShape) -> None:
        self._shape = shape
        self._decode_seconds = 0.0
        """Seconds of a step that only decodes; 0 while unknown."""
        self._token_seconds = 0.0
        """Seconds that one prefill token more takes; 0 while unknown."""
        self._alone: tuple[float, int] | None = None
        """Seconds and rows of the latest step that only decoded."""
        self._steps = _Line()
        self.is_unbounded = False
        """What decodes is about to go on in another engine: no step is shortened for it."""

    def observe(self, decoding: int, prefill_tokens: int, seconds: float) -> None:
        """A step of so many decode rows and prefill tokens took so long."""
        if seconds <= 0 or 0 < prefill_tokens < _MEASURABLE_TOKENS:
            return
        if not decoding:
            # Fixed costs included: the least is nearest to the truth.
            cost = seconds / prefill_tokens
            self._token_seconds = min(self._token_seconds or cost, cost)
            return
        expected = self._decode_seconds + prefill_tokens * self._token_seconds
        if self._decode_seconds and self._token_seconds:
            seconds = min(seconds, _MOST_OFF * expected)
        self._steps.add(prefill_tokens, seconds)
        slope = self._steps.slope()
        mean_tokens, mean_seconds = self._steps.mean()
        if not prefill_tokens:
            self._alone = seconds, decoding
        if slope > 0:
            self._token_seconds = slope
            least = mean_seconds * _LEAST_SHARE
            self._decode_seconds = max(least, mean_seconds - mean_tokens * slope)
        elif not prefill_tokens:
            self._decode_seconds = _mean(self._decode_seconds, seconds)
        elif self._decode_seconds and self._token_seconds:
            factor = 1 + _SMOOTHING * (seconds / expected - 1)
            self._decode_seconds *= factor
            self._token_seconds *= factor
        elif self._decode_seconds:
            rest = seconds - self._decode_seconds
            self._token_seconds = max(rest, seconds * _LEAST_SHARE) / prefill_tokens
        if self._alone is not None:
            known, rows = self._alone
            most = _MOST_GROWTH * known * max(1.0, decoding / rows)
            self._decode_seconds = min(self._decode_seconds, most)

    def prefill_seconds(self, tokens: int) -> float:
        """Seconds that so many tokens of prefill take; 0 while nothing is known."""
        return tokens * self._token_seconds

    def most_tokens(self, decoding: int, waiting: int) -> int | None:
        """Prefill tokens for a step that decodes so many rows, at least one, while so many
        sequences have no token yet; ``None``: as many as a step holds, since nothing is known or
        nobody is to be spared."""
        if self.is_unbounded or not (self._token_seconds and self._decode_seconds):
            return None
        decode, token = self._decode_seconds, max(self._token_seconds, _FASTEST)
        shape = self._shape
        factor = shape.prefill_factor + shape.prefill_factor_each * max(0, waiting - 1)
        factor = min(shape.most_prefill_factor, factor)
        fair = max(STEP_SECONDS - decode, min(factor * decode, shape.chunk_tokens * token))
        seconds = max(fair, min(PATIENCE_SECONDS, fair * (1 + waiting / decoding)))
        return max(LEAST_TOKENS, int(seconds / token))


def _mean(old: float, new: float) -> float:
    return old + _SMOOTHING * (new - old) if old else new


class _Line:
    """Seconds = a + b * tokens through the latest steps, each of which counts less than the next
    (exponentially weighted least squares)."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        keep = 1 - _SMOOTHING
        self._weight = self._weight * keep + 1
        self._x = self._x * keep + tokens
        self._y = self._y * keep + seconds
        self._xx = self._xx * keep + tokens * tokens
        self._xy = self._xy * keep + tokens * seconds

    def mean(self) -> tuple[float, float]:
        return self._x / self._weight, self._y / self._weight

    def slope(self) -> float:
        """b; 0 where the steps were too alike to tell."""
        x, y = self.mean()
        spread = self._xx / self._weight - x * x
        if spread <= (_LEAST_SPREAD * x) ** 2:
            return 0.0
        return (self._xy / self._weight - x * y) / spread
