"""Which server a command talks to, and with which key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import msgspec

from penstock.services.commands.failure import WRONG_USE, CommandError

DEFAULT_URL = "http://127.0.0.1:8000"
URL_VARIABLE = "OPENAI_BASE_URL"
KEY_OF_URL_VARIABLE = "OPENAI_API_KEY"
"""It goes to that address and to no other."""
KEY_VARIABLE = "PENSTOCK_API_KEY"
UNIX = "unix"
_PORTS = {"http": 80, "https": 443}


class Endpoint(msgspec.Struct, frozen=True):
    """A server of the OpenAI API."""

    scheme: str
    host: str
    """Of the scheme ``unix``: the path of the socket."""
    port: int
    prefix: str = ""
    """What stands before ``/v1`` in its paths: begins with a slash, ends without one."""
    key: str = ""

    @property
    def url(self) -> str:
        if self.scheme == UNIX:
            return f"{UNIX}:{self.host}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.prefix}"


def socket_of(url: str) -> str:
    """The path in ``unix:/PATH`` or ``unix:///PATH``. Raises ``CommandError``."""
    path = url.removeprefix(f"{UNIX}:")
    path = path.removeprefix("//") if path.startswith("///") else path
    if not path.startswith("/") or path.startswith("//"):
        raise CommandError(f"{url}: expected unix:/PATH, of a UNIX socket", WRONG_USE)
    return path


def endpoint(url: str | None, key: str | None, environment: Mapping[str, str]) -> Endpoint:
    """The server at ``url``, which may lack its scheme and may end with ``/v1``; else the one that
    the environment names, or at ``DEFAULT_URL``.

    key: as the flag has it; else the environment's for this address. Raises ``CommandError``.
    """
    variables = [KEY_VARIABLE]
    if not url and (url := environment.get(URL_VARIABLE)):
        variables = [KEY_OF_URL_VARIABLE, KEY_VARIABLE]
    url = url or DEFAULT_URL
    if url.startswith(f"{UNIX}:"):
        return Endpoint(UNIX, socket_of(url), 0, "", _key(key, environment, variables))
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise CommandError(f"{url}: {error}", WRONG_USE) from None
    if parts.username is not None:
        raise CommandError("a URL holds no user and password; a key is --api-key's", WRONG_USE)
    if parts.scheme not in _PORTS or not host:
        raise CommandError(
            f"{url}: expected http://HOST:PORT, https://HOST or unix:/PATH", WRONG_USE
        )
    prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    port = port or _PORTS[parts.scheme]
    return Endpoint(parts.scheme, host, port, prefix, _key(key, environment, variables))


def _key(given: str | None, environment: Mapping[str, str], variables: Sequence[str]) -> str:
    """Of the flag, else of the first of these variables that has one. ``file:PATH`` is the first
    key of a file. Raises ``CommandError`` for what cannot stand in a header, and ``ConfigError``
    for a file that cannot be read."""
    key, source = given or "", "--api-key"
    for variable in variables:
        if not key and environment.get(variable):
            key, source = environment[variable], variable
    if source == KEY_VARIABLE:  # of a server on this host it may hold several
        from penstock.protocol.config.resolve import list_of

        try:
            key = next(iter(list_of(key)), "")
        except msgspec.ValidationError as error:
            raise CommandError(f"{source}: {error}", WRONG_USE) from None
    if key.startswith("file:"):
        from penstock.protocol.config.api_keys import read_api_keys

        key = read_api_keys([key])[0]
    if not all("!" <= character <= "~" for character in key):
        raise CommandError(
            f"{source}: a key holds visible ASCII characters only, no blanks", WRONG_USE
        )
    return key
