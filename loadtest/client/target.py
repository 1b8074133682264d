"""The server under test: its address, what it says about itself, and requests for it."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from penstock.loadtest.client.connection import ConnectFailed, ConnectionGone, ConnectionPool
from penstock.loadtest.client.http_response import BadResponse
from penstock.loadtest.client.prompts import Prompt

READY_POLL_S = 0.25
READY_S = 120.0
"""A server that answers, and is not ready, has so long where nothing else is said."""
READY_HELP = (
    "wait so long for a server that is starting, even where nothing listens yet (default: "
    f"{READY_S:.0f} for one that answers)"
)
READY_ANSWER_S = 10.0
"""One question to a server that is starting may take this long."""
NOBODY_LISTENS = (
    "start a server there (`penstock serve`), name another with --base-url, or let "
    "--ready-timeout SECONDS wait for one that is starting"
)
NEVER_READY = (400, 401, 403, 405)
"""Waiting does not help against these."""


class TargetError(ValueError):
    """The server cannot be used. The message says what to change."""


class ServedModel(msgspec.Struct, frozen=True):
    """One entry of ``/v1/models``."""

    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[ServedModel]


class _Body:
    """Receives a small response whole."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.data = b""

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.status, self.headers = status, headers

    def body(self, data: bytes) -> None:
        self.data += data


class Target:
    """An OpenAI-compatible server. ``url`` may have a path, which goes before every other."""

    def __init__(self, url: str, endpoint: str, headers: Mapping[str, str]) -> None:
        """Raises ``TargetError`` if ``url`` is none."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError as error:
            raise TargetError(f"--base-url {url}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise TargetError(f"--base-url {url}: expected http://HOST:PORT or https://HOST:PORT")
        secure = parts.scheme == "https"
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self.endpoint = endpoint
        self.chat = "chat" in endpoint
        self._root = parts.path.rstrip("/")
        if self._root.endswith("/v1") and endpoint.startswith("/v1/"):
            self._root = self._root[: -len("/v1")]  # the SDKs' base URLs end with it
        context = ssl.create_default_context() if secure else None
        self.pool = ConnectionPool(parts.hostname, port or (443 if secure else 80), context)
        self.server = ""
        """The ``Server`` header."""
        common = {"Host": parts.netloc.rpartition("@")[2], "Accept-Encoding": "identity", **headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in common.items())
        try:
            self._common = lines.encode("latin-1")
        except UnicodeEncodeError:
            raise TargetError("--header and --api-key may hold Latin-1 characters only") from None

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body. Raises ``ConnectFailed``, ``ConnectionGone``, ``BadResponse``."""
        answer = _Body()
        head = f"GET {self._root}{path} HTTP/1.1\r\n".encode()
        await self.pool.request(head + self._common + b"\r\n", answer)
        self.server = answer.headers.get("server", self.server)
        return answer.status, answer.data

    def post(self, body: bytes) -> bytes:
        """The bytes of a request to the endpoint."""
        line = f"POST {self._root}{self.endpoint} HTTP/1.1\r\n".encode()
        framing = b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        return b"".join((line, self._common, framing, body))

    async def wait_ready(self, seconds: float | None, *, named: bool = False) -> list[ServedModel]:
        """Wait until ``/v1/models`` answers. Returns the models; empty if there is no such list.

        ``seconds``: that long at most, even where nothing listens yet; ``None``: ``READY_S`` for a
        server that answers, and not at all where nothing listens.
        ``named``: the model's name is known, so that a list which is still empty in the end will
        do. (Servers list nothing while they start; `transformers serve` never lists a folder.)
        Raises ``TargetError``.
        """
        listens = seconds is None
        seconds = READY_S if seconds is None else seconds
        deadline = time.monotonic() + seconds
        while True:
            empty = False
            try:
                async with asyncio.timeout(READY_ANSWER_S):
                    status, body = await self.get("/v1/models")
            except (ConnectFailed, ConnectionGone, BadResponse) as error:
                reason = str(error)
                if listens and isinstance(error, ConnectFailed):
                    raise TargetError(f"{self.url}: {reason}; {NOBODY_LISTENS}") from None
            except TimeoutError:
                reason = f"no answer within {READY_ANSWER_S:.0f} s"
            else:
                if status == 200:
                    models = _models(body)
                    if models:
                        return models
                    empty = True
                    reason = "/v1/models lists no model; name one with --model"
                elif status == 404:
                    return []
                else:
                    reason = f"/v1/models answered {status}"
                    if status in NEVER_READY:
                        hint = "; set --api-key or PENSTOCK_API_KEY" if status in (401, 403) else ""
                        raise TargetError(f"{self.url}: {reason}{hint}")
            if time.monotonic() >= deadline:
                if empty and named:
                    return []
                raise TargetError(
                    f"{self.url} was not ready within {seconds:g} s (--ready-timeout): {reason}"
                )
            await asyncio.sleep(READY_POLL_S)

    async def version(self) -> str | None:
        """What ``/version`` says, if the server has it."""
        try:
            async with asyncio.timeout(READY_ANSWER_S):
                status, body = await self.get("/version")
            found = msgspec.json.decode(body)["version"] if status == 200 else None
        except (OSError, BadResponse, msgspec.MsgspecError, KeyError, TypeError):
            return None  # TimeoutError is an OSError
        return str(found) if found is not None else None


def _models(body: bytes) -> list[ServedModel]:
    try:
        return msgspec.json.decode(body, type=_Models).data
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TargetError(f"/v1/models is no list of models: {error}") from None


def request_body(prompt: Prompt, *, model: str, chat: bool, extra: dict[str, Any]) -> bytes:
    """The JSON of one request. A member of ``extra`` replaces ours; ``None`` takes it out."""
    body: dict[str, Any] = {"model": model}
    if chat:
        content = prompt.content
        body["messages"] = content if prompt.is_messages else [{"role": "user", "content": content}]
        body["max_completion_tokens"] = prompt.output_len
    else:
        body["prompt"] = prompt.content
        body["max_tokens"] = prompt.output_len
    body["stream"] = True
    body["stream_options"] = {"include_usage": True}
    body |= extra
    return msgspec.json.encode({name: value for name, value in body.items() if value is not None})
