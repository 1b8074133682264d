"""One model of a server: its processes, and where it stands between its loading and its end."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

from penstock.protocol.config import Config
from penstock.protocol.wire.messages.administration import ModelState
from penstock.protocol.wire.messages.membership import Peer, Phase, Sleep
from penstock.services.launcher.processes import Child

LOADING, READY, DRAINING, FAILED = "loading", "ready", "draining", "failed"
END_ORDER = ("tokenizer", "scheduler", "worker")
WITHDRAWAL_SECONDS = 2.0
"""By then every frontend has heard that a model takes no more requests, and what they have open
for it is known: both travel in beats, twice a second."""
STOP_SECONDS = 5.0
"""A process may take this much longer than the drain before it is killed."""
MAX_REASON = 2000
"""Characters of the reason why a model could not be loaded."""
MAX_NOTED = 4
"""Processes that a note tells of."""


class RunningModel:
    """What the launcher knows of a model that it runs, or has failed to load."""

    def __init__(self, config: Config, children: Sequence[Child], state: str, now: float) -> None:
        self.config = config
        self.children = list(children)
        self.state = state
        self.since = now
        """When it came into this state."""
        self.reason = ""
        self.end: ModelEnd | None = None
        """Its processes are being ended."""

    @property
    def names(self) -> list[str]:
        """The first one is what processes know it by."""
        return self.config.model.names()

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def engines(self) -> list[Child]:
        """Its schedulers and workers."""
        return [child for child in self.children if child.service != "tokenizer"]

    def enter(self, state: str, now: float) -> None:
        self.state, self.since = state, now

    def fail(self, reason: str, now: float) -> None:
        """It cannot be loaded: all that was started for it is to be killed."""
        self.enter(FAILED, now)
        self.reason = reason[:MAX_REASON]
        self.end = ModelEnd(self.children, now, drain_s=None)

    def unload(self, now: float, drain_s: float) -> None:
        """It takes no more requests; what runs has ``drain_s`` seconds to finish."""
        self.enter(DRAINING, now)
        self.end = ModelEnd(self.children, now, drain_s=drain_s)

    def lacking(self, own: Mapping[int, Peer]) -> list[str]:
        """What its processes are doing that are not ready. ``own``: members by pid."""
        found = []
        for child in self.children:
            peer = own.get(child.pid)
            if peer is None:
                found.append(f"{child.label} {'is silent' if child.alive else 'has ended'}")
            elif peer.phase != Phase.READY:
                found.append(f"{child.label}: {peer.phase} {peer.note}".strip())
        return found

    def told(self, own: Mapping[int, Peer], now: float) -> ModelState:
        """As administrators are told of it."""
        note = ""
        if self.end is not None or self.state in (LOADING, Sleep.WAKING):
            note = ", ".join(self.lacking(own)[:MAX_NOTED])
        return ModelState(
            self.name,
            self.names[1:],
            self.config.model.model,
            self.state,
            round(now - self.since, 3),
            self.reason,
            note,
        )


class ModelEnd:
    """Ends the processes of a model: those of a service once those before it are gone."""

    def __init__(
        self,
        children: Sequence[Child],
        now: float,
        *,
        drain_s: float | None,
        withdrawal_s: float = WITHDRAWAL_SECONDS,
    ) -> None:
        """``drain_s``: the most time for running requests; ``None``: all is killed at once.
        ``withdrawal_s``: as ``WITHDRAWAL_SECONDS``; 0 where what comes late waits for the next
        engine."""
        self._children = children
        self._drain = drain_s
        self._withdrawal = withdrawal_s
        self._began = now
        self._waits = drain_s is not None
        """For requests that run."""
        self._services = list(END_ORDER)
        self._kill_at: float | None = None
        """Those of the first of ``_services`` were told to end, and have time until then."""

    def step(self, now: float, open_requests: int) -> bool:
        """Go on with it; call it a few times a second. ``open_requests``: that clients wait for.
        Returns whether all have ended."""
        if self._drain is None:
            for child in self._children:
                child.restart_at = None
                if not child.killed:
                    child.kill()
            return not any(child.alive for child in self._children)
        left = self._drain - (now - self._began)
        if self._waits:
            if now - self._began < self._withdrawal or (left > 0 and open_requests):
                return False
            self._waits = False
        while self._services:
            service = self._services[0]
            mine = [child for child in self._children if child.service == service]
            for child in mine:
                child.restart_at = None
            if not any(child.alive for child in mine):
                self._services.pop(0)
                self._kill_at = None
                continue
            if self._kill_at is None:
                self._kill_at = now + STOP_SECONDS + max(0.0, left)
                for child in mine:
                    child.signal(signal.SIGTERM)
            elif now > self._kill_at:
                for child in mine:
                    child.kill()
            return False
        return True
