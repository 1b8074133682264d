"""What is counted of requests while their rows come in."""

from __future__ import annotations

from functools import lru_cache

from penstock.client.refusals import shed_reason
from penstock.protocol.process.metrics import MAX_SERIES, Counter, Registry
from penstock.protocol.tasks import GENERATE, OF_TOKENIZERS
from penstock.protocol.wire.messages.requests import Rejected


class Usage:
    """What a client's whole request took: tokens, counted as its rows arrive, and time."""

    __slots__ = (
        *("accepted_drafts", "cached", "completion", "first_token_s", "prompt", "reasoning"),
        *("rejected_drafts", "total_s"),
    )

    def __init__(self) -> None:
        self.prompt = 0
        self.completion = 0
        self.cached = 0
        self.reasoning = 0
        """Of the completion: thinking. Exact of choices that have ended by themselves, and for
        others without the marks around it."""
        self.accepted_drafts = 0
        """Of the completion: tokens that were drafted ahead."""
        self.rejected_drafts = 0
        self.first_token_s = 0.0
        """Seconds from the request's arrival to its first token; 0 before."""
        self.total_s = 0.0
        """Seconds from its arrival to its end; 0 before."""


class Meters:
    """The series that requests are counted in."""

    def __init__(self, registry: Registry) -> None:
        self.first_token = registry.histogram("time_to_first_token_seconds").observe_traced
        self.between_tokens = registry.histogram("inter_token_latency_seconds").observe
        self._end_to_end = registry.histogram("e2e_request_latency_seconds").observe_traced
        self._per_token = registry.histogram("time_per_output_token_seconds").observe_traced
        self._prompt_tokens = registry.histogram("request_prompt_tokens").observe
        self._generation_tokens = registry.histogram("request_generation_tokens").observe
        self._registry = registry
        self._used = lru_cache(maxsize=MAX_SERIES)(self._usage_counters)

    def whole(self, usage: Usage, choices: int, exemplar_id: str, task: str) -> None:
        """All choices of a request have ended without an error. One that a tokenizer answers by
        itself is none of those that latencies and lengths are told of."""
        if task in OF_TOKENIZERS:
            return
        self._end_to_end(usage.total_s, exemplar_id)
        self._prompt_tokens(usage.prompt)
        if task != GENERATE:  # it has no output
            return
        self._generation_tokens(usage.completion)
        later = usage.completion - choices
        if usage.first_token_s and later > 0:
            seconds = choices * (usage.total_s - usage.first_token_s)
            self._per_token(seconds / later, exemplar_id)

    def ended(self, usage: Usage, model: str, key: str, task: str) -> None:
        """A request has ended, however it did. ``model`` and ``key``: names of the operator's.
        What a tokenizer answers by itself is no usage: no engine has computed it."""
        if task in OF_TOKENIZERS:
            return
        amounts = usage.prompt, usage.cached, usage.completion, usage.prompt, usage.completion, 1
        for counter, amount in zip(self._used(model, key), amounts, strict=True):
            counter.value += amount

    def _usage_counters(self, model: str, key: str) -> tuple[Counter, ...]:
        """Of a request's tokens: its model's prompt, cached, completion, its key's prompt and
        completion; and of its key's requests."""
        counter, tokens = self._registry.counter, "usage_tokens_total"
        return (
            *(counter(tokens, model, kind) for kind in ("prompt", "cached", "completion")),
            *(counter("key_tokens_total", key, kind) for kind in ("prompt", "completion")),
            counter("key_requests_total", key),
        )

    def refused(self, rejected: Rejected) -> None:
        """A request ends with this error, and is not tried again."""
        if reason := shed_reason(rejected):
            self._registry.inc("requests_shed_total", reason)

    def finished(self, reason: str, choices: int = 1) -> None:
        self._registry.inc("requests_finished_total", reason, amount=choices)
