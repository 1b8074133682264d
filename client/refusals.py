"""Refusals of this process's own, with what ``requests_shed_total`` tells of them."""

from __future__ import annotations

from penstock.protocol.wire.messages.requests import Rejected

UNAVAILABLE = "unavailable"
SHUTTING_DOWN = "server_shutting_down"
"""``error.code`` of what this process refuses or ends because it ends itself."""


class Shed(Rejected, frozen=True, array_like=True, tag=24, gc=False):
    """A refusal because the server is too busy or a part of it is not there. It is told to sinks
    like one that came from another process, and never sent."""

    reason: str = UNAVAILABLE
    """As ``requests_shed_total`` has it."""


def shed_reason(rejected: Rejected) -> str:
    """Why there was no room; empty where that was not the cause."""
    if rejected.status not in (429, 503):
        return ""
    return rejected.reason if isinstance(rejected, Shed) else "pipeline"
