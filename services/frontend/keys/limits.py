"""What keys may use: asked when a request comes, corrected when it ends."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from penstock.client.admission import prompt_tokens
from penstock.protocol.keys.record import KeyLimits
from penstock.protocol.process.metrics import Registry
from penstock.protocol.tasks import GENERATE, OF_TOKENIZERS
from penstock.services.frontend.keys.known_key import KnownKey
from penstock.services.frontend.keys.local_limits import Charge, LocalLimits
from penstock.services.frontend.keys.shared_limits import Ended, SharedLimits, new_name
from penstock.services.frontend.keys.standing import (
    LimitReached,
    Refusal,
    Standing,
    amounts,
    limit_reached,
    never_fits,
)
from penstock.services.frontend.parse import GenerateRequest

UNSAID_OUTPUT = 4096
"""Tokens of output that a choice is charged with in advance where its request names no limit."""


class Admission(msgspec.Struct):
    """A request that was let in."""

    key: KnownKey
    limits: KeyLimits
    charge: Charge
    standing: Standing
    name: str = ""
    """Of the request, for the server."""


class Limits:
    """The limits of all keys in one process, by a server's count where there is one."""

    def __init__(
        self,
        registry: Registry,
        frontends: Callable[[], int],
        shared: SharedLimits | None = None,
        local: LocalLimits | None = None,
    ) -> None:
        """frontends: how many serve the same clients; each lets in its part where nothing counts
        for all of them."""
        self.shared = shared
        self._local = local or LocalLimits()
        self._frontends = frontends
        self._registry = registry

    async def admit(self, key: KnownKey, asked: GenerateRequest, context: int) -> Admission | None:
        """Charge a request with what it may take. context: tokens that fit into its model.

        Returns ``None`` where the key has no limits. Raises ``LimitReached``; then it costs
        nothing.
        """
        limits = key.limits
        if limits.are_none or asked.is_part:
            return None
        tokens, sure = most_tokens(asked, context)
        for limit, period in ((limits.tokens_per_minute, "minute"), (limits.tokens_per_day, "day")):
            if limit is not None and tokens > limit:
                if sure:
                    self._count("tokens")
                    raise never_fits(key, tokens, limit, period)
                tokens = limit
        name, was_asked = "", False
        if self.shared is not None:
            name, was_asked = new_name(), self.shared.answers
            verdict = await self.shared.admit(key, limits, tokens, name)
            if verdict is not None:
                if verdict.refusal is not None:
                    self._local.heard(key, verdict.standing)
                    raise self._refused(key, verdict.refusal, tokens, verdict.standing)
                charge = self._local.charge(key, limits, tokens)
                self._local.heard(key, verdict.standing)
                return Admission(key, limits, charge, verdict.standing, name)
        part = divided(limits, self._frontends())
        if (refusal := self._local.refusal(key, part, tokens)) is not None:
            if part is not limits:
                whole = amounts(limits)[refusal.limit] or 0
                refusal = msgspec.structs.replace(refusal, whole=whole)
        else:
            refusal = self._local.known_to_be_full(key, limits, tokens)
        if refusal is not None:
            if self.shared is not None and was_asked:
                self.shared.withdraw(key, limits, name)
            raise self._refused(key, refusal, tokens, self._local.standing(key, part))
        charge = self._local.charge(key, part, tokens)
        if self.shared is not None and limits.concurrent is not None:
            self.shared.opened(key, name)
        return Admission(key, limits, charge, self._local.standing(key, part), name)

    def settle(self, admission: Admission, used: int, *, took_place: bool) -> None:
        """The request has ended with so many tokens. took_place: else it costs nothing at all."""
        key = admission.key
        self._local.settle(key, admission.charge, used, took_place=took_place)
        if self.shared is not None:
            ended = Ended(key, admission.limits, admission.name, used, took_place)
            self.shared.tell(ended)

    def _refused(
        self, key: KnownKey, refusal: Refusal, tokens: int, standing: Standing
    ) -> LimitReached:
        self._count(refusal.limit)
        return limit_reached(key, refusal, tokens, standing)

    def _count(self, limit: str) -> None:
        self._registry.inc("requests_limited_total", limit)


def most_tokens(asked: GenerateRequest, context: int) -> tuple[int, bool]:
    """The tokens that a request may take, and whether it says so itself: the prompt, by its bytes
    where it did not come as tokens, and the longest output of each choice."""
    prompts = sum(map(prompt_tokens, asked.prompts))
    if asked.task in OF_TOKENIZERS:
        return 0, True
    if asked.task != GENERATE:
        return prompts, True
    longest = max(1, context - prompts // max(1, len(asked.prompts)))
    limit = asked.params.max_tokens
    output = min(longest, UNSAID_OUTPUT if limit is None else limit)
    each = asked.params.n if asked.beams is None else asked.beams.beam_width
    choices = len(asked.prompts) * each
    return prompts + choices * output, limit is not None


def divided(limits: KeyLimits, parts: int) -> KeyLimits:
    """The part of one of several processes, of which none knows what the others let in."""
    if parts <= 1:
        return limits

    def part(amount: int | None) -> int | None:
        return None if amount is None else max(1, amount // parts)

    return KeyLimits(
        requests_per_minute=part(limits.requests_per_minute),
        tokens_per_minute=part(limits.tokens_per_minute),
        tokens_per_day=part(limits.tokens_per_day),
        concurrent=part(limits.concurrent),
    )
