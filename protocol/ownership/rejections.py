"""What the owners of a request say when they do not go on with it."""

from __future__ import annotations

import msgspec

from penstock.protocol.ownership.refusals import Refusals
from penstock.protocol.wire.codec import MAX_WORK_BYTES
from penstock.protocol.wire.messages.requests import Rejected


def failed(request_id: int, attempt: int, message: str) -> Rejected:
    """A 500: nothing is wrong with the request."""
    return Rejected(request_id, attempt, 500, "server_error", message)


def going_down(request_id: int, attempt: int, who: str) -> Rejected:
    """``who`` ends and takes nothing new."""
    return Rejected(
        request_id,
        attempt,
        503,
        "overloaded_error",
        f"{who} is going down; another one may take the request",
        retry_after=1.0,
        retry_elsewhere=True,
    )


def too_long(request_id: int, attempt: int, size: int, receiver: str) -> Rejected:
    """No message can carry it: to send it again and again would leave its client waiting."""
    message = (
        f"the request takes {size} bytes on its way to {receiver}, with what its answer has so "
        f"far; a message may carry {MAX_WORK_BYTES}: shorten the prompt, or ask for fewer choices "
        "at a time"
    )
    return Rejected(request_id, attempt, 413, "invalid_request_error", message)


def given_up(last: Rejected, refusals: Refusals, now: float) -> Rejected:
    """The answer to a client whose request no engine took in time."""
    seconds = now - refusals.since
    return msgspec.structs.replace(
        last,
        message=f"{last.message} (refused {refusals.count} times within {seconds:.1f} s)",
        retry_after=last.retry_after or 1.0,
        retry_elsewhere=False,
    )
