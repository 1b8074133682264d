"""What clients say of the use that they will have for a prompt's place in the prefix cache.

The object is that of Anthropic's API, which gateways in front of several APIs send to all of them:
on a part of the prompt it says that the prefix up to there will be needed again.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, ClassVar, Literal, NamedTuple

from msgspec import Meta

from penstock.protocol.declared import Declared, said
from penstock.protocol.validation import InvalidValue
from penstock.protocol.wire.messages.cache_hints import (
    MAX_BREAKPOINTS,
    RETENTION_SECONDS,
    Breakpoint,
    CacheHints,
)

DEFAULT_TTL = "5m"
FIELD = "cache_control"


class _Retention(Declared, kw_only=True):
    IS_ONE_PARAM: ClassVar[bool] = True

    ttl: (
        Annotated[Literal["5m", "1h"], said("For how long since its last use; 5m by default.")]
        | None
    ) = None
    scope: Annotated[str, Meta(max_length=64, description="Has no effect.")] | None = None

    @property
    def seconds(self) -> int:
        return RETENTION_SECONDS[self.ttl or DEFAULT_TTL]


class CacheControl(_Retention, kw_only=True):
    """The prefix that ends here is to be retained in the prefix cache."""

    type: Literal["ephemeral"] = "ephemeral"


class PromptCacheControl(_Retention, kw_only=True):
    """The whole prompt is to be retained in the prefix cache, or is not wanted there any more."""

    type: Literal["ephemeral", "release"] = "ephemeral"

    def __post_init__(self) -> None:
        """Raise ``InvalidValue`` where the type and the rest contradict each other."""
        if self.type == "release" and self.ttl is not None:
            raise InvalidValue(f"{FIELD}.ttl is allowed only with the type 'ephemeral'", FIELD)


PromptCacheField = Annotated[
    PromptCacheControl,
    said(
        "Retain the prompt in the prefix cache for ttl, 5m or 1h, or give it up when the request "
        "is over (type release)."
    ),
]


class Place(NamedTuple):
    """Where a client has put a mark on a chat: in this message, behind so many characters of its
    content. Where the message begins, all that lies ahead of it is meant."""

    message: int
    characters: int
    seconds: int


def cache_hints(
    whole: PromptCacheControl | None, places: Collection[Place] = (), messages: int = 0
) -> CacheHints | None:
    """What the marks of a request say together; ``None``: nothing. Of those for equally long only
    the last one matters, and none that lies ahead of one for longer.

    whole: what is said of the request. messages: of the chat that the places are in. Raises
    ``InvalidValue`` for more marks than are allowed.
    """
    given = len(places) + (whole is not None)
    if not given:
        return None
    if given > MAX_BREAKPOINTS:
        raise InvalidValue(
            f"{FIELD} stands at {given} places; at most {MAX_BREAKPOINTS} are allowed", FIELD
        )
    ends = list(places)
    if whole is not None and whole.type == "ephemeral":
        ends.append(Place(messages, 0, whole.seconds))
    found: list[Breakpoint] = []
    for place in sorted(ends, reverse=True):
        if not found or place.seconds > found[-1].seconds:
            message = place.message if place.message < messages else None
            found.append(Breakpoint(place.seconds, message, place.characters))
    return CacheHints(found, whole is not None and whole.type == "release")
