"""What the user of a server that goes down reads: how many requests run, and how long it waits."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from typing import Protocol

from penstock.protocol.process.plain_structlog import Logger
from penstock.protocol.wire.messages.membership import Peer, Phase

REPEAT_SECONDS = 5.0


class OwnMembers(Protocol):
    def own(self) -> Mapping[int, Peer]: ...


class Draining:
    """Tells of one drain, as far as the frontends say what they have open."""

    def __init__(self, members: OwnMembers, log: Logger, timeout_s: float) -> None:
        self._members = members
        self._log = log
        self._timeout = timeout_s
        self._began = time.monotonic()
        self._told_at = 0.0
        """Monotonic time of the last line with a number of requests; 0 before the first."""

    def begin(self, number: int, *, was_ready: bool) -> None:
        """``number``: of the signal that asked for it."""
        if not was_ready:
            self._log.info(f"{signal.Signals(number).name}: the server ends before it was ready")
            return
        again = "Ctrl-C" if number == signal.SIGINT else "signal"
        self._log.info(
            f"{signal.Signals(number).name}: draining; running requests have {self._timeout:g} s "
            f"to finish (--drain-timeout-s), a second {again} ends at once"
        )

    def look(self) -> None:
        """Say how many requests run: once as soon as it is known, then every few seconds."""
        now = time.monotonic()
        if self._told_at and now - self._told_at < REPEAT_SECONDS:
            return
        frontends = [one for one in self._members.own().values() if one.service == "frontend"]
        if not frontends or any(one.phase != Phase.DRAINING for one in frontends):
            return  # not heard of yet, or gone
        self._told_at = now
        running = sum(one.load for one in frontends)
        left = max(0.0, self._timeout - (now - self._began))
        if running:
            noun = "request runs" if running == 1 else "requests run"
            self._log.info(f"{running} {noun}; {left:.0f} s left", requests=running)
        elif now - self._began < REPEAT_SECONDS:
            self._log.info("no request runs", requests=0)

    def over(self) -> None:
        self._log.info(f"stopped after {time.monotonic() - self._began:.1f} s")
