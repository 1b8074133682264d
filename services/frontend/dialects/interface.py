"""What an API must say of itself to be served.

A dialect reads the bodies of its routes and renders answers: whole, as the frames of a stream, and
errors. It sees neither sockets nor the pipeline, and is made from no other dialect. Other packages
bring theirs by an entry point (``registry``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from aiohttp.typedefs import Handler

from penstock.client.answers import Answer
from penstock.client.gateway_interface import ServedModel
from penstock.client.meters import Usage
from penstock.services.frontend.bodies.routes import EVENT_STREAM, RouteBodies
from penstock.services.frontend.body import Pause
from penstock.services.frontend.errors import ApiError
from penstock.services.frontend.parse import GenerateRequest

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which readers of event streams skip."""


Endpoint = tuple[str, str, Handler]
"""Method, path and handler."""


class ChoiceFrames(Protocol):
    """The frames of one choice of a stream.

    A row that is plain text costs no call: its frame is ``prefix``, the text as a JSON string, and
    ``suffix``; then ``later`` becomes the prefix.
    """

    prefix: bytes
    later: bytes
    suffix: bytes

    def render(self, answer: Answer) -> bytes:
        """The frames of what an answer has gathered since the last ones; empty if there is nothing
        to say."""


class Renderer(Protocol):
    """Writes the answer to one request. One that is never streamed needs ``body`` alone
    (``Unstreamed``). One whose streams are no server-sent events says in a member ``media_type``
    what they are; ``first(usage)`` is what its streams begin with, where it has that."""

    direct: bool
    """Plain text may be written by prefix and suffix: nothing in a frame changes but the text."""

    @property
    def keep_alive(self) -> bytes:
        """What goes out while there is nothing else to say; empty: nothing may."""

    def choice(self, index: int, usage: Usage) -> ChoiceFrames:
        """Frames of the choice with this index over all prompts. ``usage`` grows as rows come."""

    def last(self, usage: Usage) -> bytes:
        """What ends a stream whose choices have all ended."""

    def failed(self, error: ApiError) -> bytes:
        """What ends a stream that an error has ended."""

    def body(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        """The whole answer of an unstreamed request. One answer for each choice, in order."""


class Unstreamed(ABC):
    """The renderer of an API whose answers are whole."""

    direct = False
    keep_alive = KEEP_ALIVE

    @abstractmethod
    def body(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        """The answer."""

    def choice(self, index: int, usage: Usage) -> ChoiceFrames:
        raise _never_streamed()

    def last(self, usage: Usage) -> bytes:
        raise _never_streamed()

    def failed(self, error: ApiError) -> bytes:
        raise _never_streamed()


def _never_streamed() -> TypeError:
    return TypeError("an answer that is never streamed was to be")


class Dialect(Protocol):
    """One API.

    It may have two more members: ``bodies``, a ``RouteBodies`` for each of its routes and
    endpoints, by which /openapi.json describes them; and ``endpoints``, further routes that do not
    generate, with handlers of their own. Their errors are the dialect's as well.
    """

    name: str
    routes: tuple[str, ...]
    """Paths that take its requests by POST."""

    def parse(
        self, raw: bytes, models: list[ServedModel], pause: Pause | None = None
    ) -> GenerateRequest:
        """Check a body. Raises ``ApiError``.

        pause: for a large body, parsed in a thread; called every now and then to let others run.
        """

    def renderer(self, request: GenerateRequest, answer_id: str, created: int) -> Renderer:
        """Make the renderer of one answer.

        ``answer_id``: 32 hex digits; ``created``: seconds since the epoch.
        """

    def error(self, error: ApiError) -> bytes:
        """The body of an answer that is this error alone."""


def media_type_of(renderer: Renderer) -> str:
    """What its streams are."""
    found: str = getattr(renderer, "media_type", EVENT_STREAM)
    return f"{found}; charset=utf-8"


def first_of(renderer: Renderer, usage: Usage) -> bytes:
    """What begins a stream, once every prompt is accepted; empty: nothing does."""
    first: Callable[[Usage], bytes] | None = getattr(renderer, "first", None)
    return b"" if first is None else first(usage)


def endpoints_of(dialect: Dialect) -> Sequence[Endpoint]:
    """Its routes that do not generate."""
    found: Sequence[Endpoint] = getattr(dialect, "endpoints", ())
    return found


def bodies_of(dialect: Dialect) -> Sequence[RouteBodies]:
    """What its routes and endpoints take and give, each of them; of some no more than the path."""
    stated: Sequence[RouteBodies] = getattr(dialect, "bodies", ())
    known = {(one.method, one.path) for one in stated}
    paths: list[tuple[str, str]] = [("POST", path) for path in dialect.routes]
    paths += [(method, path) for method, path, _ in endpoints_of(dialect)]
    unstated = [
        RouteBodies(method, path, Any, group=dialect.name)
        for method, path in paths
        if (method, path) not in known
    ]
    return [*stated, *unstated]


def paths_of(dialect: Dialect) -> list[str]:
    """Every path that it has, once."""
    return list(dict.fromkeys([*dialect.routes, *(path for _, path, _ in endpoints_of(dialect))]))
