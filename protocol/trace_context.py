"""The trace that a request is part of (W3C Trace Context), and what log lines say of a request."""

from __future__ import annotations

import re

from penstock.protocol.wire.messages.requests import RequestHead

_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]{0,100})?",
    re.IGNORECASE,
)
"""A ``traceparent`` of any version: what a later one adds stands behind a further dash."""


def traceparent_of(given: str) -> str:
    """A ``traceparent`` as it was sent, or nothing where it cannot be read.

    It is the caller's business: one that is malformed is no reason to refuse a request.
    """
    given = given.strip()
    return given if _TRACEPARENT.fullmatch(given) else ""


def trace_id(traceparent: str) -> str:
    """The trace that a request is part of; empty where it is part of none."""
    return traceparent[3:35].lower()


def exemplar_id(traceparent: str) -> str:
    """The trace that a request may be an example of: one that somebody records. Empty where its
    caller has not sampled it (trace-flags, bit 0), or where it is part of none."""
    flags = traceparent[53:55]
    return trace_id(traceparent) if flags and int(flags, 16) & 1 else ""


def line_fields(request_id: str, traceparent: str) -> dict[str, str]:
    """What stands in every log line about a request, in whatever process: the id that its client
    sees, and its trace where it is part of one."""
    fields = {"id": request_id}
    if traceparent:
        fields["trace"] = trace_id(traceparent)
    return fields


def log_fields(head: RequestHead) -> dict[str, str]:
    """The same, from what processes know of a request."""
    return line_fields(head.request_id, head.trace)
