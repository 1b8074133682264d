"""What a request continues: the stored responses before it, oldest first, as items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.protocol.shown_values import show
from penstock.services.frontend.bodies.openai_items import InputItem, ReferenceItem
from penstock.services.frontend.body import Pause, no_pause
from penstock.services.frontend.dialects.responses.held_responses import HeldResponses
from penstock.services.frontend.dialects.responses.items import (
    is_response_id,
    place_of,
    read_items,
)
from penstock.services.frontend.dialects.responses.store import (
    MemoryStore,
    ResponseStore,
    StoredResponse,
)
from penstock.services.frontend.errors import ApiError, bad_request

MAX_CHAIN = 8192
"""Responses of one conversation."""
NOT_FOUND = "previous_response_not_found"
_WHY = (
    "it was never stored, was deleted or has made room for others, or belongs to another API key; "
    "each frontend process has a memory of its own; --response-store DIRECTORY, or a server's URL, "
    "gives all the same"
)


class _Answered(msgspec.Struct):
    """What a continuation needs of a response."""

    output: list[Any]


class Conversations:
    """The responses that one caller may continue: those of his connection, then stored ones."""

    def __init__(
        self,
        owner: str,
        store: ResponseStore | None,
        local: MemoryStore | None = None,
        connection: str = "",
    ) -> None:
        """local: what the connections of this process remember, each by its name."""
        self._owner = owner
        self._store = store
        self._local = local
        self._connection = connection

    async def find(self, name: str) -> StoredResponse | None:
        """Raises ``ApiError`` 503 where the store does not answer."""
        if not is_response_id(name):
            return None
        if self._local is not None:
            found = self._local.find(self._connection, name)
            if found is not None:
                return found
        return None if self._store is None else await self._store.get(self._owner, name)

    async def before(self, name: str | None, held: HeldResponses) -> list[InputItem]:
        """All items of the conversation that ends with this response. Raises ``ApiError`` 400 for
        a response that is not there, and where none are kept."""
        chain = await self.chain(name, held)
        read = await held.read(
            lambda pause: read_items(items_of(chain, pause or no_pause), "previous_response_id")
        )
        return await self.resolved(read, held)

    async def chain(self, name: str | None, held: HeldResponses) -> list[StoredResponse]:
        """The responses of the conversation that ends with this one, oldest first, which ``held``
        takes. Raises ``ApiError`` 400 as ``before`` does."""
        found: list[StoredResponse] = []
        asked = name
        while name:
            if self._store is None and self._local is None:
                raise _off("previous_response_id")
            if len(found) == MAX_CHAIN:
                raise bad_request(
                    f"previous_response_id: {show(asked)} continues more than {MAX_CHAIN} "
                    "responses; send the conversation as input",
                    "previous_response_id",
                )
            kept = await self.find(name)
            if kept is None:
                within = "" if name == asked else f", which {show(asked)} continues"
                raise ApiError(
                    400,
                    f"Previous response with id {show(name)} not found{within}: {_WHY}",
                    param="previous_response_id",
                    code=NOT_FOUND,
                )
            held.take(kept)
            found.append(kept)
            name = kept.previous
        found.reverse()
        return found

    async def resolved(
        self, items: Sequence[InputItem | ReferenceItem], held: HeldResponses
    ) -> list[InputItem]:
        """Items with those that are only referred to. Raises ``ApiError`` 404."""
        outputs: dict[str, list[Any]] = {}
        found: list[InputItem] = []
        for index, item in enumerate(items):
            if isinstance(item, ReferenceItem):
                found.append(await self._referred(item.id, f"input[{index}]", outputs, held))
            else:
                found.append(item)
        return found

    async def _referred(
        self, name: str, where: str, outputs: dict[str, list[Any]], held: HeldResponses
    ) -> InputItem:
        """outputs: of the responses that were referred to before, by their ids."""
        if self._store is None and self._local is None:
            raise _off(where)
        place = place_of(name)
        if place is not None and place.response_id not in outputs:
            kept = await self.find(place.response_id)
            if kept is not None:
                held.take(kept)
            outputs[place.response_id] = (
                [] if kept is None else await held.read(lambda _: output_of(kept))
            )
        for item in outputs[place.response_id] if place is not None else ():
            if item.get("id") == name:
                (read,) = read_items([item], where)
                if not isinstance(read, ReferenceItem):
                    return read
        raise ApiError(
            404,
            f"{where}: item with id {show(name)} not found in the output of a response: {_WHY}",
            kind="not_found_error",
            param="input",
            code="item_not_found",
        )


def output_of(kept: StoredResponse) -> list[Any]:
    """The items that a response has answered with."""
    return msgspec.json.decode(kept.response, type=_Answered).output


def items_of(chain: Sequence[StoredResponse], pause: Pause = no_pause) -> list[Any]:
    """The items that responses were made from and have answered with, in that order."""
    items: list[Any] = []
    for kept in chain:
        pause()
        items += msgspec.json.decode(kept.input)
        items += output_of(kept)
    return items


def _off(param: str) -> ApiError:
    return bad_request(
        f"{param}: this server keeps no responses (--response-store off); send the whole "
        "conversation as input",
        param.partition("[")[0],
    )


def not_found(name: str) -> ApiError:
    """A 404 for a response that was asked for by its name."""
    return ApiError(
        404,
        f"Response with id {show(name)} not found: {_WHY}",
        kind="not_found_error",
        code="response_not_found",
    )
