"""What is counted of requests while their rows come in."""

from __future__ import annotations

from penstock.protocol.process.metrics import Registry


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
        self.first_token = registry.histogram("time_to_first_token_seconds").observe
        self.between_tokens = registry.histogram("inter_token_latency_seconds").observe
        self.end_to_end = registry.histogram("e2e_request_latency_seconds").observe
        self._registry = registry

    def finished(self, reason: str, choices: int = 1) -> None:
        self._registry.inc("request_finished_total", reason, amount=choices)
