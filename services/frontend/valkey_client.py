"""A client of a Valkey or Redis server, whose library is optional."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.protocol.config import ConfigError
from penstock.services.frontend.valkey_address import ValkeyAddress

if TYPE_CHECKING:
    from valkey.asyncio import Valkey


def connect(
    address: ValkeyAddress, operation_s: float, connections: int, given: str, extra: str
) -> Valkey:
    """A client that connects when it is first needed, with so many connections at most.

    operation_s: for connecting and for an answer. given: flag and value, for the error. Raises
    ``ConfigError`` where the library is missing, naming the extra that brings it.
    """
    try:
        from valkey.asyncio import BlockingConnectionPool, SSLConnection, Valkey
    except ImportError:
        raise ConfigError(
            f"{given} needs the package valkey, which is not installed: "
            f"pip install 'penstock[{extra}]'"
        ) from None
    tls: dict[str, Any] = {}
    if address.tls:
        tls = {"connection_class": SSLConnection, "ssl_ca_certs": address.ca_file}
    pool = BlockingConnectionPool(
        max_connections=connections,
        timeout=None,  # whoever waits has a limit for all of it
        host=address.host,
        port=address.port,
        db=address.db,
        username=address.username,
        password=address.password,
        socket_connect_timeout=operation_s,
        socket_timeout=operation_s,
        client_name="penstock",
        **tls,
    )
    return Valkey(connection_pool=pool)


def answered_errors() -> type[Exception]:
    """The exception of a server that can be reached and refuses a command."""
    from valkey.exceptions import ResponseError

    return ResponseError
