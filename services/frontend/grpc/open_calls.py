"""Calls that need no key: health and reflection. What they may take is little, and their own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message

from penstock.services.frontend import access
from penstock.services.frontend.errors import ApiError, retry_after, status_error
from penstock.services.frontend.grpc.receiving import Rpc
from penstock.services.frontend.grpc.requests import decoded
from penstock.services.frontend.grpc.sending import refuse

MAX_ASKED_BYTES = 4096
"""Of a message to one of these calls: names are all that they ask by."""
Asked = TypeVar("Asked", bound=Message)
OpenHandler: TypeAlias = Callable[[Rpc], Awaitable[None]]
_log = logging.getLogger("penstock.frontend")


class OpenCalls:
    """The calls of one method that run, of which there are at most so many."""

    def __init__(self, name: str, most: int) -> None:
        self.count = 0
        self._name = name
        self._most = most

    async def run(self, handler: OpenHandler, rpc: Rpc) -> None:
        """Answer a call, whatever happens."""
        try:
            if self.count >= self._most:
                raise self._too_many()
            self.count += 1
            try:
                await handler(rpc)
            finally:
                self.count -= 1
            return
        except ApiError as refusal:
            error = refusal
        except grpc.aio.InternalError:  # the client has left
            raise asyncio.CancelledError from None
        except Exception:
            _log.exception("a call of %s failed", self._name)
            error = status_error(500, f"Internal error in {self._name}")
        await refuse(rpc, error, access.harmless_id(""))

    def _too_many(self) -> ApiError:
        return ApiError(
            429,
            f"{self._most} calls of {self._name} are open already",
            code="too_many_open_calls",
            headers=retry_after(1.0),
        )


def asked(kind: type[Asked], raw: bytes) -> Asked:
    """The message in these bytes. Raises ``ApiError``: 413, 400."""
    if len(raw) > MAX_ASKED_BYTES:
        raise ApiError(413, f"The message has {len(raw)} bytes; {MAX_ASKED_BYTES} are allowed here")
    return decoded(kind, raw)
