"""A model that ends its answer within a call has called with one JSON object all the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.tokenizer.output.replay import atoms, run, vocabularies
from support.tokenizer.output.wire_forms import FORMS

from penstock.services.tokenizer.output.budget import MAX_PARTS, Budget
from penstock.services.tokenizer.output.families import FAMILIES
from penstock.services.tokenizer.output.json_completion import completion

TOOLS: dict[str, Any] = {
    "note": {
        "type": "object",
        "properties": {"text": {"type": "string"}, "count": {"type": "integer"}},
    }
}
CALL = ("note", {"text": 'a "b" \\n c', "count": 12, "more": [True, {"k": None}]})


@pytest.mark.parametrize("apart", [4, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FORMS)
def test_the_arguments_are_an_object_wherever_the_model_ends_within_a_call(
    name: str, apart: int
) -> None:
    form = FORMS[name]
    family, output = FAMILIES[form.family], form.write([CALL])
    for first, vocabulary in enumerate(vocabularies(family).values()):
        pieces = atoms(output, vocabulary)
        # Places between them with the other vocabulary.
        for end in range(first * apart // 2, len(pieces) + 1, apart):
            events = run(family, vocabulary, pieces[:end], tools=TOOLS, complete=True)
            opened = [event for event in events if event[0] == "call"]
            arguments = "".join(event[-1] for event in events if event[0] == "arguments")
            assert bool(arguments) == bool(opened)
            if opened:
                assert isinstance(json.loads(arguments), dict), (arguments, pieces[:end])


@pytest.mark.parametrize(
    "text", ['{"a": 1}', '{"a": [-1.5e3, "x\\u00e9\\\\", {"b": false}], "c": null}']
)
def test_a_text_that_breaks_off_becomes_json_with_what_was_there(text: str) -> None:
    for end in range(1, len(text) + 1):
        assert isinstance(json.loads(text[:end] + completion(text[:end], Budget().spend)), dict)
    assert completion(text, Budget().spend) == ""


@pytest.mark.parametrize(
    "text", ["", "plain", "{'a': 1", '{"a": 1} and', '{"a": 1}}', '{"a" 1', "[" * 9999]
)
def test_what_is_no_json_stays_as_it_is(text: str) -> None:
    assert completion(text, Budget().spend) == ""


def test_texts_of_many_parts_that_break_off_stay_as_they_are_once_all_have_had_too_many() -> None:
    spend = Budget().spend
    text = '{"a": [' + "1, [], " * (MAX_PARTS // 6)
    for whole in (True, True, False):
        assert completion("[[]]", spend) == ""  # costs nothing
        assert bool(completion(text, spend)) == whole
