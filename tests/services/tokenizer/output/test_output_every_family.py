from __future__ import annotations

import pytest
from ordinary import ordinary_cases
from replay import atoms, check, joined, run, vocabularies
from written import written

from penstock.services.tokenizer.output.families import FAMILIES
from penstock.services.tokenizer.output.family import Family

NAMES = sorted(name for name, family in FAMILIES.items() if family.envelope is not None)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_family_writes_is_read_alike_however_it_is_cut(name: str) -> None:
    for case in ordinary_cases(FAMILIES[name]):
        check(FAMILIES[name], case)


@pytest.mark.parametrize("name", NAMES)
def test_an_output_that_ends_anywhere_keeps_what_it_has(name: str) -> None:
    family = FAMILIES[name]
    output = "Well.\n" + written(family, [("weather", {"city": "Rome"}), ("search", {"limit": 5})])
    for vocabulary in vocabularies(family).values():
        pieces = atoms(output, vocabulary)
        for end in range(len(pieces)):
            whole = run(family, vocabulary, joined(pieces[:end]))
            assert run(family, vocabulary, pieces[:end]) == whole, pieces[:end]
            assert all(event[-1] for event in whole if event[0] != "call")
            assert family.channels or _is_kept(
                family, "".join(text for _, text in pieces[:end]), whole
            )


def _is_kept(family: Family, output: str, events: list[tuple[object, ...]]) -> bool:
    """Content is what stands before the calls; behind them stands what may have become one."""
    content = "".join(str(event[-1]) for event in events if event[0] == "text")
    if not any(event[0] == "call" for event in events):
        return content == output
    return content.startswith("Well.") and (content[5:] == "" or output.endswith(content[5:]))
