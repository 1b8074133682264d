"""Under keywords thrown together at random, no small value passes that is not valid."""

from __future__ import annotations

import random

import pytest
from support.conformance.schema_faults import faults
from support.conformance.schema_masks import compiled, compiled_raw, takes, walk
from support.conformance.wild_schemas import small_values, wild_schema


def check(seeds: range) -> None:
    """Every small value that passes, and a random answer, must be valid."""
    texts = small_values()
    accepted = 0
    for seed in seeds:
        schema = wild_schema(seed)
        matcher = compiled(schema)
        if isinstance(matcher, str):
            continue
        accepted += 1
        answers = [text for text in texts if takes(matcher, text)]
        answer = walk(matcher, "bytes", random.Random(seed), patience=25, most=150)
        for text in [*answers, *([answer] if answer else [])]:
            assert not faults(schema, text), (seed, schema, text)
    assert accepted > 0.4 * len(seeds), "too few schemas were accepted to say anything"


def test_no_small_value_passes_that_is_not_valid() -> None:
    check(range(60))


@pytest.mark.slow
def test_no_small_value_passes_that_is_not_valid_for_many_schemas() -> None:
    check(range(10_000, 14_000))


def test_without_the_check_small_values_pass_that_are_not_valid() -> None:
    """What the check and the rewriting are for; nothing else would notice that they do nothing."""
    wrong = 0
    for seed in range(150):
        schema = wild_schema(seed)
        matcher = compiled_raw(schema, json_allowed_escapes='nrbtf\\"u')
        if not isinstance(matcher, str):
            texts = [text for text in small_values()[-20:] if takes(matcher, text)]
            wrong += any(faults(schema, text) for text in texts)
    assert wrong
