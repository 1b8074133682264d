"""A client of the OpenAI API for commands: one connection for each request, nothing to import.

A request is given up by closing its connection, upon which the server cancels it.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgspec

from penstock import __version__
from penstock.protocol.wire.unix_listener import connected
from penstock.services.commands.endpoint import UNIX, Endpoint
from penstock.services.commands.failure import FAILED, UNREACHABLE, CommandError
from penstock.services.commands.printable import one_line
from penstock.services.commands.server_answers import check_chunk

CONNECT_S = 10.0
ANSWER_S = 30.0
"""For an answer that no prompt is computed for, from its first byte to its last."""
MAX_MESSAGE = 2000
"""Characters of a server's error that are shown."""
MAX_BYTES = 16 << 20
"""Of such an answer, and of a line of a stream."""


class Refused(CommandError):
    """The server answered with an error."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message, FAILED)
        self.status = status


class _UnixConnection(http.client.HTTPConnection):
    """HTTP to whoever listens at a path."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=CONNECT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = connected(self._path, CONNECT_S)


class ApiClient:
    """Asks one server. Its methods raise ``CommandError``, and ``Refused`` for its errors."""

    def __init__(self, endpoint: Endpoint, answer_s: float = ANSWER_S) -> None:
        """answer_s: seconds that ``get`` waits for a whole answer."""
        self.endpoint = endpoint
        self._answer_s = answer_s
        self._is_late = False
        self._open: socket.socket | None = None
        """The socket of the request that is being answered."""
        self._interrupted = False

    def get(self, path: str) -> Any:
        """An answer of bounded size, in bounded time."""
        with self._within(self._answer_s), self._request("GET", path, None) as response:
            data = self._reading(lambda: response.read(MAX_BYTES + 1))
            self._check_size(data)
            return _decoded(data, self.endpoint.url)

    def post(self, path: str, body: dict[str, Any], answer_s: float | None = None) -> Any:
        """answer_s: seconds to wait for the whole answer; ``None``: as long as its prompt takes."""
        with self._within(answer_s), self._request("POST", path, body) as response:
            return _decoded(self._reading(response.read), self.endpoint.url)

    @contextlib.contextmanager
    def _within(self, seconds: float | None) -> Iterator[None]:
        """Give a request up that is not over after so long; ``None``: there is no limit."""
        self._is_late = False
        if seconds is None:
            yield
            return
        clock = threading.Timer(seconds, self._give_up)
        clock.daemon = True
        clock.start()
        try:
            yield
        except CommandError:
            if self._is_late:
                raise CommandError(
                    f"{self.endpoint.url} did not answer within {seconds:g} s", UNREACHABLE
                ) from None
            raise
        finally:
            clock.cancel()

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of an answer as they come. To close the iterator cancels the request."""
        with self._within(None), self._request("POST", path, {**body, "stream": True}) as response:
            while line := self._reading(lambda: response.readline(MAX_BYTES + 1)):
                self._check_size(line)
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                chunk = _decoded(data, self.endpoint.url)
                if isinstance(chunk, dict) and chunk.get("error"):
                    raise Refused(_message(chunk, response.status), response.status)
                check_chunk(chunk, self.endpoint.url)
                yield chunk
        raise CommandError(f"{self.endpoint.url} broke the answer off", UNREACHABLE)

    def interrupt(self) -> None:
        """End the request that is being answered; a signal handler may call it. Its reader then
        comes to the end of the answer, as if the server had closed it."""
        self._interrupted = True
        self._break_off()

    def _give_up(self) -> None:
        self._is_late = True
        self._break_off()

    def _break_off(self) -> None:
        if (connected := self._open) is not None:
            with contextlib.suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)

    def _check_size(self, data: bytes) -> None:
        if len(data) > MAX_BYTES:
            raise CommandError(f"{self.endpoint.url} sent more than {MAX_BYTES >> 20} MiB at once")

    @contextlib.contextmanager
    def _request(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> Iterator[http.client.HTTPResponse]:
        connection = self._connection()
        self._interrupted = False
        try:
            connection.connect()
            # An answer may begin as late as its prompt is long.
            connection.sock.settimeout(None)
            self._open = connection.sock
            if self._interrupted or self._is_late:
                raise ConnectionAbortedError("interrupted")
            headers = {"User-Agent": f"penstock/{__version__}", "Accept": "*/*"}
            if self.endpoint.key:
                headers["Authorization"] = f"Bearer {self.endpoint.key}"
            content = None
            if body is not None:
                content, headers["Content-Type"] = msgspec.json.encode(body), "application/json"
            connection.request(method, self.endpoint.prefix + path, content, headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise CommandError(
                f"{self.endpoint.url} cannot be reached: {_reason(error)}{_remedy(error)}",
                UNREACHABLE,
            ) from None
        try:
            if response.status >= 300:
                raise self._refused(response)
            yield response
        finally:
            self._open = None
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        host, port = self.endpoint.host, self.endpoint.port
        if self.endpoint.scheme == UNIX:
            return _UnixConnection(host)
        if self.endpoint.scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=CONNECT_S)
        return http.client.HTTPConnection(host, port, timeout=CONNECT_S)

    def _reading(self, read: Any) -> bytes:
        try:
            data: bytes = read()
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise CommandError(
                f"the connection to {self.endpoint.url} broke: {_reason(error)}", UNREACHABLE
            ) from None
        return data

    def _refused(self, response: http.client.HTTPResponse) -> Refused:
        data = self._reading(lambda: response.read(1 << 20))
        try:
            message = _message(msgspec.json.decode(data), response.status)
        except (msgspec.DecodeError, UnicodeDecodeError):
            message = f"{self.endpoint.url} answered {response.status} {one_line(response.reason)}"
        if response.status == 401:
            message += "; give a key with --api-key or PENSTOCK_API_KEY"
        return Refused(message, response.status)


def _remedy(error: Exception) -> str:
    refused = isinstance(error, ConnectionRefusedError | FileNotFoundError)
    return "; `penstock serve` starts a server" if refused else ""


def _decoded(data: bytes, url: str) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise CommandError(f"{url} sent an answer that is no JSON") from None


def _message(body: Any, status: int) -> str:
    """The message of an error in any form that servers of this API give it."""
    error = body.get("error", body) if isinstance(body, dict) else body
    text = error.get("message") if isinstance(error, dict) else error
    return one_line(str(text))[:MAX_MESSAGE] if text else f"the server answered {status}"


def _reason(error: Exception) -> str:
    verification = getattr(error, "verify_message", "")  # of ssl.SSLCertVerificationError
    if verification:
        return (
            f"its certificate is not trusted ({verification}); SSL_CERT_FILE names those that are"
        )
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
