"""``docs/structured-outputs.md`` says what the check does."""

from __future__ import annotations

import json
import re
from pathlib import Path

from support.conformance.schema_masks import compiled

from penstock.protocol.grammar.json_schema.formats import FORMATS
from penstock.protocol.grammar.json_schema.keywords import ANNOTATIONS, ENFORCED, REFUSED
from penstock.protocol.grammar.json_schema.places import MAX_DEPTH, MAX_VALUES
from penstock.protocol.grammar.request import from_response_format, from_structured_outputs

PAGE = (Path(__file__).parents[2] / "docs" / "structured-outputs.md").read_text()
TABLE = PAGE[PAGE.index("| feature |") : PAGE.index("How the answer is written")]


def test_the_example_can_be_sent() -> None:
    body = json.loads(re.findall(r"-d '(.*?)'\n", PAGE, re.DOTALL)[0])
    grammar = from_response_format(body["response_format"])
    assert grammar is not None
    assert not isinstance(compiled(json.loads(grammar.source)), str)


def test_every_kind_of_the_table_can_be_sent() -> None:
    kinds = re.findall(r'`"structured_outputs": (\{.*?\})`', PAGE.replace(r"\|", "|"))
    assert {from_structured_outputs(json.loads(kind)).kind for kind in kinds} == {
        "json_schema", "regex", "choice", "grammar",
    }  # fmt: skip


def test_the_table_names_every_keyword_and_every_format() -> None:
    names = set(re.findall(r"[$\w-]+", TABLE))
    left_out = {"$anchor", "$id", "$schema", "id", "example", "additionalItems"}
    left_out |= {"minContains", "maxContains", "contentSchema", "$dynamicAnchor", "$vocabulary"}
    left_out |= {"$recursiveRef", "$recursiveAnchor"}
    assert (ENFORCED.keys() | REFUSED.keys() | ANNOTATIONS) - left_out <= names
    assert {name for name in FORMATS if not re.fullmatch("uuid[1-8]", name)} <= names


def test_the_page_gives_the_limits_of_the_check() -> None:
    assert f"{MAX_DEPTH} levels of nesting and {MAX_VALUES:,} values" in PAGE
