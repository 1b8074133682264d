"""How many connections this process can hold: each is an open file."""

from __future__ import annotations

import resource

MAX_CONNECTIONS = 16_384
GRPC_CONNECTIONS = 4096
"""Each carries many calls."""
RESERVED = 128
"""Open files for all else: sockets to other processes, logs, libraries."""


def connection_limits(*, grpc: bool) -> tuple[int, int]:
    """Connections of HTTP and of gRPC that this process can hold, with as many open files as it may
    have. grpc: it serves that, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    of_grpc = GRPC_CONNECTIONS if grpc else 0
    wanted = MAX_CONNECTIONS + of_grpc + RESERVED
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS, of_grpc
    free = max(2, soft - RESERVED)
    of_grpc = min(of_grpc, free // 4 or 1)
    return min(MAX_CONNECTIONS, free - of_grpc), of_grpc
