"""What a request says of the use that there will be for its place in the prefix cache."""

from __future__ import annotations

import msgspec

RETENTION_SECONDS = {"5m": 300, "1h": 3600}
"""How long a prefix may be retained, by what clients write."""
MAX_BREAKPOINTS = 4
"""Places of a prompt up to which it is to be retained, at most, as Anthropic's API has it."""


class Breakpoint(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A prefix of the prompt that is to be retained in the prefix cache."""

    seconds: int
    """One of ``RETENTION_SECONDS``."""
    message: int | None = None
    """It ends in the content of this message of a chat, from 0; ``None``: it is the whole prompt.
    What of a rendered prompt lies ahead of that content is part of it."""
    characters: int = 0
    """Of that content."""


class CacheHints(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a client says of the use that it will have for the K and V of its prompt. The answer
    does not depend on it."""

    breakpoints: list[Breakpoint] = []
    release: bool = False
    """When the request is over, what it has had in the prefix cache is not wanted again."""


class RetainedSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The first tokens of a prompt, whose blocks are to be reused after all others."""

    tokens: int
    seconds: int
