"""A log line every few seconds on what the engine does, while it does anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.services.scheduler.stats import Counters, SchedulerStats

RATE_SECONDS = 5.0


class RateLine:
    """Rates over the last seconds. Nothing is said of an idle engine, nor of a burst that is over
    sooner: each of its requests has a line of its own."""

    def __init__(self, say: Callable[..., Any]) -> None:
        """``say``: called with the event and its fields."""
        self._say = say
        self._since: float | None = None
        self._before = Counters()
        """As of ``_since``."""
        self._seen = (0, 0)

    def look(self, stats: SchedulerStats, now: float) -> None:
        """Call it a few times a second; ``now`` in monotonic seconds."""
        counters = stats.counters
        seen = (counters.prompt_tokens, counters.generated_tokens)
        busy = stats.running or stats.waiting or seen != self._seen
        self._seen = seen
        if not busy or self._since is None:
            self._begin(counters, now)
        elif now - self._since >= RATE_SECONDS:
            self._say("load", **self._figures(stats, now - self._since))
            self._begin(counters, now)

    def _begin(self, counters: Counters, now: float) -> None:
        self._since = now
        before = self._before
        before.prompt_tokens = counters.prompt_tokens
        before.generated_tokens = counters.generated_tokens
        before.prefix_query_tokens = counters.prefix_query_tokens
        before.prefix_hit_tokens = counters.prefix_hit_tokens

    def _figures(self, stats: SchedulerStats, seconds: float) -> dict[str, float]:
        counters, before = stats.counters, self._before
        found = {
            "running": stats.running,
            "waiting": stats.waiting,
            "in_tokens_per_s": (counters.prompt_tokens - before.prompt_tokens) / seconds,
            "out_tokens_per_s": (counters.generated_tokens - before.generated_tokens) / seconds,
            "kv_used_percent": 100 * stats.blocks_used / max(1, stats.blocks_total),
        }
        if asked := counters.prefix_query_tokens - before.prefix_query_tokens:
            hits = counters.prefix_hit_tokens - before.prefix_hit_tokens
            found["prefix_hit_percent"] = 100 * hits / asked
        return {name: round(value, 1) for name, value in found.items()}
