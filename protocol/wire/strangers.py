"""Who connects to an inbox on tcp and fails the handshake: told once a host, for the log.

Nobody without the secret gets a message through, with or without this; but an operator who gave
one process another secret must hear of it on both sides.
"""

from __future__ import annotations

import contextlib
import os
import socket

import zmq
from zmq.utils.monitor import parse_monitor_message

from penstock.protocol.wire.security import BAD_HANDSHAKE

EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | BAD_HANDSHAKE
_MAX_TOLD = 1024
"""Hosts; after so many different ones nobody is named any more."""
_NAMELESS = 10
"""Connections too short to see their host, before they are told of all the same."""


class Strangers:
    """Reads the monitor of an inbox. ZeroMQ names no peer in the event of a failed handshake;
    the descriptor of the connection does, as long as it is open: read soon."""

    def __init__(self, monitor: zmq.Socket[bytes], address: str) -> None:
        self._monitor = monitor
        self._address = address
        self._hosts: dict[int, str] = {}
        """The hosts of the open connections, by descriptor."""
        self._failed = False
        """The next connection that ends is the one whose handshake failed."""
        self._told: set[str] = set()
        self._nameless = 0
        self._complaints: list[str] = []

    @property
    def fd(self) -> int:
        """For an event loop. Edge triggered: ``read`` when it fires."""
        return int(self._monitor.getsockopt(zmq.FD))

    def read(self) -> None:
        """Take all events that are there."""
        while True:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            kind, value = event["event"], event["value"]
            if kind == zmq.EVENT_ACCEPTED:
                self._hosts[value] = _host_behind(value)
            elif kind & BAD_HANDSHAKE:
                self._failed = True
            elif kind == zmq.EVENT_DISCONNECTED:
                host = self._hosts.pop(value, "")
                if self._failed:
                    self._failed = False
                    self._tell(host)

    def _tell(self, host: str) -> None:
        if host in self._told or len(self._told) >= _MAX_TOLD:
            return
        if not host:
            # Who means it comes again, and then is seen in time; a single one was a port scan.
            self._nameless += 1
            if self._told or self._nameless < _NAMELESS:
                return
        self._told.add(host)
        self._complaints.append(
            f"refused a connection from {host or 'a host already gone'} to {self._address} in the "
            "handshake: a process there has another --secret or none, or is no part of penstock; "
            "all processes of a cluster need the same --secret"
        )

    def complaints(self) -> list[str]:
        """What there is to say since the last call."""
        self.read()
        complaints, self._complaints = self._complaints, []
        return complaints

    def close(self) -> None:
        self._monitor.close(linger=0)


def _host_behind(descriptor: int) -> str:
    """The other end of a connection that ZeroMQ owns; empty when it is closed already."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
        return str(copy.getpeername()[0])
    return ""
