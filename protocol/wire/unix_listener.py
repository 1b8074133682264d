"""A listening UNIX socket at a path, which ends with whoever listens there."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Callable

from penstock.protocol.wire.addresses import AddressError

LONGEST_PATH = 107
"""Bytes that the kernel takes (unix(7)), without the zero at the end."""
_PROBE_SECONDS = 1.0


def listen_at(
    path: str, mode: int, backlog: int, flag: str = "--uds"
) -> tuple[socket.socket, Callable[[], None]]:
    """A socket that listens at a path, which gets these permissions before anybody can connect;
    and what removes the path, so that nobody connects any more, while who has connected is served.
    That may be called more than once, and leaves alone what others have put there since.

    A socket that nobody listens on is what a killed process left, and gives way. Raises
    ``AddressError`` where somebody does, and where the path cannot be used.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        make_way(path, flag)
        listener.bind(path)
        os.chmod(path, mode)
        listener.listen(backlog)
        made = _file(path)
    except OSError as error:
        listener.close()
        raise AddressError(f"cannot listen on {flag} {path}: {error.strerror or error}") from None
    except AddressError:
        listener.close()
        raise

    def vacate() -> None:
        with contextlib.suppress(OSError):
            if _file(path) == made:
                os.unlink(path)

    return listener, vacate


def _file(path: str) -> tuple[int, int, int]:
    """Which file it is: a later one may get the number of one that is gone, but not its time, which
    other permissions leave as it is. Raises ``OSError``."""
    found = os.lstat(path)
    return found.st_dev, found.st_ino, found.st_mtime_ns


def connected(path: str, timeout_s: float) -> socket.socket:
    """A connection to whoever listens at a path. Raises ``OSError``."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    found.settimeout(timeout_s)
    try:
        found.connect(path)
    except BaseException:
        found.close()
        raise
    return found


def make_way(path: str, flag: str) -> None:
    """Remove a socket that nobody listens on. Raises ``AddressError`` for what is in use, or no
    socket; ``OSError``."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise AddressError(f"cannot listen on {flag} {path}: there is something else than a socket")
    try:
        connected(path, _PROBE_SECONDS).close()
    except ConnectionRefusedError:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:  # a queue that is full, or a socket of another user
        raise AddressError(
            f"cannot listen on {flag} {path}: it seems to be in use ({error.strerror or error})"
        ) from None
    else:
        raise AddressError(
            f"cannot listen on {flag} {path}: another process listens there; choose another path"
        )
