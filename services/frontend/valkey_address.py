"""Where a Valkey or Redis server is, and how to speak to it: the URL of ``--response-store`` and of
``--limits-url``."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import msgspec

from penstock.protocol.config import ConfigError
from penstock.protocol.config.api_keys import FILE
from penstock.protocol.private_file import PrivateFileError, read_private_text
from penstock.protocol.shown_values import show

ENCRYPTED = {"valkey": False, "redis": False, "valkeys": True, "rediss": True}
"""Scheme → whether the connection is by TLS."""
DEFAULT_PORT = 6379
DEFAULT_TTL_S = 30 * 86_400
"""As long as OpenAI keeps a response."""
MAX_TTL_S = 10 * 365 * 86_400
MAX_DB = 65_535
_EXPECTED = "valkey://[USER:PASSWORD@]HOST[:PORT][/DB]"


class ValkeyAddress(msgspec.Struct, frozen=True):
    """A server and a database of it."""

    host: str
    port: int = DEFAULT_PORT
    db: int = 0
    username: str | None = None
    password: str | None = None
    tls: bool = False
    ca_file: str | None = None
    """Certificates that may have signed the server's own; ``None``: those of the system."""
    ttl_s: int = DEFAULT_TTL_S
    """A response that nobody has asked for so long is forgotten."""

    def __str__(self) -> str:
        """Without user and password."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'valkeys' if self.tls else 'valkey'}://{host}:{self.port}/{self.db}"


def names_server(where: str) -> bool:
    """Whether a value of the flag is meant as a URL, or as a file that holds one."""
    return where.startswith(FILE) or "://" in where


def read_address(where: str, flag: str = "--response-store") -> ValkeyAddress:
    """A URL, or ``file:PATH`` of a private file that holds one. flag: where it was given.

    Raises ``ConfigError``, in which no password is repeated.
    """
    if not where.startswith(FILE):
        return _of_url(where, flag)
    try:
        url = read_private_text(Path(where.removeprefix(FILE))).strip()
    except PrivateFileError as error:
        raise ConfigError(f"{flag} {where}: {error}") from None
    return _of_url(url, f"{flag} {where}")


def _of_url(url: str, label: str) -> ValkeyAddress:
    if "#" in url:
        raise ConfigError(f"{label}: there is a # in it; in a password it is written %23")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ConfigError(f"{label}: host or port is wrong; expected {_EXPECTED}") from None
    if parts.scheme not in ENCRYPTED:
        raise ConfigError(
            f"{label}: the scheme is {show(parts.scheme)}; {', '.join(ENCRYPTED)} are known"
        )
    if not parts.hostname:
        raise ConfigError(f"{label}: the host is missing; expected {_EXPECTED}")
    options = _options(parts, label)
    tls = ENCRYPTED[parts.scheme]
    ca_file = options.get("ca_file")
    if ca_file is not None and not tls:
        raise ConfigError(f"{label}: ca_file is only for valkeys:// and rediss://")
    return ValkeyAddress(
        parts.hostname,
        DEFAULT_PORT if port is None else port,
        _number(parts.path.removeprefix("/") or "0", "the database", 0, MAX_DB, label),
        unquote(parts.username) if parts.username else None,
        unquote(parts.password) if parts.password else None,
        tls,
        ca_file,
        _number(options.get("ttl_s", str(DEFAULT_TTL_S)), "ttl_s", 1, MAX_TTL_S, label),
    )


def _options(parts: SplitResult, label: str) -> dict[str, str]:
    """What stands behind the ``?``."""
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = sorted(options.keys() - {"ttl_s", "ca_file"})
    if unknown:
        raise ConfigError(f"{label}: {show(unknown[0])} is unknown; ttl_s and ca_file are known")
    return options


def _number(text: str, what: str, least: int, most: int, label: str) -> int:
    if not (text.isascii() and text.isdigit() and least <= int(text[:12]) <= most):
        raise ConfigError(f"{label}: {what} is {show(text)}; {least} to {most} is allowed")
    return int(text)
