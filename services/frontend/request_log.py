"""One log line for each request that has ended: what it was, never what it said.

Requests with a prompt have a line each; of all others those that got an error have one. Nothing
of a line is a client's text but the request id, of which ``access.request_id`` lets only harmless
ones pass.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from penstock.protocol.process import logs
from penstock.protocol.trace_context import trace_id
from penstock.services.frontend.generation import Generation

QUIET_ROUTES = frozenset({"/live", "/health", "/ready"})
"""Probes: their answers say what state the server is in, and are asked for again and again."""

GENERATION = web.RequestKey("generation", Generation)
ERROR_KIND = web.RequestKey("error_kind", str)
"""Code or type of the error that was answered."""
CLIENT_GONE = 499
"""The status of a request whose client left before its answer was whole (nginx's number)."""


def log_request(
    request_id: str,
    route: str,
    status: int,
    error: str = "",
    generation: Generation | None = None,
    trace: str = "",
) -> None:
    """Write the line of a request that has ended with ``status``, if it is to have one.

    An error has the level warning, also one that came after the first byte of a stream.
    """
    if route in QUIET_ROUTES or (generation is None and status < 400):
        return
    fields: dict[str, Any] = {"id": request_id, "route": route, "status": status}
    if generation is not None:
        trace = trace_id(generation.caller.trace) or trace
    if trace:
        fields["trace"] = trace
    if generation is not None:
        fields |= _figures(generation)
        if generation.error is not None:
            error = generation.error.code or generation.error.kind
    if error:
        fields["error"] = error
    failed = (status >= 400 and status != CLIENT_GONE) or bool(error)
    logs.record("warning" if failed else "info", "request", fields)


def _figures(generation: Generation) -> dict[str, Any]:
    """Sizes in tokens, times in milliseconds."""
    usage, arrival = generation.usage, generation.arrival
    ended, first = generation.ended_at or generation.now(), generation.first_at
    found: dict[str, Any] = {}
    if generation.key.name:
        found["key"] = generation.key.name
    found["model"] = generation.request.served
    found["prompt_tokens"] = usage.prompt
    found["cached_tokens"] = usage.cached
    found["output_tokens"] = usage.completion
    if usage.reasoning:
        found["thinking_tokens"] = usage.reasoning
    if usage.accepted_drafts or usage.rejected_drafts:
        found["accepted_drafts"] = usage.accepted_drafts
        found["rejected_drafts"] = usage.rejected_drafts
    if generation.queued_s:
        found["queue_ms"] = round(1000 * generation.queued_s, 1)
    if first:
        found["first_token_ms"] = round(1000 * (first - arrival), 1)
        found["prefill_ms"] = max(0.0, round(1000 * (first - arrival - generation.queued_s), 1))
        found["decode_ms"] = max(0.0, round(1000 * (ended - first), 1))
        if usage.completion > 1 and ended > first:
            found["tokens_per_s"] = round((usage.completion - 1) / (ended - first), 1)
    found["total_ms"] = round(1000 * (ended - arrival), 1)
    if generation.handed_over_s >= 0.0:
        found["hand_over_ms"] = round(1000 * generation.handed_over_s, 1)
    if generation.continuations:
        found["continuations"] = generation.continuations
    found["finish"] = ",".join(generation.reasons) or "abort"
    return found
