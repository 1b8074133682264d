"""Calls that need no key: health and reflection. What they may take is little, and their own."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message

from penstock.services.frontend import access
from penstock.services.frontend.errors import ApiError, retry_after, status_error
from penstock.services.frontend.grpc.receiving import Rpc, address_of
from penstock.services.frontend.grpc.requests import decoded
from penstock.services.frontend.grpc.sending import refuse

MAX_ASKED_BYTES = 4096
"""Of a message to one of these calls: names are all that they ask by."""
Asked = TypeVar("Asked", bound=Message)
OpenHandler: TypeAlias = Callable[[Rpc], Awaitable[None]]
_log = logging.getLogger("penstock.frontend")


class OpenCalls:
    """The calls of one method that run, of which there are at most so many.

    One address may have as many as it leaves free: half of them alone, and less with others, so
    that none keeps the rest out.
    """

    def __init__(self, name: str, most: int) -> None:
        self.count = 0
        self._name = name
        self._most = most
        self._of: Counter[str] = Counter()
        """By address."""

    async def run(self, handler: OpenHandler, rpc: Rpc) -> None:
        """Answer a call, whatever happens. One whose client is given up is the address's until that
        reads again or leaves (``refuse``), and nobody else's."""
        address = address_of(rpc.peer())
        if (own := self._of[address]) >= self._most - self.count:
            await refuse(rpc, self._too_many(own), access.harmless_id(""))
        self._of[address] += 1
        try:
            error = await self._answered(handler, rpc)
            if error is not None:
                await refuse(rpc, error, access.harmless_id(""))
        finally:
            self._of[address] -= 1
            if not self._of[address]:
                del self._of[address]

    async def _answered(self, handler: OpenHandler, rpc: Rpc) -> ApiError | None:
        """Why a call could not be answered, if it could not."""
        self.count += 1
        try:
            await handler(rpc)
            return None
        except ApiError as refusal:
            return refusal
        except grpc.aio.InternalError:  # the client has left
            raise asyncio.CancelledError from None
        except Exception:
            _log.exception("a call of %s failed", self._name)
            return status_error(500, f"Internal error in {self._name}")
        finally:
            self.count -= 1

    def _too_many(self, own: int) -> ApiError:
        return ApiError(
            429,
            f"{self.count} of at most {self._most} calls of {self._name} are open already, "
            f"{own} of them from this address",
            code="too_many_open_calls",
            headers=retry_after(1.0),
        )


def asked(kind: type[Asked], raw: bytes) -> Asked:
    """The message in these bytes. Raises ``ApiError``: 413, 400."""
    if len(raw) > MAX_ASKED_BYTES:
        raise ApiError(413, f"The message has {len(raw)} bytes; {MAX_ASKED_BYTES} are allowed here")
    return decoded(kind, raw)
