"""Messages to a client, and the status that refuses it."""

from __future__ import annotations

import asyncio
import logging

from penstock.services.frontend.errors import ApiError
from penstock.services.frontend.grpc.receiving import Rpc
from penstock.services.frontend.grpc.status import Metadata, code_of, message_of, trailing

MAX_SENT_BYTES = 64 * 1024 * 1024
"""Of one message of ours; a client that wants messages of more than 4 MiB must allow them too."""
SLOW_READER = "slow_reader"
_log = logging.getLogger("penstock.frontend")


def slow_reader(reason: str) -> ApiError:
    """Why a client was given up."""
    return ApiError(429, f"The client does not read its answer: {reason}", code=SLOW_READER)


async def write(rpc: Rpc, raw: bytes) -> None:
    """Returns when gRPC has taken the message. Raises ``ApiError`` for one that is too large."""
    if len(raw) > MAX_SENT_BYTES:
        raise ApiError(
            413,
            f"The answer is a message of {len(raw)} bytes; {MAX_SENT_BYTES} are allowed: ask for "
            "less at once, or for a stream",
            code="answer_too_large",
        )
    await rpc.write(raw)


async def send(rpc: Rpc, raw: bytes, stall_s: float) -> None:
    """As ``write``, for a client that takes it within so many seconds; else raises ``ApiError``."""
    try:
        async with asyncio.timeout(stall_s):
            await write(rpc, raw)
    except TimeoutError:
        raise slow_reader(f"it took nothing for {stall_s:g} s") from None


async def refuse(rpc: Rpc, error: ApiError, request_id: str, more: Metadata = ()) -> None:
    """End a call with an error. Does not return.

    gRPC takes no status behind a message that nobody takes, and cannot reset a stream from here. So
    one whose client does not read lasts until that leaves, which cancels this task; its error is in
    the log and the metrics.
    """
    if error.code == SLOW_READER:
        await asyncio.Event().wait()
    metadata = (*trailing(error, request_id), *more)
    await rpc.abort(code_of(error.status), message_of(error), metadata)
