"""Which models are awake: decided by their use, with the time given and without processes.

At most ``resident`` models are awake. One that is wanted takes the place of the one that was used
least recently among those that nobody uses; while all are used, of the one that has been awake for
longest, but not before that had its ``min_awake_s``. So models that are wanted by turns share the
places by time, and none waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from penstock.protocol.wire.messages.membership import Demand, Sleep

AWAKE = "ready"
IDLE_SECONDS = 1.5
"""A model that nobody uses counts as idle after so long: what frontends have open is known by then,
since it travels in two beats."""
HELD_SECONDS = 2.0
"""What waited for a model has reached its engine so long after it was awake, if it can."""
WANTED, KEEP_ALIVE, ASKED = "wanted", "keep_alive", "asked"
"""Why a model falls asleep: another one is wanted, nobody used it, an administrator asked."""


class ModelUse:
    """What is known of the use of one model."""

    __slots__ = (
        "asked_at", "awake_since", "ended", "held", "name", "not_before", "open", "state",
        "used_at", "wanted_since",
    )  # fmt: skip

    def __init__(self, name: str, state: str, now: float) -> None:
        self.name = name
        self.state = state
        """``AWAKE``, or one of ``Sleep``."""
        self.awake_since = self.used_at = now
        self.wanted_since: float | None = None
        """Since when it is wanted while it is not awake."""
        self.asked_at: float | None = None
        """When an administrator asked to wake it."""
        self.not_before = 0.0
        """It is not woken before."""
        self.open = self.held = self.ended = 0
        """Requests that clients wait for; those of them that wait for an engine; all that ended."""

    def observe(self, demand: Demand, now: float) -> None:
        """``demand``: what all frontends and the router say of it."""
        ended = demand.ended != self.ended
        self.open, self.held, self.ended = demand.open, demand.held, demand.ended
        if self.open or self.held or ended:
            self.used_at = now
        wanted = self.held > 0 or self.asked_at is not None
        if self.state == AWAKE or not wanted:
            self.wanted_since = None
        elif self.wanted_since is None:
            self.wanted_since = now

    def is_idle(self, now: float) -> bool:
        return not self.open and not self.held and now - self.used_at >= IDLE_SECONDS


class Decision(NamedTuple):
    wake: list[str]
    sleep: list[tuple[str, str]]
    """Names, each with the reason."""


class Residency:
    """Decides for all models of a server. It is told what happens to them (``entered``)."""

    def __init__(
        self,
        awake: Iterable[str],
        asleep: Iterable[str],
        resident: int | None,
        keep_alive: Mapping[str, float | None],
        min_awake_s: float,
        now: float,
    ) -> None:
        """``resident``: how many models may be awake; ``None``: all. ``keep_alive``: seconds after
        its last use, after which a model falls asleep; ``None``: it stays awake."""
        self.models = {name: ModelUse(name, AWAKE, now) for name in awake}
        self.models |= {name: ModelUse(name, Sleep.ASLEEP, now) for name in asleep}
        self._resident = len(self.models) if resident is None else resident
        self._keep_alive = keep_alive
        self._min_awake = min_awake_s

    def entered(self, name: str, state: str, now: float, not_before: float = 0.0) -> None:
        """A model has come into a state. ``not_before``: it is not to be woken before."""
        model = self.models[name]
        model.state, model.not_before = state, not_before
        if state == AWAKE:
            model.awake_since = model.used_at = now
            model.asked_at = model.wanted_since = None

    def decide(self, now: float) -> Decision:
        """What is to be done now. Who asks tells by ``entered`` that it is under way."""
        models = list(self.models.values())
        waiting = [
            (one.wanted_since, one.name)
            for one in models
            if one.state == Sleep.ASLEEP and one.wanted_since is not None and now >= one.not_before
        ]
        wanted = [name for _, name in sorted(waiting)]
        free = self._resident - sum(one.state != Sleep.ASLEEP for one in models)
        wake = wanted[: max(0, free)]
        falling = sum(one.state == Sleep.FALLING for one in models)
        missing = max(0, len(wanted) - len(wake) - falling)
        leaving = [(name, WANTED) for name in self._victims(now)[:missing]]
        return Decision(wake, leaving + self._unused(now, {name for name, _ in leaving}))

    def _victims(self, now: float) -> list[str]:
        """Who may go, in the order in which they do."""
        awake = [one for one in self.models.values() if one.state == AWAKE]
        idle = [one for one in awake if one.is_idle(now)]
        idle.sort(key=lambda one: one.used_at)
        used = [
            one for one in awake if one not in idle and now - one.awake_since >= self._least(one)
        ]
        used.sort(key=lambda one: one.awake_since)
        return [one.name for one in (*idle, *used)]

    def _least(self, one: ModelUse) -> float:
        """Seconds that a model which is used stays awake: also where it may go at once, not before
        it has what it was woken for."""
        return max(self._min_awake, HELD_SECONDS) if one.held else self._min_awake

    def _unused(self, now: float, leaving: set[str]) -> list[tuple[str, str]]:
        """Who was not used for as long as it is kept alive."""
        found = []
        for one in self.models.values():
            kept = self._keep_alive.get(one.name)
            if one.name in leaving or one.state != AWAKE or kept is None or not one.is_idle(now):
                continue
            if now - one.used_at >= kept:
                found.append((one.name, KEEP_ALIVE))
        return found
