"""Messages to a client, and the status that refuses it."""

from __future__ import annotations

import asyncio

from penstock.services.frontend.errors import ApiError
from penstock.services.frontend.grpc.receiving import Rpc
from penstock.services.frontend.grpc.status import Metadata, code_of, message_of, trailing

MAX_SENT_BYTES = 64 * 1024 * 1024
"""Of one message of ours; a client that wants messages of more than 4 MiB must allow them too."""
SLOW_READER = "slow_reader"
_untaken: dict[Rpc, asyncio.Future[None]] = {}
"""The message of each call that is to end, and whose client has not taken it yet."""


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
    writing = asyncio.ensure_future(rpc.write(raw))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:  # its client is given up, or has left
        if not writing.done():
            _untaken[rpc] = writing
            writing.add_done_callback(lambda done: _forget(rpc, done))
        raise


def _forget(rpc: Rpc, writing: asyncio.Future[None]) -> None:
    del _untaken[rpc]
    if not writing.cancelled():
        writing.exception()  # nobody waits for it: the client has left


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
    one whose client does not read lasts until that reads again, and gets its error then, or leaves,
    which cancels this task.
    """
    if (writing := _untaken.get(rpc)) is not None:
        await asyncio.wait({writing})
    metadata = (*trailing(error, request_id), *more)
    await rpc.abort(code_of(error.status), message_of(error), metadata)
