"""Breaks the connections between the ranks of an engine while their processes live on.

Another process's socket is had by ``pidfd_getfd(2)`` (Linux 5.6; root, or whoever may trace the
process, as its ancestor may) and shut down in both directions: each end reads the end of the
stream, as it does when a host or what lies between two of them resets a connection.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Iterator

import psutil

PIDFD_GETFD = 438
"""The number of the system call, on every architecture."""


@contextlib.contextmanager
def links_of(victim: psutil.Process, others: list[psutil.Process]) -> Iterator[list[socket.socket]]:
    """The victim's ends of its TCP connections with the others."""
    theirs = {one.laddr for other in others for one in other.net_connections("tcp")}
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(_socket_of(victim.pid, one.fd))
            for one in victim.net_connections("tcp")
            if one.status == psutil.CONN_ESTABLISHED and one.raddr in theirs
        ]


def break_all(links: list[socket.socket]) -> None:
    for link in links:
        with contextlib.suppress(OSError):  # the other end has closed it
            link.shutdown(socket.SHUT_RDWR)


def _socket_of(pid: int, number: int) -> socket.socket:
    """A descriptor of our own for another process's socket."""
    process = os.pidfd_open(pid)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        found = libc.syscall(PIDFD_GETFD, process, number, 0)
        if found < 0:
            why = os.strerror(ctypes.get_errno())
            raise OSError(f"pidfd_getfd of descriptor {number} of process {pid}: {why}")
        return socket.socket(fileno=found)
    finally:
        os.close(process)
