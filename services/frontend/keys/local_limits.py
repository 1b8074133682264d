"""The limits of keys as one process counts them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import msgspec

from penstock.protocol.keys.record import KeyLimits
from penstock.services.frontend.keys.known_key import KnownKey
from penstock.services.frontend.keys.sliding_window import WINDOW_S, SlidingWindow
from penstock.services.frontend.keys.standing import (
    CONCURRENT_RETRY_S,
    Level,
    Refusal,
    Standing,
)

DAY_S = 86_400
MAX_USES = 65_536
"""Keys that are remembered before those are forgotten that use nothing."""


class Charge(msgspec.Struct, frozen=True):
    """What a request was charged with when it was let in."""

    limits: KeyLimits
    """By which it was."""
    tokens: int
    slot: int
    owed: int
    """Tokens of the minute's that were more than were free."""
    day: int


class _Use:
    """What one key uses."""

    __slots__ = ("day", "day_tokens", "elsewhere", "open", "paid_a_day", "requests", "tokens")

    def __init__(self) -> None:
        self.requests = SlidingWindow()
        self.tokens = SlidingWindow()
        self.day = 0
        self.day_tokens = 0
        self.paid_a_day = 0
        """Since a charge was larger than this limit of a day, each day pays for so much of what was
        used; 0: a day begins with nothing."""
        self.open = 0
        self.elsewhere = (0, 0, 0.0)
        """Requests and tokens that others had used of the last minute, and when that was heard."""

    def used_elsewhere(self, now: float) -> tuple[int, int]:
        """What counts of that still, about: requests and tokens."""
        requests, tokens, heard = self.elsewhere
        left = max(0.0, 1.0 - (now - heard) / WINDOW_S)
        return int(requests * left), int(tokens * left)

    def counts(self, now: float, day: int) -> bool:
        """Whether a limit could be reached because of it."""
        return bool(
            self.open or self.of_day(day) or self.requests.used(now, 1) or self.tokens.used(now, 1)
        )

    def of_day(self, day: int) -> int:
        if day != self.day:
            paid = self.paid_a_day * max(0, day - self.day)
            left = max(0, self.day_tokens - paid) if paid else 0
            self.day, self.day_tokens = day, left
            self.paid_a_day = self.paid_a_day if left else 0
        return self.day_tokens


class LocalLimits:
    """Windows and counts by key."""

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """wall: seconds since the epoch, for the day."""
        self._now = now
        self._wall = wall
        self._uses: dict[str, _Use] = {}

    def refusal(self, key: KnownKey, limits: KeyLimits, tokens: int) -> Refusal | None:
        """The limit that a request of so many tokens does not fit into, if there is one. One that
        is larger than a whole limit, of a part of several, fits where nothing of it is used."""
        use, now = self._of(key), self._now()
        most = limits.requests_per_minute
        if most is not None and (wait := use.requests.free_in(now, 1, most)):
            return Refusal("requests", most, use.requests.used(now, most), wait)
        most = limits.tokens_per_minute
        if most is not None and (wait := use.tokens.free_in(now, min(tokens, most), most)):
            return Refusal("tokens", most, use.tokens.used(now, most), wait)
        if (most := limits.tokens_per_day) is not None:
            wall = self._wall()
            used = use.of_day(int(wall / DAY_S))
            if (lacking := used + min(tokens, most) - most) > 0:
                days = math.ceil(lacking / use.paid_a_day) if use.paid_a_day else 1
                return Refusal("day", most, used, days * DAY_S - wall % DAY_S)
        if (most := limits.concurrent) is not None and use.open >= most:
            return Refusal("concurrent", most, use.open, CONCURRENT_RETRY_S)
        return None

    def known_to_be_full(self, key: KnownKey, limits: KeyLimits, tokens: int) -> Refusal | None:
        """The same, with what ``heard`` has said of others: of the whole limits."""
        use, now = self._of(key), self._now()
        requests, others = use.used_elsewhere(now)
        most = limits.requests_per_minute
        if most is not None and (wait := use.requests.free_in(now, 1 + requests, most)):
            return Refusal("requests", most, use.requests.used(now, most) + requests, wait)
        most = limits.tokens_per_minute
        if most is not None and (wait := use.tokens.free_in(now, tokens + others, most)):
            return Refusal("tokens", most, use.tokens.used(now, most) + others, wait)
        return None

    def heard(self, key: KnownKey, standing: Standing) -> None:
        """What all processes together have left."""
        use, now = self._of(key), self._now()

        def others(level: Level | None, window: SlidingWindow) -> int:
            if level is None:
                return 0
            used = level.limit - level.remaining
            return max(0, used - window.used(now, level.limit))

        use.elsewhere = (
            others(standing.requests, use.requests),
            others(standing.tokens, use.tokens),
            now,
        )

    def charge(self, key: KnownKey, limits: KeyLimits, tokens: int) -> Charge:
        """A request is let in by these limits."""
        use, now = self._of(key), self._now()
        use.requests.charge(now, 1)
        if (most := limits.tokens_per_minute) is None:
            slot, owed = use.tokens.charge(now, tokens), 0
        else:
            slot, owed = use.tokens.charge_owing(now, tokens, most)
        day = int(self._wall() / DAY_S)
        use.of_day(day)
        use.day_tokens += tokens
        if limits.tokens_per_day is not None and tokens > limits.tokens_per_day:
            use.paid_a_day = limits.tokens_per_day
        use.open += 1
        return Charge(limits, tokens, slot, owed, day)

    def settle(self, key: KnownKey, charge: Charge, used: int, *, took_place: bool) -> None:
        """It has ended, with so many tokens. took_place: else it is not counted at all."""
        use, now = self._of(key), self._now()
        use.open -= 1
        more, most = used - charge.tokens, charge.limits.tokens_per_minute
        if more < 0:
            use.tokens.correct(now, charge.slot, -more, charge.owed, most or 1)
        elif more and most is not None:
            use.tokens.charge_owing(now, more, most)
        if use.day == charge.day:
            use.day_tokens += more
        if not took_place:
            use.requests.correct(now, charge.slot, 1)

    def standing(self, key: KnownKey, limits: KeyLimits) -> Standing:
        use, now = self._of(key), self._now()
        levels: list[Level | None] = []
        for window, most in (
            (use.requests, limits.requests_per_minute),
            (use.tokens, limits.tokens_per_minute),
        ):
            if most is None:
                levels.append(None)
            else:
                left = max(0, most - window.used(now, most))
                levels.append(Level(most, left, window.empty_in(now, most)))
        return Standing(*levels)

    def _of(self, key: KnownKey) -> _Use:
        if (use := self._uses.get(key.tenant)) is None:
            if len(self._uses) >= MAX_USES:
                now, day = self._now(), int(self._wall() / DAY_S)
                kept = {name: one for name, one in self._uses.items() if one.counts(now, day)}
                self._uses = kept
            use = self._uses[key.tenant] = _Use()
        return use
