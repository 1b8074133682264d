"""Requests on their way to a tokenizer or an engine: sent on, held until one is ready, cancelled.

``Placement`` chooses who gets a request, among the engines that do its task. What comes while none
of them is ready waits: whoever was lost is started again. A new request is turned away at once only
where nobody was ever ready, and where no engine does its task. The router never decodes a prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock.protocol.ownership.tombstones import Tombstones
from penstock.protocol.process.spans import SPANS
from penstock.protocol.process.stage import Attributes
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.membership import Phase
from penstock.protocol.wire.messages.requests import (
    Cancel,
    Enqueue,
    Rejected,
    first_attempt,
)
from penstock.services.router.held_requests import (
    HeldRequests,
    Request,
    Target,
    service_of,
    target_of,
    task_of,
)
from penstock.services.router.member import Member
from penstock.services.router.placement import Placement
from penstock.services.router.roster import Roster

YOUNG_SECONDS = 1.2
"""A router younger than two beats may not know everybody yet: it holds requests."""
HOLD_SECONDS = 30.0
"""A request waits so long for a tokenizer or an engine to come (back), or for
``--restart-wait-s`` if that is longer …"""
LOADING_HOLD_SECONDS = 600.0
"""… and so long while there is one that starts or loads its weights, or its model sleeps (then for
``--wake-wait-s`` if that is longer)."""
RETRY_AFTER_SECONDS = 1.0


def _lack(member: Member, adapter: str, deterministic: bool) -> str:
    """What an engine lacks for a request: no engine that is there ...; empty: nothing."""
    if adapter and not member.has(adapter):
        return "has the adapter"
    if deterministic and not member.capacity.repeats:
        return "repeats answers bit for bit (deterministic)"
    return ""


class Dispatcher:
    """Routes requests and their cancellations."""

    def __init__(
        self,
        roster: Roster,
        send: Callable[[str, Message], bool],
        now: float,
        restart_wait_s: float = HOLD_SECONDS,
        wake_wait_s: float = 0.0,
        max_local_prefill_length: int = 0,
    ) -> None:
        self.held = HeldRequests()
        self.routed = 0
        self.placement = Placement(roster, max_local_prefill_length)
        self._roster = roster
        self._send = send
        self._began = now
        self._hold = max(HOLD_SECONDS, restart_wait_s)
        self._wake_hold = max(LOADING_HOLD_SECONDS, wake_wait_s)
        self._tombstones = Tombstones()
        self._hopeful: dict[Target, bool] = {}
        """What requests wait for → whether it may still come, when they were last all tried."""

    def request(self, message: Request, now: float) -> None:
        """Send a request on, hold it, or turn it away."""
        service = service_of(message)
        key = (message.id, service)
        if self._tombstones.covers(message.id, message.attempt):
            self._release_up_to(key, message.attempt)
            return
        prefix = message.prefix if isinstance(message, Enqueue) else b""
        choices = max(1, message.choices)
        tokens = message.tokens if isinstance(message, Enqueue) else 0
        adapter = message.adapter if isinstance(message, Enqueue) else ""
        deterministic = isinstance(message, Enqueue) and message.deterministic
        member = self.placement.choose(
            *(key, message.attempt, now, message.model, prefix, choices, tokens, task_of(message)),
            *(adapter, isinstance(message, Enqueue) and message.begun, deterministic),
        )
        if now - self._began < YOUNG_SECONDS:
            member = None
        lack = "" if member is None else _lack(member, adapter, deterministic)
        if lack:
            if self._is_coming(target_of(message)):
                member = None
            elif self.placement.came_back(key, message.attempt):
                self._reject(message, f"no engine that is there {lack}")
                return
        if member is None:
            self._wait_or_reject(message, service, now)
            return
        if message.trace:
            facts: Attributes = {"penstock.to": member.name, "penstock.attempt": message.attempt}
            SPANS.record("route", message.trace, self.held.since(key, now), time.monotonic(), facts)
        self.held.release(key)
        self.placement.placed(key, message.attempt, member, now, prefix, choices)
        if self._send(member.address, message):
            self.routed += 1
        else:
            self.placement.gone(key, message.attempt)
            self._reject(message, f"the {service} with the least load does not keep up")

    def _wait_or_reject(self, message: Request, service: str, now: float) -> None:
        """Hold a request until somebody is ready. Where nobody ever was, a new one is told so at
        once; what continues elsewhere had a place, known here or not."""
        key = (message.id, service)
        self.placement.keep(key, now)  # still known when the hold is over, however long that is
        is_new = message.attempt == first_attempt(1) and not self.placement.knows(key)
        young = now - self._began < YOUNG_SECONDS
        if is_new and not young and message.model not in self._roster.models:
            self._reject(message, self._explain(target_of(message)))
            return
        if is_new and (reason := self._never(target_of(message), now)):
            self.held.release(key)
            error = "invalid_request_error"
            self._send(
                message.reply_to, Rejected(message.id, message.attempt, 400, error, reason, "task")
            )
            return
        held = self.held.attempt(key)
        if held is not None and held > message.attempt:
            return
        if reason := self.held.hold(message, now):
            self._reject(message, f"{self._explain(target_of(message))}, and {reason}")
        elif held is None and self.held.counts[message.model] == 1 and self._sleeps(message.model):
            self._roster.wanted(message.model)

    def _release_up_to(self, key: tuple[int, str], attempt: int) -> None:
        """Hold a request no longer, unless it is a later attempt."""
        held = self.held.attempt(key)
        if held is not None and held <= attempt:
            self.held.release(key)

    def _never(self, target: Target, now: float) -> str:
        """Why no engine will ever do a task; empty: one may. A router that has not been there for
        long does not know what those do that are away."""
        _, model, task = target
        done = self._roster.models.tasks(model)
        if not task or not done or task in done or now - self._began < self._hold:
            return ""
        if self._roster.of(*target):
            return ""
        name = f"the model {model!r}" if model else "this server"
        return f"task is {task!r}, which no engine of {name} does; they do: {', '.join(done)}"

    def _is_coming(self, target: Target) -> bool:
        """Whether a process starts or loads that is waited for."""
        coming = (Phase.STARTING, Phase.LOADING)
        return any(member.phase in coming for member in self._roster.of(*target))

    def _sleeps(self, model: str) -> bool:
        """Whether the model sleeps and is woken for a request."""
        sleeper = self._roster.asleep.get(model)
        return sleeper is not None and not sleeper.reason

    def _longest_hold(self, target: Target) -> float:
        """Seconds for which a request waits, as things are now."""
        if self._sleeps(target[1]):
            return self._wake_hold
        return LOADING_HOLD_SECONDS if self._is_coming(target) else self._hold

    def _retry_after(self, model: str) -> float:
        """Seconds after which it makes sense to ask again: a model that sleeps takes its time."""
        sleeper = self._roster.asleep.get(model)
        return max(RETRY_AFTER_SECONDS, sleeper.wake_s if sleeper is not None else 0.0)

    def _explain(self, target: Target) -> str:
        service, model, task = target
        found = self._roster.of(*target)
        name = "engine" if service == "scheduler" else service
        if len(self._roster.models) > 1:
            name += f" of the model {model!r}"
        if task and len(self._roster.models.tasks(model)) > 1:
            name += f" that does the task {task!r}"
        if not found:
            return f"no {name} is running"
        states = ", ".join(f"{m.phase} {m.note}".strip() for m in found)
        return f"no {name} is ready ({states})"

    def _reject(self, message: Request, reason: str) -> None:
        self.held.release((message.id, service_of(message)))
        self._send(
            message.reply_to,
            Rejected(
                message.id,
                message.attempt,
                503,
                "overloaded_error",
                f"{reason}; try again",
                retry_after=self._retry_after(message.model),
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
                for waited_for in ("tokenizer", "scheduler"):
                    self._release_up_to((request_id, waited_for), attempt)
                    self.placement.gone((request_id, waited_for), attempt)
            else:
                self.placement.gone((request_id, service), attempt, 1)
            one = Cancel([request_id], [attempt], [choice])
            target = self.placement.where((request_id, service))
            targets = [target] if target else self._roster.ready(service)
            for each in targets:
                self._send(each.address, one)

    def tick(self, now: float) -> None:
        """Try the held requests again if any of them may move; forget old routes.

        What is ready or coming is looked up once for each service of a model that is waited for.
        """
        self._tombstones.expire(now)
        young = now - self._began < YOUNG_SECONDS
        hopeful = {}
        for target in self.held.targets():
            service, model, _ = target
            served = young or model in self._roster.models
            hopeful[target] = served and not self._never(target, now)
            is_ready = not young and bool(self._roster.ready(*target))
            if is_ready or hopeful[target] != self._hopeful.get(target, True):
                for message in self.held.waiting(target):
                    self.request(message, now)
            for message in self.held.older_than(now - self._longest_hold(target), target):
                self.placement.keep((message.id, service), now)
                self._reject(message, self._explain(target))
        self._hopeful = hopeful
        self.placement.tick(now, self.held)
