"""Where a new request goes: the least loaded tokenizer, the least loaded engine.

A resent request goes where it went before, as long as that process lives: the router remembers
its routes for a minute. Another attempt of it is placed anew: its last place turned it away, or
lost it. A request whose place is lost before it has answered waits for the next one, like a
continuation: only what comes while nobody is ready is turned away. The router never decodes a
prompt.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.protocol.codec import Message
from penstock.protocol.messages.membership import Phase
from penstock.protocol.messages.requests import (
    Cancel,
    Enqueue,
    Rejected,
    Submit,
    first_attempt,
)
from penstock.protocol.ownership.tombstones import Tombstones
from penstock.services.router.roster import Member, Roster

ROUTE_SECONDS = 60.0
MAX_ROUTES = 1_000_000
YOUNG_SECONDS = 1.2
"""A router younger than two beats may not know everybody yet: it holds requests."""
MAX_HELD = 10_000
HOLD_SECONDS = 30.0
"""What has lost its place waits so long for a tokenizer or an engine to come (back) …"""
LOADING_HOLD_SECONDS = 600.0
"""… and so long while there is one that starts or loads its weights."""
RETRY_AFTER_SECONDS = 1.0

Request = Submit | Enqueue


class Dispatcher:
    """Routes requests and their cancellations."""

    def __init__(self, roster: Roster, send: Callable[[str, Message], bool], now: float) -> None:
        self.held: dict[tuple[int, str], tuple[Request, float]] = {}
        self.routed = 0
        self._roster = roster
        self._send = send
        self._began = now
        self._routes: dict[tuple[int, str], tuple[int, int, float]] = {}
        """(id, service) → (incarnation, attempt, when), oldest first."""
        self._tombstones = Tombstones()

    def request(self, message: Request, now: float) -> None:
        """Send a request on, hold it, or turn it away."""
        service = _destination(message)
        if self._tombstones.covers(message.id, message.attempt):
            return
        member = self._choose(message.id, service, message.attempt)
        if now - self._began < YOUNG_SECONDS:
            member = None
        if member is None:
            self._wait_or_reject(message, service, now)
            return
        self.held.pop((message.id, service), None)
        self._remember((message.id, service), member.incarnation, message.attempt, now)
        if self._send(member.address, message):
            member.routed += 1
            self.routed += 1
        else:
            self._reject(message, f"the {service} with the least load does not keep up")

    def _choose(self, request_id: int, service: str, attempt: int) -> Member | None:
        incarnation, its_attempt, _ = self._routes.get((request_id, service), (0, -1, 0.0))
        if its_attempt == attempt:
            member = self._roster.members.get(incarnation)
            if member is not None and member.phase == Phase.READY:
                return member
        ready = self._roster.ready(service)
        return min(ready, key=lambda m: m.load + m.routed, default=None)

    def _remember(self, key: tuple[int, str], incarnation: int, attempt: int, now: float) -> None:
        self._routes.pop(key, None)
        self._routes[key] = (incarnation, attempt, now)
        if len(self._routes) > MAX_ROUTES:
            del self._routes[next(iter(self._routes))]

    def _wait_or_reject(self, message: Request, service: str, now: float) -> None:
        """New requests are told at once that nobody is ready; those that had a place, which is
        lost, wait for another one. What continues elsewhere had one, known here or not."""
        key = (message.id, service)
        route = self._routes.get(key)
        if route is not None:  # still known when the hold is over, however long that is
            self._remember(key, route[0], route[1], now)
        is_new = message.attempt == first_attempt(1) and route is None
        young = now - self._began < YOUNG_SECONDS
        if (is_new and not young) or (key not in self.held and len(self.held) >= MAX_HELD):
            self._reject(message, self._explain(service))
        elif key not in self.held or self.held[key][0].attempt < message.attempt:
            self.held[key] = (message, now)
        elif self.held[key][0].attempt == message.attempt:
            self.held[key] = (message, self.held[key][1])  # the same, with the time left now

    def _is_coming(self, service: str) -> bool:
        """Whether a process of the service starts or loads."""
        coming = (Phase.STARTING, Phase.LOADING)
        return any(
            m.service == service and m.phase in coming for m in self._roster.members.values()
        )

    def _explain(self, service: str) -> str:
        found = [m for m in self._roster.members.values() if m.service == service]
        name = "engine" if service == "scheduler" else service
        if not found:
            return f"no {name} is running"
        states = ", ".join(f"{m.phase} {m.note}".strip() for m in found)
        return f"no {name} is ready ({states})"

    def _reject(self, message: Request, reason: str) -> None:
        self.held.pop((message.id, _destination(message)), None)
        self._send(
            message.reply_to,
            Rejected(
                message.id,
                message.attempt,
                503,
                "overloaded_error",
                f"{reason}; try again",
                retry_after=RETRY_AFTER_SECONDS,
            ),
        )

    def cancel(self, sender: int, message: Cancel, now: float) -> None:
        """Send a cancellation where its request went, or to all who might get it yet.

        Raises ``ValueError`` when the columns differ in length.
        """
        if not len(message.ids) == len(message.attempts) == len(message.choices):
            raise ValueError("the columns of a Cancel differ in length")
        member = self._roster.members.get(sender)
        service = "tokenizer" if member is None or member.service == "frontend" else "scheduler"
        for request_id, attempt, choice in zip(
            message.ids, message.attempts, message.choices, strict=True
        ):
            if choice < 0:
                self._tombstones.bury(request_id, attempt, now)
                held = self.held.get((request_id, service))
                if held is not None and held[0].attempt <= attempt:
                    del self.held[request_id, service]
            one = Cancel([request_id], [attempt], [choice])
            route = self._routes.get((request_id, service))
            target = self._roster.members.get(route[0]) if route else None
            targets = [target] if target else self._roster.ready(service)
            for each in targets:
                self._send(each.address, one)

    def tick(self, now: float) -> None:
        """Try the held requests again; forget old routes."""
        self._tombstones.expire(now)
        for key, (message, since) in list(self.held.items()):
            self.request(message, now)
            limit = LOADING_HOLD_SECONDS if self._is_coming(key[1]) else HOLD_SECONDS
            if key in self.held and now - since > limit:
                self._reject(message, self._explain(key[1]))
        while self._routes:
            oldest = next(iter(self._routes))
            if now - self._routes[oldest][2] < ROUTE_SECONDS:
                break
            del self._routes[oldest]


def _destination(message: Request) -> str:
    return "tokenizer" if isinstance(message, Submit) else "scheduler"
