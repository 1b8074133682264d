"""Whose request it is that a proxy has passed on.

A header can be written by anybody, so ``X-Forwarded-For`` is believed of proxies that were named
alone. It grows at its end: from there the first address that is no proxy of ours is the client's.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from aiohttp import web

UNIX_PROXIES = "unix"
"""Among the proxies: who connects to the UNIX socket."""
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
HEADER = "X-Forwarded-For"
MAX_ADDRESSES = 32
"""Of a header, those that are looked at."""


def read_networks(values: Sequence[str]) -> list[Network]:
    """Addresses and networks. Raises ``ValueError``."""
    given = (value for value in values if value != UNIX_PROXIES)
    return [ipaddress.ip_network(value, strict=False) for value in given]


class TrustedProxies:
    def __init__(self, values: Sequence[str]) -> None:
        """Raises ``ValueError`` for what is no address and no network."""
        self._networks = read_networks(values)
        self._trusts_unix = UNIX_PROXIES in values
        """HTTP is on a UNIX socket alone then, where a client has no address."""

    def client_of(self, request: web.BaseRequest) -> str:
        """The address that a request came from; empty where it is not known."""
        return self.client(request.remote or "", request.headers.getall(HEADER, ()))

    def client(self, peer: str, headers: Sequence[str]) -> str:
        """The same of who has connected, and what stands in each header of that name."""
        if not (self._trusts_unix if not peer else self._networks and self._trusts(peer)):
            return peer
        found = peer
        for text in reversed(",".join(headers).split(",")[-MAX_ADDRESSES:]):
            address = _bare(text)
            if address is None:  # nothing before it can be believed
                break
            found = address
            if not self._trusts(address):
                break
        return found

    def _trusts(self, address: str) -> bool:
        try:
            known = ipaddress.ip_address(address)
        except ValueError:
            return False
        if isinstance(known, ipaddress.IPv6Address) and known.ipv4_mapped is not None:
            known = known.ipv4_mapped
        return any(known.version == one.version and known in one for one in self._networks)


def _bare(text: str) -> str | None:
    """An address without its port and brackets, as it is written shortest; ``None``: it is none."""
    text = text.strip().strip('"')
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None
