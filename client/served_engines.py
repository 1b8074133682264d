"""What the engines of one model do together."""

from __future__ import annotations

import msgspec

from penstock.client.gateway_interface import ServedModel
from penstock.protocol.wire.messages.membership import Capacity, Identity


def with_engine(known: ServedModel | None, identity: Identity, capacity: Capacity) -> ServedModel:
    """The model as ``known`` by its engines so far, with one more of them. Its limits are those of
    the first one, but for prompts of tasks, which fit every engine that has any."""
    more = ServedModel(
        identity.model,
        identity.aliases,
        capacity.max_model_len,
        capacity.vocab_size,
        capacity.tasks,
        capacity.generates,
        capacity.labels,
        capacity.longest_task_prompt,
    )
    if known is None:
        return more
    longest = known.longest_task_prompt
    if more.tasks:
        longest = (
            min(longest, more.longest_task_prompt) if known.tasks else more.longest_task_prompt
        )
    return msgspec.structs.replace(
        known,
        tasks=list(dict.fromkeys([*known.tasks, *more.tasks])),
        generates=known.generates or more.generates,
        labels=known.labels or more.labels,
        longest_task_prompt=longest,
    )
