"""Facts about network addresses that need no socket."""

from __future__ import annotations

import ipaddress


class AddressError(ValueError):
    """An address cannot be bound or has no valid form. The message says which and why."""


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
