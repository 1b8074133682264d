"""The bytes of the events of one response, numbered as they are written.

Over HTTP an event is a server-sent event, on a WebSocket one line of JSON, which becomes a message.
"""

from __future__ import annotations

from typing import Any

from penstock.services.frontend.errors import ApiError
from penstock.services.frontend.json_lines import encode


class EventWriter:
    """Writes events. Whatever is written must go out, in that order."""

    __slots__ = ("_lane", "_streams", "number")

    def __init__(self, *, is_socket: bool = False, lane: str | None = None) -> None:
        """lane: the ``stream_id`` of a WebSocket's request."""
        self.number = 0
        """Of the next event."""
        self._streams = not is_socket
        self._lane = b"" if lane is None else b',"stream_id":' + encode(lane)

    def event(self, kind: str, **fields: Any) -> bytes:
        """One event. Fields are written as msgspec writes them."""
        rest = encode(fields)[1:] if fields else b"}"
        return b"%s%s%s%s%s" % (
            self._opening(kind),
            self._next(),
            self._lane,
            b"," if fields else b"",
            self._closed(rest),
        )

    def error(self, error: ApiError) -> bytes:
        """An error. On a WebSocket it has what the status and headers of HTTP would tell."""
        fields: dict[str, Any] = {
            "code": error.code or error.kind,
            "message": error.message,
            "param": error.param,
        }
        if not self._streams:
            fields["status"] = error.status
            fields["error"] = {**fields, "type": error.kind, "headers": error.headers}
            del fields["error"]["status"]
        return self.event("error", **fields)

    def delta_opening(self, kind: str, **fields: Any) -> bytes:
        """The beginning of many events of one kind, which ``delta`` completes."""
        return b'%s%%d%s,%s,"delta":' % (
            self._opening(kind).replace(b"%", b"%%"),
            self._lane.replace(b"%", b"%%"),
            encode(fields)[1:-1].replace(b"%", b"%%"),
        )

    def delta(self, opening: bytes, text: str) -> bytes:
        """One of the events that ``delta_opening`` begins."""
        number, self.number = self.number, self.number + 1
        return opening % number + encode(text) + (b"}\n\n" if self._streams else b"}\n")

    def _opening(self, kind: str) -> bytes:
        name = kind.encode()
        head = b"event: %s\ndata: " % name if self._streams else b""
        return b'%s{"type":"%s","sequence_number":' % (head, name)

    def _next(self) -> bytes:
        number, self.number = self.number, self.number + 1
        return b"%d" % number

    def _closed(self, rest: bytes) -> bytes:
        return rest + (b"\n\n" if self._streams else b"\n")
