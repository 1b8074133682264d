"""What the library makes of the name of an adapter: its digest, or a refusal, never the base."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.protocol.wire.messages.engine import Adapter
from penstock.protocol.wire.messages.membership import Capacity
from penstock.protocol.wire.messages.requests import Rejected, RequestHead
from penstock.services.library.member import adapted_head, refusal_of
from penstock.services.library.requests import all_asked, asked_of

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


def test_prompts_of_one_call_may_have_an_adapter_each() -> None:
    asked = all_asked("generate", {"adapter": ["sql", "", "sql"], "user": "u"}, [1, 2, 3], 3)
    assert [(one.terms.adapter, one.terms.priority) for one in asked] == [
        ("sql", 1), ("", 2), ("sql", 3)
    ]  # fmt: skip
    assert {one.terms.user for one in asked} == {"u"}
    with pytest.raises(ValueError, match="1 adapters for 3 prompts"):
        all_asked("generate", {"adapter": ["sql"]}, 0, 3)
    with pytest.raises(ValueError, match="adapter"):
        asked_of("add_request", {"adapter": ["sql"]})


@pytest.mark.parametrize(
    ("repeats", "asked", "param"),
    [(True, True, None), (False, False, None), (False, True, "deterministic")],
)
def test_an_answer_that_cannot_repeat_is_refused_once_that_is_known(
    repeats: bool, asked: bool, param: str | None
) -> None:
    terms = asked_of("generate", {"deterministic": asked}).terms
    assert terms.deterministic is asked
    head = RequestHead(model="m", deterministic=terms.deterministic)
    found = refusal_of(head, Capacity(max_model_len=64, repeats=repeats))
    assert (found.param if found is not None else None) == param
    assert refusal_of(head, Capacity()) is None
    with pytest.raises(ValueError, match="deterministic"):
        asked_of("generate", {"deterministic": "yes"})  # type: ignore[typeddict-item]
