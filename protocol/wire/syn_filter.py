"""Closing a listening TCP port without cutting anybody off.

The kernel completes handshakes by itself: a client counts as connected, and may have sent its
request, before any process has accepted the connection. Closing the listening socket resets all
that still wait, so the last look at them must come after the last handshake. A socket filter drops
what asks for a new connection; such a client asks again after a second, and is then refused, or
served by whoever listens by then.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
import sys

_ATTACH_FILTER = 26  # SO_ATTACH_FILTER, which the socket module does not name
_FLAGS_AT, _SYN = 13, 0x02  # in the TCP header (RFC 9293, section 3.1)
_PROGRAM = (
    (0x30, 0, 0, _FLAGS_AT),  # load the byte of the flags
    (0x45, 0, 1, _SYN),  # is SYN set?
    (0x06, 0, 0, 0),  # drop the packet
    (0x06, 0, 0, 0xFFFF_FFFF),  # keep it whole
)
"""Instructions of classic BPF: (code, jump if true, jump if false, operand)."""


def take_no_more_connections(listener: socket.socket) -> None:
    """Begin no further handshake on a listening socket, whichever processes share it.

    Where the system knows no such filter nothing happens, and a connection that comes in the very
    moment of closing is reset.
    """
    if not sys.platform.startswith("linux"):
        return
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in _PROGRAM))
    described = struct.pack("HL", len(_PROGRAM), ctypes.addressof(program))
    with contextlib.suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, described)
