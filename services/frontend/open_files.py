"""How many connections this process can hold: each is an open file."""

from __future__ import annotations

import resource

MAX_CONNECTIONS = 16_384
RESERVED = 128
"""Open files for all else: sockets to other processes, logs, libraries."""


def connection_limit() -> int:
    """Connections that this process can hold, with as many open files as it may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + RESERVED
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, soft - RESERVED))
