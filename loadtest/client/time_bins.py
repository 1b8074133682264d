"""A run over its time, and its latencies by their share: what the plots of a report are drawn of.

Both are short whatever the number of requests, so that every result holds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.loadtest.client.load import Outcome
from penstock.loadtest.client.results import Values, latencies, origin
from penstock.loadtest.options import Since

MOST_BINS = 120
WIDTHS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)
"""Seconds."""
SHARES = (*range(0, 90, 5), *range(90, 100), 99.5, 99.9, 100)
"""Percentiles of a curve: close together where servers differ."""


def bin_width(duration: float) -> float:
    """Seconds of a bin: a round number, so that there are at most ``MOST_BINS``."""
    fitting = (width for width in WIDTHS if duration / width <= MOST_BINS)
    return float(next(fitting, WIDTHS[-1]))


def timeline(outcomes: Sequence[Outcome], duration: float, since: Since) -> dict[str, Any]:
    """For each bin of the run's clock: how many requests were to be sent, ended and failed, how
    many were open on average, output tokens a second, and TTFT by the time of the first token
    (milliseconds; ``None``: none came)."""
    width = bin_width(duration)
    count = int(duration / width) + 1
    done = [one for one in outcomes if one.failure is None]
    tokens = np.zeros(count)
    for one in done:
        stamps = np.asarray(one.stamps if one.stamps else [one.last])
        np.add.at(tokens, _places(stamps, width, count), one.output_len / len(stamps))
    firsts = _places(np.asarray([one.first for one in done]), width, count)
    ttft = np.asarray([one.first - origin(one, since) for one in done]) * 1e3
    found = [ttft[firsts == number] for number in range(count)]
    return {
        "bin_s": width,
        "arrived": _counts([one.scheduled for one in outcomes], width, count),
        "completed": _counts([one.ended for one in done], width, count),
        "failed": _counts([one.ended for one in outcomes if one.failure], width, count),
        "open": [round(value, 3) for value in _open(outcomes, width, count)],
        "output_tokens_per_s": [round(float(value) / width, 3) for value in tokens],
        "median_ttft_ms": [_percentile(values, 50) for values in found],
        "p99_ttft_ms": [_percentile(values, 99) for values in found],
    }


def _places(times: Values, width: float, count: int) -> Any:
    """The bin of each time; a closed loop's first arrivals are at 0 or a moment before."""
    return np.clip(times / width, 0, count - 1).astype(np.int64)


def _counts(times: Sequence[float], width: float, count: int) -> list[int]:
    places = _places(np.asarray(times, dtype=np.float64), width, count)
    found: list[int] = np.bincount(places, minlength=count).tolist()
    return found


def _open(outcomes: Sequence[Outcome], width: float, count: int) -> list[float]:
    """Requests that were open, on average over each bin."""
    edges = np.arange(count + 1) * width
    total = np.zeros(count)
    for one in outcomes:
        shared = np.minimum(one.ended, edges[1:]) - np.maximum(one.started, edges[:-1])
        total += np.maximum(shared, 0.0)
    return [float(value) for value in total / width]


def _percentile(values: Values, share: float) -> float | None:
    return round(float(np.percentile(values, share)), 3) if values.size else None


def quantiles(outcomes: Sequence[Outcome], since: Since) -> dict[str, Any]:
    """Milliseconds below which the share of requests stays that ``shares`` (percent) names."""
    measured = latencies([one for one in outcomes if one.failure is None], since)
    curves = {
        name: [round(float(value), 3) for value in np.percentile(values, SHARES)]
        for name, values in measured.items()
        if values.size
    }
    return {"shares": list(SHARES), **curves}
