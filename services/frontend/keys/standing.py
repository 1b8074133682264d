"""Where a key stands with its limits, and how the clients of each API are told."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Literal

import msgspec

from penstock.protocol.keys.record import KeyLimits
from penstock.services.frontend.errors import ApiError, retry_after
from penstock.services.frontend.keys.known_key import KnownKey

Limit = Literal["requests", "tokens", "day", "concurrent"]
REFUSALS: tuple[Limit, ...] = ("requests", "tokens", "day", "concurrent")
"""In the order in which they are looked at."""
CONCURRENT_RETRY_S = 1.0


def amounts(limits: KeyLimits) -> dict[Limit, int | None]:
    """Each limit by its name, in that order; ``None``: there is none."""
    return {
        "requests": limits.requests_per_minute,
        "tokens": limits.tokens_per_minute,
        "day": limits.tokens_per_day,
        "concurrent": limits.concurrent,
    }


class Level(msgspec.Struct, frozen=True):
    """One limit a minute."""

    limit: int
    remaining: int
    reset_s: float
    """Seconds until nothing of it is used."""


class Standing(msgspec.Struct, frozen=True):
    """What is left of the limits that a key has; ``None``: it has no such limit."""

    requests: Level | None = None
    tokens: Level | None = None

    def headers(self, now: datetime, *, anthropic: bool) -> dict[str, str]:
        """OpenAI's names, and Anthropic's beside them."""
        found: dict[str, str] = {}
        for name, level in (("requests", self.requests), ("tokens", self.tokens)):
            if level is None:
                continue
            found[f"x-ratelimit-limit-{name}"] = str(level.limit)
            found[f"x-ratelimit-remaining-{name}"] = str(level.remaining)
            found[f"x-ratelimit-reset-{name}"] = duration(level.reset_s)
            if anthropic:
                when = now + timedelta(seconds=math.ceil(level.reset_s))
                found[f"anthropic-ratelimit-{name}-limit"] = str(level.limit)
                found[f"anthropic-ratelimit-{name}-remaining"] = str(level.remaining)
                found[f"anthropic-ratelimit-{name}-reset"] = f"{when:%Y-%m-%dT%H:%M:%SZ}"
        return found


class Refusal(msgspec.Struct, frozen=True):
    """A limit that lets a request not in."""

    limit: Limit
    amount: int
    """What the limit is."""
    used: int
    retry_s: float
    whole: int = 0
    """The limit of which this is one frontend's part; 0: it is no part."""


class LimitReached(ApiError):
    """A 429, with the standing of the key."""

    def __init__(self, message: str, standing: Standing, headers: dict[str, str]) -> None:
        super().__init__(
            429, message, kind="rate_limit_error", code="rate_limit_exceeded", headers=headers
        )
        self.standing = standing


def limit_reached(key: KnownKey, refusal: Refusal, tokens: int, standing: Standing) -> LimitReached:
    """The error for a request that may take so many tokens."""
    used, amount = f"{refusal.used:,}", f"{refusal.amount:,}"
    part = f" (this frontend's part of {refusal.whole:,})" if refusal.whole else ""
    said = {
        "requests": f"has begun {used} requests in the last minute and may begin {amount}{part}",
        "tokens": f"has used {used} of its {amount} tokens a minute{part}, and this request may "
        f"take {tokens:,} (prompt and max_tokens)",
        "day": f"has used {used} of its {amount} tokens a day (UTC){part}, and this request may "
        f"take {tokens:,} (prompt and max_tokens)",
        "concurrent": f"has {used} requests open, and may have {amount} at the same time{part}",
    }[refusal.limit]
    wait = max(0.001, refusal.retry_s)
    message = f"The key {key.name} {said}; try again in {duration(wait)}"
    headers = {**retry_after(wait), "retry-after-ms": str(math.ceil(1000 * wait))}
    return LimitReached(message, standing, headers)


def never_fits(key: KnownKey, tokens: int, limit: int, period: str) -> LimitReached:
    """The error for a request that is larger than a whole limit."""
    message = (
        f"The request may take {tokens:,} tokens (prompt and max_tokens), and the key {key.name} "
        f"has {limit:,} a {period}; send a shorter prompt or a smaller max_tokens"
    )
    return LimitReached(message, Standing(), {"x-should-retry": "false"})


def duration(seconds: float) -> str:
    """As OpenAI writes it: ``120ms``, ``1.5s``, ``6m0s``, ``1h0m0s``."""
    if seconds < 1:
        return f"{math.ceil(1000 * seconds)}ms"
    if seconds < 60:
        return f"{math.ceil(10 * seconds) / 10:g}s"
    whole = math.ceil(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s"


def utc_now() -> datetime:
    return datetime.now(UTC)
