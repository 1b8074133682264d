"""What the library makes of the name of an adapter: its digest, or a refusal, never the base."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.protocol.wire.messages.engine import Adapter
from penstock.protocol.wire.messages.membership import Capacity
from penstock.protocol.wire.messages.requests import Rejected, RequestHead
from penstock.services.library.member import adapted_head

CAPACITY = Capacity(max_model_len=64, tasks=["embed"], adapters=[Adapter("sql", "d1")])


@pytest.mark.parametrize(
    ("name", "task", "capacity", "found"),
    [
        ("", "embed", CAPACITY, ""),
        ("sql", "generate", CAPACITY, "d1"),
        ("sql", "tokenize", CAPACITY, "d1"),
        ("sql", "embed", CAPACITY, 400),
        ("other", "generate", CAPACITY, 404),
        ("sql", "generate", Capacity(), 503),
    ],
)
def test_the_name_of_an_adapter_becomes_its_digest_or_is_refused(
    name: str, task: Any, capacity: Capacity, found: str | int
) -> None:
    made = adapted_head(RequestHead(adapter=name, task=task), capacity)
    assert (made.status if isinstance(made, Rejected) else made.adapter) == found
