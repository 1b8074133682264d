"""Reads HTTP/1.1 responses from bytes as they come.

Only what a load generator needs, so that one server-sent event costs well under a microsecond
here (aiohttp's client takes about 25 µs an event: a task switch for each read of its stream).
Framing as in RFC 9112 section 6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

MAX_HEAD_BYTES = 64 * 1024


class BadResponse(ValueError):
    """The bytes are no HTTP/1.1 response, or it ended too early."""


class Receiver(Protocol):
    """Takes what is read."""

    def head(self, status: int, headers: dict[str, str]) -> None:
        """Status and headers; names in lower case, of equal names the last."""

    def body(self, data: bytes) -> None:
        """The next bytes of the body, never empty."""


class ResponseReader:
    """Reads one response and hands its parts to ``receiver``."""

    __slots__ = ("_held", "_left", "_receiver", "_state", "finished", "keep_alive")

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._held = b""
        self._left = 0
        self._state: Callable[[bytes, int], int] = self._head
        self.finished = False
        self.keep_alive = True

    def feed(self, data: bytes) -> None:
        """Take bytes from the connection. Raises ``BadResponse``."""
        if self._held:
            data, self._held = self._held + data, b""
        position, size = 0, len(data)
        while position < size:
            after = self._state(data, position)
            if after < 0:
                self._held = data[position:]
                if len(self._held) > MAX_HEAD_BYTES:
                    raise BadResponse(f"a header or chunk size of more than {MAX_HEAD_BYTES} bytes")
                return
            position = after

    def end_of_input(self) -> None:
        """The server closed the connection. Raises ``BadResponse`` if the response is not whole."""
        if self._state == self._until_close:
            self.finished = True
        if not self.finished:
            raise BadResponse("the connection was closed before the end of the response")

    # One method a state. Each returns the position after what it read, or -1 for "not enough yet".

    def _head(self, data: bytes, position: int) -> int:
        end = data.find(b"\r\n\r\n", position)
        if end < 0:
            return -1
        lines = data[position:end].decode("latin-1").split("\r\n")
        version, _, rest = lines[0].partition(" ")
        code = rest[:3]
        if not version.startswith("HTTP/1.") or not code.isdigit():
            raise BadResponse(f"expected HTTP/1.1, got {lines[0][:60]!r}")
        status = int(code)
        if status < 200:  # 100 Continue and the like come before the real head
            return end + 4
        headers = {}
        for line in lines[1:]:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        connection = headers.get("connection", "").lower()
        old = version == "HTTP/1.0"
        self.keep_alive = connection == "keep-alive" if old else connection != "close"
        self._receiver.head(status, headers)
        self._choose_framing(status, headers)
        return end + 4

    def _choose_framing(self, status: int, headers: dict[str, str]) -> None:
        length = headers.get("content-length")
        if status in (204, 304):
            self._finish()
        elif headers.get("transfer-encoding", "").lower() == "chunked":
            self._state = self._chunk_size
        elif length is not None:
            if not length.isdigit():
                raise BadResponse(f"Content-Length is {length[:60]!r}")
            self._left = int(length)
            self._state = self._counted
            if not self._left:
                self._finish()
        else:
            self.keep_alive = False
            self._state = self._until_close

    def _finish(self) -> None:
        self.finished = True
        self._state = self._surplus

    def _counted(self, data: bytes, position: int) -> int:
        piece = data[position : position + self._left]
        self._left -= len(piece)
        self._receiver.body(piece)
        if not self._left:
            self._finish()
        return position + len(piece)

    def _chunk_size(self, data: bytes, position: int) -> int:
        end = data.find(b"\r\n", position)
        if end < 0:
            return -1
        try:
            size = int(data[position:end].partition(b";")[0], 16)
        except ValueError:
            raise BadResponse(f"no chunk size: {data[position:end][:60]!r}") from None
        if size:
            self._left = size + 2  # the chunk ends with CRLF
            self._state = self._chunk
        else:
            self._state = self._trailer
        return end + 2

    def _chunk(self, data: bytes, position: int) -> int:
        take = min(self._left, len(data) - position)
        payload = min(take, self._left - 2)
        if payload > 0:
            self._receiver.body(data[position : position + payload])
        self._left -= take
        if not self._left:
            self._state = self._chunk_size
        return position + take

    def _trailer(self, data: bytes, position: int) -> int:
        end = data.find(b"\r\n", position)
        if end < 0:
            return -1
        if end == position:
            self._finish()
        return end + 2

    def _until_close(self, data: bytes, position: int) -> int:
        self._receiver.body(data[position:])
        return len(data)

    def _surplus(self, data: bytes, position: int) -> int:
        raise BadResponse(f"bytes after the end of the response: {data[position:][:60]!r}")
