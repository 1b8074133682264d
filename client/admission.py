"""Whether a new request may come in: decided before anything is computed for it.

``AdmissionController`` has no clock and no socket: it is told what is open here (exactly), what
other frontends have open (as of their last beats) and what the engines hold, and answers at once.
Each model has its own: what waits for one keeps no request for another out.

A request that waits longer than its client does is work for nobody, and so is all that waits behind
it. So the queue is bounded by time first: what waits, over the rate at which requests end while the
engines are full. The numbers of requests and of prompt tokens are bounded as well.

While more than one tenant comes, none may fill the queue. Each may have as many requests in it as
``share / (1 - share)`` times what is left free (Choudhury and Hahne, *Dynamic Queue Length
Thresholds for Shared-Memory Packet Switches*, 1998): one that floods gets ``share`` of it, several
get equal parts, and a place is left for whoever comes next.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field, replace

from penstock.client.refusals import Shed
from penstock.protocol.config.derive import waiting_tokens_limit
from penstock.protocol.config.fields import AdmissionConfig
from penstock.protocol.wire.messages.membership import Demand
from penstock.protocol.wire.messages.requests import (
    Chat,
    Pair,
    Prompt,
    PromptText,
)

BYTES_PER_TOKEN = 4
"""Bytes of text that count as a token until the tokenizer has said how many tokens there are."""
TENANT_SECONDS = 60.0
"""A tenant that came within this time counts as there."""
MEMORY = 4.0
FORGET_SECONDS = 10.0
"""An idle server forgets how long requests take: what comes next may be of another kind."""
UNSEEN_SECONDS = 1.0
"""What another frontend does is known so much later at worst: its beat and the answer to ours."""
LEAST_RETRY_SECONDS, MOST_RETRY_SECONDS = 1.0, 30.0


def prompt_tokens(prompt: Prompt) -> int:
    """About how many tokens a prompt has, at least one; exact where it came as tokens."""
    if isinstance(prompt, PromptText):
        return len(prompt.text) // BYTES_PER_TOKEN + 1
    if isinstance(prompt, Chat):
        return len(prompt.messages) // BYTES_PER_TOKEN + 1
    if isinstance(prompt, Pair):
        return (len(prompt.text) + len(prompt.other)) // BYTES_PER_TOKEN + 1
    return len(prompt.ids) // 4


@dataclass(frozen=True, slots=True)
class PipelineLoad:
    """What the membership says."""

    slots: float = 1.0
    """Requests that the ready engines run at the same time."""
    kv_tokens: int = 0
    """Tokens that their KV memory holds."""
    frontends: int = 1
    others: Demand = field(default_factory=Demand)


class ServiceTime:
    """How long a request keeps its slot, from how many hold one and how many came to hold one.

    By Little's law the mean time in a slot is the number of taken slots, summed over time, over the
    number of requests that took one. Both are sums in which the last ``MEMORY`` times ``slots``
    requests count. It holds from the first request on: those that have not ended yet count with the
    time that they have taken so far, so a first guess is low and corrects itself.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        """Slots taken, times the time that they were."""
        self._requests = 0.0
        self._at = 0.0
        self._taken = 0.0
        self._begun = 0.0
        self._idle_since = 0.0

    def observe(self, now: float, taken: float, begun: float, slots: float) -> None:
        """``taken``: slots in use now; ``begun``: requests that ever took one."""
        self._seconds += self._taken * (now - self._at)
        memory = max(MEMORY * slots, 1.0)
        # A frontend that joins brings all that it ever began: that took no slot just now.
        new = min(max(0.0, begun - self._begun), memory if self._requests else taken)
        kept = (1.0 - 1.0 / (memory + 1.0)) ** new
        self._seconds *= kept
        self._requests = self._requests * kept + (memory + 1.0) * (1.0 - kept)
        self._at, self._taken, self._begun = now, taken, begun
        if taken:
            self._idle_since = now
        elif now - self._idle_since > FORGET_SECONDS:
            self._seconds = self._requests = 0.0

    def rate(self, slots: float) -> float:
        """Requests a second that end while all slots are taken; infinite while unknown."""
        known = self._seconds and self._requests
        return slots * self._requests / self._seconds if known else math.inf


class RecentTenants:
    """Whether another tenant came lately. Remembers two, which is enough to tell."""

    def __init__(self) -> None:
        self._last = ("", -math.inf)
        self._other = ("", -math.inf)

    def came(self, tenant: str, now: float) -> None:
        if tenant != self._last[0]:
            self._other = self._last
        self._last = (tenant, now)

    def has_other_than(self, tenant: str, now: float) -> bool:
        _, when = self._other if self._last[0] == tenant else self._last
        return now - when <= TENANT_SECONDS


@dataclass(slots=True)
class _WaitingRequest:
    """A request of this frontend without its first token, or those prompts of a batch that have
    brought nothing yet."""

    tenant: str
    tokens: int
    prompts: int


class AdmissionController:
    """Counts what waits and refuses what would wait too long."""

    def __init__(self, limits: AdmissionConfig) -> None:
        self._limits = limits
        self._load = PipelineLoad()
        self._engines_out = False
        self._service_time = ServiceTime()
        self._tenants_seen = RecentTenants()
        self._waiting: dict[int, _WaitingRequest] = {}
        self._num_waiting = 0
        """Requests that wait. Here, as in all that is told and bounded, each prompt of a batch
        counts as one."""
        self._tokens = 0
        self._tenants: Counter[str] = Counter()
        self._recent: deque[tuple[float, int]] = deque()
        """(when, requests open here) of the last ``UNSEEN_SECONDS``."""
        self.estimated_wait = 0.0
        """Seconds that a new request would wait for an engine, as of the last look."""
        self._begun = 0
        """Requests that have had their first token, or will still have it."""

    # --- what happens to the requests that came in

    def entered(self, request_id: int, tenant: str, tokens: int, prompts: int = 1) -> None:
        """prompts: of a batch."""
        self._begun += prompts
        self._waiting[request_id] = _WaitingRequest(tenant, tokens, prompts)
        self._num_waiting += prompts
        self._tenants[tenant] += prompts
        self._tokens += tokens

    def counted(self, request_id: int, tokens: int) -> None:
        """The tokenizer has said how many tokens the prompt has."""
        waiting = self._waiting.get(request_id)
        if waiting is not None:
            self._tokens += tokens - waiting.tokens
            waiting.tokens = tokens

    def started(self, request_id: int) -> bool:
        """The first token is here, or what one of a batch's prompts brings. Returns whether nothing
        of the request waits any more."""
        waiting = self._waiting.get(request_id)
        if waiting is not None:
            self._count_out(waiting, 1)
            if waiting.prompts:
                return False
            del self._waiting[request_id]
        return True

    def left(self, request_id: int) -> None:
        """It was cancelled or ended with an error; what of it still waited, no engine has ended."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self._begun -= waiting.prompts
            self._count_out(waiting, waiting.prompts)

    def _count_out(self, waiting: _WaitingRequest, prompts: int) -> None:
        """So many prompts of a request wait no longer; their tokens count as equally many each."""
        tokens = waiting.tokens * prompts // waiting.prompts
        waiting.prompts -= prompts
        waiting.tokens -= tokens
        self._num_waiting -= prompts
        self._tokens -= tokens
        self._tenants[waiting.tenant] -= prompts
        if not self._tenants[waiting.tenant]:
            del self._tenants[waiting.tenant]

    # --- what is known

    def look(self, load: PipelineLoad, open_requests: int, now: float) -> None:
        """Take in what the membership says now. Call it a few times a second."""
        # While no engine is ready, who comes waits for the next one, which will be like the last.
        self._engines_out = not load.slots
        self._load = replace(load, slots=load.slots or self._load.slots)
        self._recent.append((now, open_requests))
        while now - self._recent[0][0] > UNSEEN_SECONDS:
            self._recent.popleft()
        _, ahead, rate = self._observe(open_requests, now)
        self.estimated_wait = ahead / rate

    def demand(self, open_requests: int, model: str = "") -> Demand:
        """What this frontend has in the pipeline for a model, for the others."""
        ended = max(0, self._begun - open_requests)
        return Demand(open_requests, self._num_waiting, self._tokens, ended, model=model)

    def _observe(self, open_requests: int, now: float) -> tuple[float, float, float]:
        """(requests known to wait for a slot, those that probably do, those that end in a
        second)."""
        load, others = self._load, self._load.others
        there = open_requests + others.open
        excess = max(0.0, there - load.slots)
        begun = self._begun + others.ended + others.open - excess
        # Waiting for an engine says nothing about how long a request keeps its slot.
        taken = 0.0 if self._engines_out else there - excess
        self._service_time.observe(now, taken, begun, load.slots)
        known = self._num_waiting + others.waiting
        unseen = self._unseen(open_requests)
        ahead = min(max(0.0, there + unseen - load.slots), known + unseen)
        return min(excess, known), ahead, self._service_time.rate(load.slots)

    def _unseen(self, open_requests: int) -> int:
        """Requests that the other frontends have let in since they were last heard of: as many each
        as this one. Else they would all fill the same free places at the same time."""
        if self._load.frontends == 1:
            return 0
        least = min((count for _, count in self._recent), default=open_requests)
        return max(0, open_requests - least) * (self._load.frontends - 1)

    # --- the decision

    def refusal(
        self,
        open_requests: int,
        tenant: str,
        tokens: int,
        time_left: float | None,
        now: float,
        draw: float,
        prompts: int = 1,
    ) -> Shed | None:
        """Why a new request must stay out; ``None``: it may come in.

        ``open_requests``: of this frontend, without the new one. ``draw``: at random in [0, 1),
        so that those who are sent away do not all come back at once. ``prompts``: of a batch, which
        comes in whole.
        """
        waiting, ahead, rate = self._observe(open_requests, now)
        wait = (ahead + 1.0) / rate
        self._tenants_seen.came(tenant, now)
        found = self._over_share(tenant, waiting, rate, now) or self._full(
            waiting, ahead, wait, tokens, time_left, prompts
        )
        if found is None:
            return None
        status, reason, message = found
        retry_after = min(max(wait * (0.5 + draw), LEAST_RETRY_SECONDS), MOST_RETRY_SECONDS)
        kind = "rate_limit_error" if status == 429 else "overloaded_error"
        return Shed(0, 0, status, kind, message, retry_after=retry_after, reason=reason)

    def _over_share(
        self, tenant: str, waiting: float, rate: float, now: float
    ) -> tuple[int, str, str] | None:
        limits = self._limits
        share = limits.max_tenant_share
        own = self._tenants[tenant] * self._load.frontends  # each sees its part of them
        if not (own and waiting and share < 1.0 and self._tenants_seen.has_other_than(tenant, now)):
            return None
        room = min(float(limits.max_waiting_requests), limits.max_wait_s * rate)
        if own < share / (1.0 - share) * (room - waiting):
            return None
        return (
            429,
            "share",
            f"{own} requests of this API key, user or address are waiting already, which is their "
            f"share (--max-tenant-share {share:g}) while others come as well; try again later",
        )

    def _full(
        self,
        waiting: float,
        ahead: float,
        wait: float,
        tokens: int,
        time_left: float | None,
        prompts: int,
    ) -> tuple[int, str, str] | None:
        limits, load = self._limits, self._load
        patience = limits.max_wait_s if time_left is None else min(limits.max_wait_s, time_left)
        if waiting and waiting + prompts - 1 >= limits.max_waiting_requests:
            kind = "queue"
            said = "which is" if prompts == 1 else f"and {prompts} more inputs would pass"
            reason = (
                f"{math.ceil(waiting)} requests are waiting already, {said} the limit of "
                f"{limits.max_waiting_requests} (--max-waiting-requests)"
            )
        elif ahead and wait > patience:
            kind = "wait"
            reason = (
                f"{math.ceil(ahead)} requests are waiting already, and a new one would wait "
                f"{wait:.1f} s, longer than {patience:g} s (--max-wait-s, or its own time)"
            )
        else:
            there = self._tokens + load.others.waiting_tokens
            most = waiting_tokens_limit(limits.max_waiting_tokens, load.kv_tokens)
            if not there or there + tokens <= most:
                return None
            kind = "tokens"
            reason = (
                f"{there} prompt tokens are waiting already, and with about {tokens} more they "
                f"would pass the limit of {most} (--max-waiting-tokens)"
            )
        return 503, kind, f"{reason}; try again later"
