"""One key of a client: what the file says of it, and how one is made and recognised.

A key is ``sk-penstock-ID-SECRET``. The id is public and finds the record; the secret has 256 random
bits, so one salted SHA-256 of the whole keeps it: there is nothing that could be guessed.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from datetime import UTC, datetime
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

Role = Literal["user", "metrics", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)
PREFIX = "sk-penstock-"
_KEY = re.compile(PREFIX + r"([0-9a-f]{12})-[A-Za-z0-9_-]{43}")
_MADE_OF = "letters, digits, dots, dashes, underscores and @, at most 64"
KeyName = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._@-]{0,63}\Z", title=_MADE_OF)]
"""It stands in logs and metrics, so it is short and harmless."""
MAX_MODELS = 256
Count = Annotated[int, Meta(ge=1, le=10**12)]


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a key may use; ``None``: as much as the server has."""

    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    tokens_per_day: Count | None = None
    """A day begins at midnight UTC."""
    concurrent: Count | None = None
    """Requests at the same time."""

    @property
    def are_none(self) -> bool:
        """Whether nothing is limited."""
        amounts = (
            self.requests_per_minute,
            self.tokens_per_minute,
            self.tokens_per_day,
            self.concurrent,
        )
        return all(amount is None for amount in amounts)


_NO_LIMITS = KeyLimits()


class KeyRecord(KeyLimits, frozen=True, kw_only=True, omit_defaults=True,
                forbid_unknown_fields=True):  # fmt: skip
    """A line of the file."""

    name: KeyName
    id: Annotated[str, Meta(pattern=r"\A[0-9a-f]{12}\Z")]
    role: Role = "user"
    hash: Annotated[str, Meta(pattern=r"\Asha256:[0-9a-f]{32}:[0-9a-f]{64}\Z")]
    """``sha256:SALT:DIGEST``, both in hex."""
    models: Annotated[list[Annotated[str, Meta(max_length=512)]], Meta(max_length=MAX_MODELS)] = []
    """Names of models that it may use; empty: all."""
    expires: Annotated[datetime, Meta(tz=True)] | None = None
    disabled: bool = False
    created: Annotated[datetime, Meta(tz=True)] | None = None

    def is_of(self, key: str) -> bool:
        """Whether ``key`` is this one. In constant time."""
        _, salt, digest = self.hash.split(":")
        return hmac.compare_digest(_digest(salt, key), digest)

    def has_expired(self, now: datetime) -> bool:
        return self.expires is not None and now >= self.expires


def id_of(key: str) -> str:
    """The public part of a key of a file; empty where it cannot be one."""
    found = _KEY.fullmatch(key)
    return found[1] if found else ""


def new_key(
    name: str,
    role: Role = "user",
    *,
    limits: KeyLimits = _NO_LIMITS,
    models: list[str] | None = None,
    expires: datetime | None = None,
) -> tuple[str, KeyRecord]:
    """A key, and its record, which does not hold it."""
    public, salt = secrets.token_hex(6), secrets.token_hex(16)
    key = f"{PREFIX}{public}-{secrets.token_urlsafe(32)}"
    record = KeyRecord(
        name=name,
        id=public,
        role=role,
        hash=f"sha256:{salt}:{_digest(salt, key)}",
        requests_per_minute=limits.requests_per_minute,
        tokens_per_minute=limits.tokens_per_minute,
        tokens_per_day=limits.tokens_per_day,
        concurrent=limits.concurrent,
        models=models or [],
        expires=expires,
        created=datetime.now(UTC).replace(microsecond=0),
    )
    return key, record


def _digest(salt: str, key: str) -> str:
    text = key.encode(errors="surrogateescape")
    return hashlib.sha256(bytes.fromhex(salt) + text).hexdigest()
