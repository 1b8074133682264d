"""What a request continues: the stored responses before it, oldest first, as items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.protocol.shown_values import show
from penstock.services.frontend.bodies.openai_items import InputItem, ReferenceItem
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
    "each frontend process has a memory of its own, --response-store DIRECTORY gives all the same"
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
        if not is_response_id(name):
            return None
        if self._local is not None:
            found = self._local.find(self._connection, name)
            if found is not None:
                return found
        return None if self._store is None else await self._store.get(self._owner, name)

    async def before(self, name: str | None) -> list[InputItem]:
        """All items of the conversation that ends with this response. Raises ``ApiError`` 400 for
        a response that is not there, and where none are kept."""
        items: list[Any] = []
        for kept in await self.chain(name):
            items += msgspec.json.decode(kept.input)
            items += output_of(kept)
        return await self.resolved(read_items(items, "previous_response_id"))

    async def chain(self, name: str | None) -> list[StoredResponse]:
        """The responses of the conversation that ends with this one, oldest first. Raises
        ``ApiError`` 400 as ``before`` does."""
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
            found.append(kept)
            name = kept.previous
        found.reverse()
        return found

    async def resolved(self, items: Sequence[InputItem | ReferenceItem]) -> list[InputItem]:
        """Items with those that are only referred to. Raises ``ApiError`` 404."""
        found: list[InputItem] = []
        for index, item in enumerate(items):
            if isinstance(item, ReferenceItem):
                found.append(await self._referred(item.id, f"input[{index}]"))
            else:
                found.append(item)
        return found

    async def _referred(self, name: str, where: str) -> InputItem:
        if self._store is None and self._local is None:
            raise _off(where)
        place = place_of(name)
        kept = None if place is None else await self.find(place.response_id)
        if kept is not None and place is not None:
            for item in output_of(kept):
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
