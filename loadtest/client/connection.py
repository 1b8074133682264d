"""Connections to the server under test: raw asyncio protocols, kept alive and used again."""

from __future__ import annotations

import asyncio
import ssl
from typing import cast

from penstock.loadtest.client.http_response import BadResponse, Receiver, ResponseReader


class ConnectFailed(OSError):
    """No connection to the server could be made."""


class ConnectionGone(OSError):
    """The connection ended before the response did."""


class Connection(asyncio.Protocol):
    """One connection; carries one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._reader: ResponseReader | None = None
        self._done: asyncio.Future[None] | None = None
        self.usable = True
        """Open and between two responses."""
        self.silent = True
        """Nothing came back for the request that was sent last."""

    async def exchange(self, request: bytes, receiver: Receiver) -> None:
        """Send a request and hand its response to ``receiver``; returns when it is whole.

        Raises ``ConnectionGone`` and ``BadResponse``. Cancelled, it closes the connection.
        """
        if self._transport is None or not self.usable:
            raise ConnectionGone("the connection is closed")
        self.usable = False
        self.silent = True
        reader = self._reader = ResponseReader(receiver)
        done = self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await done
        except BaseException:
            self.close()
            raise
        self.usable = reader.keep_alive and not self._transport.is_closing()
        if not self.usable:
            self.close()

    def close(self) -> None:
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        reader, done = self._reader, self._done
        if reader is None or done is None or done.done():
            self.close()  # nobody asked for it
            return
        self.silent = False
        try:
            reader.feed(data)
        except BadResponse as error:
            done.set_exception(error)
            return
        if reader.finished:
            done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        reader, done = self._reader, self._done
        if reader is None or done is None or done.done():
            return
        try:
            reader.end_of_input()
        except BadResponse as error:
            reason = f": {exc}" if exc else ""
            done.set_exception(ConnectionGone(f"{error}{reason}"))
        else:
            done.set_result(None)


class ConnectionPool:
    """Connections to one address: the one used last is used next, a new one if none is free."""

    def __init__(self, host: str, port: int, context: ssl.SSLContext | None = None) -> None:
        self._host, self._port, self._context = host, port, context
        self._idle: list[Connection] = []
        self.opened = 0
        """Connections made so far."""

    async def request(self, request: bytes, receiver: Receiver) -> None:
        """Send a request; see ``Connection.exchange``. Raises also ``ConnectFailed``.

        A server may close an idle connection at any time. A request that met such a close, with
        no byte of answer, is sent again on another connection (RFC 9112 section 9.3.1).
        """
        while self._idle:
            connection = self._idle.pop()
            if not connection.usable:
                continue
            try:
                await connection.exchange(request, receiver)
            except ConnectionGone:
                if connection.silent:
                    continue
                raise
            self._keep(connection)
            return
        connection = await self._connect()
        await connection.exchange(request, receiver)
        self._keep(connection)

    def _keep(self, connection: Connection) -> None:
        if connection.usable:
            self._idle.append(connection)

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                Connection, self._host, self._port, ssl=self._context
            )
        except OSError as error:
            where = f"{self._host}:{self._port}"
            raise ConnectFailed(f"cannot connect to {where}: {error.strerror or error}") from None
        self.opened += 1
        return connection

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
