"""Responses in a Valkey or Redis server, which frontends on several hosts may share.

Each is one key with a time to live that begins anew when it is used, so that the server's own limit
of memory (``maxmemory`` with ``volatile-lru``) bounds them all. No operation takes longer than
``OPERATION_SECONDS``; while the server does not answer, further ones fail at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from penstock.services.frontend.dialects.responses.items import is_response_id
from penstock.services.frontend.dialects.responses.store import StoredResponse
from penstock.services.frontend.errors import ApiError, retry_after
from penstock.services.frontend.valkey_address import ValkeyAddress
from penstock.services.frontend.valkey_client import connect

OPERATION_SECONDS = 2.0
RETRY_SECONDS = 1.0
"""After a failure the server is not asked for so long."""
MAX_CONNECTIONS = 16
MAX_RESPONSE_BYTES = 64 * 1024 * 1024
"""A larger one could not be moved within ``OPERATION_SECONDS``."""
_KEY = "penstock:response:{}:{}"

_log = logging.getLogger("penstock.frontend")
Result = TypeVar("Result")


class _Entry(msgspec.Struct, frozen=True):
    """What stands under a key. The key stands in it again: an answer to another question would
    else give one caller another's response."""

    key: str
    kept: StoredResponse


class ValkeyStore:
    """Responses in a server, by owner and id."""

    def __init__(
        self,
        address: ValkeyAddress,
        max_bytes: int,
        *,
        operation_s: float = OPERATION_SECONDS,
        retry_s: float = RETRY_SECONDS,
    ) -> None:
        """max_bytes: of one response. Connects when it is first needed. Raises ``ConfigError``
        where the library is missing."""
        self._address = address
        self._max_bytes = min(max_bytes, MAX_RESPONSE_BYTES)
        self._operation_s = operation_s
        self._retry_s = retry_s
        self._failed_at: float | None = None
        """When it last did not answer; ``None``: it answers."""
        self._client = connect(
            address, operation_s, MAX_CONNECTIONS, f"--response-store {address}", "valkey"
        )

    async def open(self) -> None:
        """Say in the log whether the server can be used."""
        try:
            await self._do(self._client.ping)
        except ApiError:
            return  # the log has it
        _log.info("responses are kept at %s", self._address)

    async def close(self) -> None:
        """Give the connections up."""
        await self._client.aclose()

    async def get(self, owner: str, name: str) -> StoredResponse | None:
        """Raises ``ApiError`` 503 where the server does not answer."""
        if not is_response_id(name):
            return None
        key = _key(owner, name)
        raw = await self._do(lambda: self._client.getex(key, ex=self._address.ttl_s))
        if raw is None:
            return None
        try:
            entry = msgspec.msgpack.decode(raw, type=_Entry)
        except msgspec.MsgspecError:
            _log.warning("a stored response is not what was written; it counts as not there")
            return None
        return entry.kept if entry.key == key else None

    async def put(self, owner: str, name: str, kept: StoredResponse) -> bool:
        """See ``ResponseStore``. What the server does not take is not kept, and the log says so."""
        if not is_response_id(name):
            return False
        key = _key(owner, name)
        raw = msgspec.msgpack.encode(_Entry(key, kept))
        if len(raw) > self._max_bytes:
            return False
        try:
            await self._do(lambda: self._client.set(key, raw, ex=self._address.ttl_s))
        except ApiError:
            return False
        return True

    async def delete(self, owner: str, name: str) -> bool:
        """Raises ``ApiError`` 503 where the server does not answer."""
        if not is_response_id(name):
            return False
        return bool(await self._do(lambda: self._client.delete(_key(owner, name))))

    async def _do(self, operation: Callable[[], Awaitable[Result]]) -> Result:
        """Raises ``ApiError`` 503 for whatever goes wrong, within the time of an operation."""
        from valkey import exceptions

        now = time.monotonic()
        if self._failed_at is not None and now - self._failed_at < self._retry_s:
            raise _unavailable()
        try:
            async with asyncio.timeout(self._operation_s):
                result = await operation()
        except (exceptions.ConnectionError, exceptions.TimeoutError, OSError) as error:
            if self._failed_at is None:
                _log.warning(
                    "the response store at %s cannot be used (%s); responses are not kept until "
                    "it can",
                    self._address,
                    str(error) or f"no answer within {self._operation_s:g} s",
                )
            self._failed_at = time.monotonic()
            raise _unavailable() from None
        except exceptions.ValkeyError as error:
            _log.warning("the response store at %s refuses: %s", self._address, error)
            raise _unavailable() from None
        if self._failed_at is not None:
            self._failed_at = None
            _log.info("the response store at %s can be used again", self._address)
        return result


def _key(owner: str, name: str) -> str:
    return _KEY.format(hashlib.blake2b(owner.encode(), digest_size=16).hexdigest(), name)


def _unavailable() -> ApiError:
    return ApiError(
        503,
        "The store of responses does not answer; try again, or send the conversation as input",
        kind="overloaded_error",
        code="response_store_unavailable",
        headers=retry_after(RETRY_SECONDS),
    )
