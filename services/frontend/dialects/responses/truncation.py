"""``truncation: "auto"``: a conversation that is too long for the model loses its oldest parts.

What stays whatever happens: system and developer messages, the last user message, and the last
thing that was said or called after it, with its results. Before the last user message whole
exchanges go, a user's message with all that answers it, since chat templates expect these in turn;
behind it single steps of the assistant, each with the results of its calls.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from penstock.services.frontend.bodies.openai_items import (
    CustomCallItem,
    CustomOutputItem,
    FunctionCallItem,
    FunctionOutputItem,
    InputItem,
    MessageItem,
)
from penstock.services.frontend.bodies.openai_responses import ResponsesBody
from penstock.services.frontend.context import Context
from penstock.services.frontend.dialect_handler import parsed
from penstock.services.frontend.dialects.responses.turn import Turn, turn_of
from penstock.services.frontend.errors import ApiError, bad_request
from penstock.services.frontend.keys.known_key import KnownKey
from penstock.services.frontend.parse import GenerateRequest, find_model

FREED = 4
"""A conversation that is cut leaves one part in so many of the context for its answer, where the
request does not say how long that may be: else the next turn would be cut again."""

Count = Callable[[GenerateRequest], Awaitable[int]]
"""Tokens of a prompt. Raises ``ApiError``."""
Make = Callable[[Sequence[InputItem]], Awaitable[Turn]]
"""The request with these items as its conversation. Raises ``ApiError``."""


async def whole_turn(
    context: Context,
    key: KnownKey,
    body: ResponsesBody,
    size: int,
    before: Sequence[InputItem],
    own: list[InputItem],
    count: Count,
    *,
    streams: bool,
) -> Turn:
    """The request that a body makes, cut if it asks for that and needs it.

    Args:
        size: of the body, in bytes.
        before: the items that ``own``, those of the body, continue.

    Raises ``ApiError``.
    """

    async def make(kept: Sequence[InputItem]) -> Turn:
        return await parsed(
            context, key, size, lambda models, _: turn_of(body, kept, own, models, streams=streams)
        )

    items = [*before, *own]
    turn = await make(items)
    if body.truncation != "auto":
        return turn
    model, _ = find_model(turn.request.served, context.gateway.models())
    return await fitted(turn, items, make, count, model.max_model_len)


async def fitted(
    turn: Turn, items: Sequence[InputItem], make: Make, count: Count, max_model_len: int
) -> Turn:
    """The turn, or one whose conversation was cut so that it fits into the model's context.

    Args:
        items: the conversation of ``turn``.

    Raises ``ApiError`` 400 where even what must stay does not fit.
    """
    asked = turn.body.max_output_tokens
    longest = max_model_len - (asked or 1)
    if await _length(turn, count) <= longest:
        return turn
    parts = droppable(items)
    wanted = longest if asked else max_model_len - max(1, max_model_len // FREED)
    few, many = 1, len(parts)  # the least number of parts to drop lies between them
    found: dict[int, Turn] = {}
    while few < many:
        middle = (few + many) // 2
        found[middle] = await make(without(items, parts[:middle]))
        if await _length(found[middle], count) <= wanted:
            many = middle
        else:
            few = middle + 1
    shortest = found.get(many) or await make(without(items, parts))
    length = await count(shortest.request)
    if length > longest:
        raise bad_request(
            f"truncation: 'auto' cannot make the input fit: what must stay of it (system messages, "
            f"the last user message and what follows it last) has {length} tokens, and {longest} "
            f"are allowed beside max_output_tokens ({asked or 1}) in a context of {max_model_len}",
            "input",
            "context_length_exceeded",
        )
    return shortest


async def _length(turn: Turn, count: Count) -> float:
    """Tokens of its prompt; one that is too long even to be counted is endless."""
    try:
        return await count(turn.request)
    except ApiError as error:
        if error.status != 400:
            raise
        return float("inf")


def without(items: Sequence[InputItem], parts: Sequence[Sequence[int]]) -> list[InputItem]:
    """The items but for those of some parts."""
    gone = {place for part in parts for place in part}
    return [item for place, item in enumerate(items) if place not in gone]


def droppable(items: Sequence[InputItem]) -> list[list[int]]:
    """What may go, in the order in which it goes: places of items that go together."""
    users = [place for place, item in enumerate(items) if _says(item, "user")]
    last_user = users[-1] if users else -1
    before = _parts(items[:last_user] if users else [], 0, _begins_exchange)
    behind = _parts(items[last_user + 1 :], last_user + 1, _begins_step)
    # A part that shares a call with what must stay must stay as well.
    stays = behind.pop() if behind else []
    joined = _joined_by_calls(items, [*before, *behind])
    return [part for part in joined if not _share(items, part, stays)]


def _parts(
    items: Sequence[InputItem],
    first: int,
    begins: Callable[[InputItem | None, InputItem], bool],
) -> list[list[int]]:
    """Places of the items, cut where a part begins; without those that always stay."""
    parts: list[list[int]] = []
    before: InputItem | None = None
    for place, item in enumerate(items, first):
        if _says(item, "system", "developer"):
            continue
        if not parts or begins(before, item):
            parts.append([])
        parts[-1].append(place)
        before = item
    return parts


def _begins_exchange(before: InputItem | None, item: InputItem) -> bool:
    """Several messages of a user in a row are one."""
    return _says(item, "user") and not (before is not None and _says(before, "user"))


def _begins_step(before: InputItem | None, item: InputItem) -> bool:
    """What an assistant does after it has got results."""
    return _is_result(before) and not _is_result(item)


def _joined_by_calls(items: Sequence[InputItem], parts: list[list[int]]) -> list[list[int]]:
    """Parts between which a call and its result are divided are one, with all between them."""
    where = {place: number for number, part in enumerate(parts) for place in part}
    ends: dict[str, int] = {}
    for place in where:
        name = _call_of(items[place])
        if name:
            ends[name] = max(ends.get(name, 0), where[place])
    joined: list[list[int]] = []
    reach = -1
    for number, part in enumerate(parts):
        if number <= reach:
            joined[-1] += part
        else:
            joined.append(list(part))
        reach = max([reach, *(ends.get(_call_of(items[place]), -1) for place in part)])
    return joined


def _share(items: Sequence[InputItem], part: Sequence[int], other: Sequence[int]) -> bool:
    """Whether a call stands in one of them and its result in the other."""
    calls = {_call_of(items[place]) for place in part} - {""}
    return any(_call_of(items[place]) in calls for place in other)


def _says(item: InputItem, *roles: str) -> bool:
    return isinstance(item, MessageItem) and item.role in roles


def _is_result(item: InputItem | None) -> bool:
    return isinstance(item, FunctionOutputItem | CustomOutputItem)


def _call_of(item: InputItem) -> str:
    """The call that it is, or whose result; empty: neither."""
    if isinstance(item, FunctionCallItem | CustomCallItem | FunctionOutputItem | CustomOutputItem):
        return item.call_id
    return ""
