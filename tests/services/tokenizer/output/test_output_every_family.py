from __future__ import annotations

import json

import pytest
from support.tokenizer.output.broken import broken_outputs, legal_outputs
from support.tokenizer.output.ordinary import ordinary_cases
from support.tokenizer.output.replay import (
    KINDS,
    atoms,
    check,
    every_cut,
    joined,
    run,
    vocabularies,
)
from support.tokenizer.output.written import written

from penstock.services.tokenizer.output.families import FAMILIES
from penstock.services.tokenizer.output.family import Family

NAMES = sorted(name for name, family in FAMILIES.items() if family.envelope is not None)
LEAST = 20
"""Outputs that each family is tried with, legal and broken; ten times as many in the slow run."""


@pytest.mark.parametrize("name", NAMES)
def test_what_a_family_writes_is_read_alike_however_it_is_cut(name: str) -> None:
    """One vocabulary cuts a case at each place, the other one the next case but one."""
    for number, case in enumerate(ordinary_cases(FAMILIES[name])):
        check(FAMILIES[name], case, () if number % 2 else KINDS[number % 4 // 2 :][:1])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_what_a_family_writes_is_read_alike_however_either_vocabulary_cuts_it(name: str) -> None:
    for case in ordinary_cases(FAMILIES[name]):
        check(FAMILIES[name], case)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_broken_output_is_read_alike_however_it_is_cut(name: str) -> None:
    family = FAMILIES[name]
    legal = legal_outputs(family)
    known = len(ordinary_cases(family)) if family.envelope is not None else 0
    broken = broken_outputs(family, LEAST - known - len(legal))
    for number, output in enumerate((*legal, *broken)):
        every_cut(family, output, thorough=KINDS[number % 2 :][:1])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_many_broken_outputs_are_read_alike_however_they_are_cut(name: str) -> None:
    for output in broken_outputs(FAMILIES[name], 10 * LEAST):
        for tools in (True, False):
            every_cut(FAMILIES[name], output, parses_tools=tools)


@pytest.mark.parametrize("apart", [4, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_an_output_that_ends_anywhere_keeps_what_it_has(name: str, apart: int) -> None:
    family = FAMILIES[name]
    output = "Well.\n" + written(family, [("weather", {"city": "Rome"}), ("search", {"limit": 5})])
    for first, vocabulary in enumerate(vocabularies(family).values()):
        pieces = atoms(output, vocabulary)
        # Places between them with the other vocabulary.
        for end in range(first * apart // 2, len(pieces), apart):
            whole = run(family, vocabulary, joined(pieces[:end]))
            assert run(family, vocabulary, pieces[:end]) == whole, pieces[:end]
            assert all(event[-1] for event in whole if event[0] != "call")
            assert family.channels or _is_kept(
                family, "".join(text for _, text in pieces[:end]), whole
            )


TWO = [("weather", {"city": "Rome"}), ("search", {"limit": 5})]
LIMITS = {"single": {"single": True}, "allowed": {"allowed": frozenset({"weather"})}}


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("name", NAMES)
def test_a_call_that_may_not_come_is_none_however_the_output_is_cut(name: str, limit: str) -> None:
    family = FAMILIES[name]
    for events in every_cut(family, written(family, TWO), **LIMITS[limit]).values():
        assert [event[3] for event in events if event[0] == "call"] == ["weather"]
        arguments = "".join(event[-1] for event in events if event[0] == "arguments")
        assert json.loads(arguments) == {"city": "Rome"}
        content = "".join(event[-1] for event in events if event[0] == "text")
        assert ("limit" in content) == (limit == "allowed")


@pytest.mark.parametrize("name", NAMES)
def test_nothing_behind_the_only_call_belongs_to_an_output(name: str) -> None:
    family = FAMILIES[name]
    output = written(family, TWO[:1])
    for vocabulary in vocabularies(family).values():
        only = run(family, vocabulary, atoms(output, vocabulary), single=True)
        assert run(family, vocabulary, atoms(output + "\nDone.", vocabulary), single=True) == only
        for legal in (*legal_outputs(family), *broken_outputs(family, 5)):
            every_cut(family, legal, single=True, thorough=())


def _is_kept(family: Family, output: str, events: list[tuple[object, ...]]) -> bool:
    """Content is what stands before the calls; behind them stands what may have become one."""
    content = "".join(str(event[-1]) for event in events if event[0] == "text")
    if not any(event[0] == "call" for event in events):
        return content == output
    return content.startswith("Well.") and (content[5:] == "" or output.endswith(content[5:]))
