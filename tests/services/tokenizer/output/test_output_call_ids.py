from __future__ import annotations

import re

from penstock.services.tokenizer.output.call_ids import CallIds
from penstock.services.tokenizer.output.family import IdStyle


def test_an_id_follows_from_request_choice_and_number_alone() -> None:
    first = CallIds(IdStyle.OPENAI, "req-1", 0)
    assert re.fullmatch("call_[0-9a-f]{24}", first(0, "f"))
    assert first(0, "f") == CallIds(IdStyle.OPENAI, "req-1", 0)(0, "f")
    others = [
        first(1, "f"),
        CallIds(IdStyle.OPENAI, "req-1", 1)(0, "f"),
        CallIds(IdStyle.OPENAI, "req-2", 0)(0, "f"),
        CallIds(IdStyle.OPENAI, "req-10", 0)(0, "f"),
    ]
    assert len({first(0, "f"), *others}) == 5


def test_families_whose_templates_want_other_ids_get_those() -> None:
    assert CallIds(IdStyle.KIMI, "req", 0)(2, "f") == "functions.f:2"
    made = {CallIds(IdStyle.MISTRAL, "req", 0)(index, "f") for index in range(50)}
    assert len(made) == 50
    assert all(re.fullmatch("[0-9A-Za-z]{9}", one) for one in made)
