"""Requests on their way to a tokenizer or an engine: sent on, held until one is ready, cancelled.

``Placement`` chooses who gets a request. What comes while nobody is ready waits: whoever was lost
is started again. Only where nobody was ever ready a new request is turned away at once. The router
never decodes a prompt.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.protocol.ownership.tombstones import Tombstones
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.membership import Phase
from penstock.protocol.wire.messages.requests import (
    Cancel,
    Enqueue,
    Rejected,
    Submit,
    first_attempt,
)
from penstock.services.router.placement import Placement
from penstock.services.router.roster import Roster

YOUNG_SECONDS = 1.2
"""A router younger than two beats may not know everybody yet: it holds requests."""
MAX_HELD = 10_000
MAX_HELD_BYTES = 256 * 1024 * 1024
"""Of all held requests for a model together."""
HOLD_SECONDS = 30.0
"""A request waits so long for a tokenizer or an engine to come (back), or for
``--restart-wait-s`` if that is longer …"""
LOADING_HOLD_SECONDS = 600.0
"""… and so long while there is one that starts or loads its weights."""
RETRY_AFTER_SECONDS = 1.0

Request = Submit | Enqueue


class Held:
    """How much of one model is held."""

    __slots__ = ("bytes", "count")

    def __init__(self) -> None:
        self.count = self.bytes = 0


class Dispatcher:
    """Routes requests and their cancellations."""

    def __init__(
        self,
        roster: Roster,
        send: Callable[[str, Message], bool],
        now: float,
        restart_wait_s: float = HOLD_SECONDS,
    ) -> None:
        self.held: dict[tuple[int, str], tuple[Request, float]] = {}
        """(id, service) → (message, since when), oldest first."""
        self.held_of: dict[str, Held] = {}
        """By model; what waits for one turns no request for another away."""
        self.routed = 0
        self.placement = Placement(roster)
        self._roster = roster
        self._send = send
        self._began = now
        self._hold = max(HOLD_SECONDS, restart_wait_s)
        self._tombstones = Tombstones()

    def request(self, message: Request, now: float) -> None:
        """Send a request on, hold it, or turn it away."""
        service = _destination(message)
        key = (message.id, service)
        if self._tombstones.covers(message.id, message.attempt):
            if key in self.held and self.held[key][0].attempt <= message.attempt:
                self._release(key)
            return
        prefix = message.prefix if isinstance(message, Enqueue) else b""
        member = self.placement.choose(key, message.attempt, now, message.model, prefix)
        if now - self._began < YOUNG_SECONDS:
            member = None
        if member is None:
            self._wait_or_reject(message, service, now)
            return
        self._release(key)
        self.placement.placed(key, message.attempt, member, now, prefix)
        if self._send(member.address, message):
            member.routed += 1
            self.routed += 1
        else:
            self._reject(message, f"the {service} with the least load does not keep up")

    def _wait_or_reject(self, message: Request, service: str, now: float) -> None:
        """Hold a request until somebody is ready. Where nobody ever was, a new one is told so at
        once; what continues elsewhere had a place, known here or not."""
        key = (message.id, service)
        self.placement.keep(key, now)  # still known when the hold is over, however long that is
        is_new = message.attempt == first_attempt(1) and not self.placement.knows(key)
        young = now - self._began < YOUNG_SECONDS
        if is_new and not young and message.model not in self._roster.models:
            self._reject(message, self._explain(service, message.model))
            return
        known = self.held.get(key)
        if known is not None and known[0].attempt > message.attempt:
            return
        held = self.held_of.get(message.model) or Held()
        more = len(message.work) - (len(known[0].work) if known is not None else 0)
        if known is None and held.count >= MAX_HELD:
            reason = f"{MAX_HELD} requests wait for it"
        elif more > 0 and held.bytes + more > MAX_HELD_BYTES:
            reason = f"requests of {MAX_HELD_BYTES >> 20} MiB wait for it"
        else:
            same = known is not None and known[0].attempt == message.attempt
            since = known[1] if known is not None and same else now
            self.held[key] = (message, since)  # if the same, with the time left now
            self.held_of[message.model] = held
            held.count += known is None
            held.bytes += more
            return
        self._reject(message, f"{self._explain(service, message.model)}, and {reason}")

    def _release(self, key: tuple[int, str]) -> None:
        """Hold a request no longer."""
        message, _ = self.held.pop(key, (None, 0.0))
        if message is not None:
            held = self.held_of[message.model]
            held.count -= 1
            held.bytes -= len(message.work)
            if not held.count:
                del self.held_of[message.model]

    def _is_coming(self, service: str, model: str) -> bool:
        """Whether a process of the service starts or loads."""
        coming = (Phase.STARTING, Phase.LOADING)
        return any(member.phase in coming for member in self._roster.of(service, model))

    def _explain(self, service: str, model: str) -> str:
        found = self._roster.of(service, model)
        name = "engine" if service == "scheduler" else service
        if len(self._roster.models) > 1:
            name += f" of the model {model!r}"
        if not found:
            return f"no {name} is running"
        states = ", ".join(f"{m.phase} {m.note}".strip() for m in found)
        return f"no {name} is ready ({states})"

    def _reject(self, message: Request, reason: str) -> None:
        self._release((message.id, _destination(message)))
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
                    self._release((request_id, service))
            one = Cancel([request_id], [attempt], [choice])
            target = self.placement.where((request_id, service))
            targets = [target] if target else self._roster.ready(service)
            for each in targets:
                self._send(each.address, one)

    def tick(self, now: float) -> None:
        """Try the held requests again; forget old routes."""
        self._tombstones.expire(now)
        for key, (message, since) in list(self.held.items()):
            self.request(message, now)
            is_coming = self._is_coming(key[1], message.model)
            limit = LOADING_HOLD_SECONDS if is_coming else self._hold
            if key in self.held and now - since > limit:
                self._reject(message, self._explain(key[1], message.model))
        self.placement.tick(now)


def _destination(message: Request) -> str:
    return "tokenizer" if isinstance(message, Submit) else "scheduler"
