"""What a frontend asks other processes: about a request, and to change the log's level."""

from __future__ import annotations

import msgspec

LOG_LEVEL = "log_level"
"""Every process: log from this level on. About: its name."""
FIND_REQUEST = "find_request"
"""A frontend: what became of a request. About: an encoded ``RequestName``."""
ABORT_REQUESTS = "abort_requests"
"""A frontend: end them. About: encoded ``RequestNames``. Answer: an encoded list of numbers, of
each name how many ran."""


class RequestName(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request as its client knows it."""

    id: str
    owner: str | None = None
    """Whose it must be; ``None``: anybody's."""


class RequestNames(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Requests as one client knows them."""

    ids: list[str]
    """Each once."""
    owner: str | None = None
    """As of a ``RequestName``."""


class Ask(msgspec.Struct, frozen=True, array_like=True, tag=14, gc=False):
    """A process that does not know what it is asked answers that it has nothing."""

    reply_to: str
    number: int
    """The answer has the same."""
    what: str
    about: bytes = b""


class Told(msgspec.Struct, frozen=True, array_like=True, tag=15, gc=False):
    """The answer to ``Ask``."""

    number: int
    answer: bytes = b""
    """Empty: there is nothing."""
