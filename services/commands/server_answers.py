"""What commands rely on in the answers of a server: another program may answer at an address."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from penstock.services.commands.failure import CommandError
from penstock.services.commands.printable import one_line

if TYPE_CHECKING:
    from penstock.services.commands.api_client import ApiClient

MAX_CALLS = 1024
"""Tool calls of one answer."""


class Card(msgspec.Struct):
    """A name of a model, of ``/v1/models``."""

    id: str
    root: str | None = None
    """The model's first name."""
    max_model_len: int | None = None
    tasks: list[str] | None = None
    """``None``: its server does not tell."""


class _Cards(msgspec.Struct):
    data: list[Card] | None = None


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: Annotated[int, Meta(ge=0, lt=MAX_CALLS)] = 0
    id: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: dict[str, Any] | None = None


def model_cards(server: ApiClient) -> list[Card]:
    """The names of the server's models, in its order. Raises ``CommandError``."""
    return cards_of(server.get("/v1/models"), server.endpoint.url)


def cards_of(told: Any, url: str) -> list[Card]:
    """Raises ``CommandError``."""
    return _read(told, _Cards, f"{url} sent a list of models that cannot be read").data or []


def check_chunk(told: Any, url: str) -> None:
    """Raises ``CommandError`` for a chunk of a stream that is not what commands read of one."""
    _read(told, _Chunk, f"{url} sent a part of an answer that cannot be read")


def _read(told: Any, kind: type[Any], said: str) -> Any:
    try:
        return msgspec.convert(told, kind)
    except msgspec.ValidationError as error:
        raise CommandError(f"{said}: {one_line(str(error))}") from None
