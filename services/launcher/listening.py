"""The HTTP port: bound once by the launcher, before anything loads; frontends inherit it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path

from penstock.protocol.config.server_fields import ServerConfig
from penstock.protocol.wire.addresses import AddressError
from penstock.protocol.wire.syn_filter import take_no_more_connections
from penstock.protocol.wire.unix_listener import connected, listen_at

BACKLOG = 1024
"""Connections that wait while no frontend accepts, for example during a restart."""
_PROBE = b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
_PROBE_SECONDS = 1.0
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises ``AddressError`` that says what to change.

    Bound plainly, so that a port in somebody else's hands is noticed; SO_REUSEPORT only
    afterwards, so that a frontend started by hand may join (checked on Linux: a later socket with
    SO_REUSEPORT joins, one without is refused). It listens at once: two sockets that are only
    bound, both with SO_REUSEADDR, do not notice each other.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise AddressError(f"--host {host}: {error.strerror or error}") from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise AddressError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port"
        ) from None
    return listener


def listen_for(server: ServerConfig) -> tuple[socket.socket, Callable[[], None]]:
    """The socket of HTTP, and what lets nobody else connect while who has connected is served.
    Raises ``AddressError``."""
    if server.uds:
        path = os.path.abspath(os.path.expanduser(server.uds))
        return listen_at(path, int(server.uds_mode, 8), BACKLOG)
    listener = listen(server.host, server.port)
    return listener, partial(take_no_more_connections, listener)


def reserve(host: str, port: int, flag: str) -> socket.socket:
    """A TCP port that nobody listens on yet: processes with sockets of their own will, by
    SO_REUSEPORT. Raises ``AddressError``.

    A socket that has listened keeps its port when it is shut down, and the kernel hands it no more
    connections (checked on Linux); so the port is known, and in nobody else's hands.
    """
    try:
        listener = listen(host, port)
    except AddressError as error:
        raise AddressError(str(error).replace("--port", flag).replace("--host", flag)) from None
    listener.shutdown(socket.SHUT_RDWR)
    return listener


def at(listener: socket.socket) -> str:
    """``127.0.0.1:50051``: where a client on this host reaches the port of a socket."""
    host, port = _reachable(listener)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def url(listener: socket.socket, *, tls: bool = False) -> str:
    """Where a client on this host reaches the socket: ``http://127.0.0.1:8000``, or
    ``unix:/run/penstock.sock``."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    return f"{'https' if tls else 'http'}://{at(listener)}"


def unix_url(path: str) -> str:
    """``unix:/run/penstock.sock``; empty without a path."""
    return f"unix:{os.path.abspath(os.path.expanduser(path))}" if path else ""


def _reachable(listener: socket.socket) -> tuple[str, int]:
    host, port = listener.getsockname()[:2]
    return _ANY.get(host, host), port


def _probing(listener: socket.socket) -> socket.socket:
    """Raises ``OSError``."""
    if listener.family == socket.AF_UNIX:
        return connected(listener.getsockname(), _PROBE_SECONDS)
    return socket.create_connection(_reachable(listener), timeout=_PROBE_SECONDS)


def answers_ready(listener: socket.socket, *, tls: bool = False) -> bool:
    """Whether a frontend behind the socket says on ``/ready`` that requests are served."""
    try:
        with contextlib.ExitStack() as stack:
            probe = stack.enter_context(_probing(listener))
            if tls:  # it is our own socket: nobody's certificate is to be looked at
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
                probe = stack.enter_context(context.wrap_socket(probe))
            probe.sendall(_PROBE)
            return probe.recv(64).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


def check_router_is_free(router: str) -> None:
    """Raises ``AddressError`` when another server's router has the address.

    Otherwise this server's processes would join that one before our router could complain.
    """
    in_use = AddressError(
        f"{router} is in use by another process; choose another --router or --runtime-dir"
    )
    if router.startswith("ipc://"):
        lock = Path(router.removeprefix("ipc://")).with_suffix(".lock")  # held by its mailbox
        try:
            with open(lock) as held:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return
        except OSError:
            raise in_use from None
        return
    host, _, port = router.removeprefix("tcp://").rpartition(":")
    if not router.startswith("tcp://") or not host or not port.isdecimal():
        raise AddressError(f"--router {router}: expected ipc://PATH or tcp://HOST:PORT")
    try:
        listen(host, int(port)).close()
    except AddressError:
        raise in_use from None
