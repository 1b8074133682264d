"""Outputs of a family that are nearly right: legal ones in which a few marks, words or brackets are
missing, doubled, swapped or foreign, or that end too early."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator

from support.tokenizer.output.replay import EXTRA_SPECIAL
from support.tokenizer.output.wire_forms import FORMS
from support.tokenizer.output.written import written

from penstock.services.tokenizer.output.family import Family

_CALLS = [("weather", {"city": "Rome", "days": 3}), ("now", {})]
_SYNTAX = [*"<>{}[]()\"'\\,:= \n", "</", "\\u00", "null", "é😀", EXTRA_SPECIAL]


def broken_outputs(family: Family, count: int) -> Iterator[str]:
    """So many different ones, the same each time."""
    draw = random.Random(family.name)
    marks = sorted(_marks(family), key=len, reverse=True)
    legal = legal_outputs(family)
    found = set(legal)
    while len(found) < count + len(legal):
        units = _units(draw.choice(legal), marks)
        for _ in range(draw.choice([1, 1, 2, 3])):
            draw.choice(_FAULTS)(draw, units, marks)
        output = "".join(units)
        if output not in found:
            found.add(output)
            yield output


def legal_outputs(family: Family) -> list[str]:
    """Two calls as the family writes them, with and without what may stand before and behind."""
    found = [form.write(_CALLS) for form in FORMS.values() if form.family == family.name]
    if family.envelope is not None:
        found.append(written(family, _CALLS))
    found += [f"Well.\n{output}\nSo." for output in found]
    if family.reasoning is not None:
        begin = family.reasoning.open + family.reasoning.label
        found.append(f"{begin}\nHm.\n{family.reasoning.close}\n{found[0]}")
    return found


def _marks(family: Family) -> set[str]:
    marks = set(family.marks.values())
    if family.reasoning is not None:
        marks |= {family.reasoning.open, family.reasoning.close}
    return marks


def _units(output: str, marks: list[str]) -> list[str]:
    known = "|".join(map(re.escape, marks))
    return re.findall(rf"{known}|\w+|.", output, re.DOTALL)


def _missing(draw: random.Random, units: list[str], marks: list[str]) -> None:
    if units:
        del units[draw.randrange(len(units))]


def _doubled(draw: random.Random, units: list[str], marks: list[str]) -> None:
    if units:
        place = draw.randrange(len(units))
        units.insert(place, units[place])


def _swapped(draw: random.Random, units: list[str], marks: list[str]) -> None:
    if units:
        one, other = draw.randrange(len(units)), draw.randrange(len(units))
        units[one], units[other] = units[other], units[one]


def _foreign(draw: random.Random, units: list[str], marks: list[str]) -> None:
    chosen = draw.choice(draw.choice([marks, _SYNTAX]))
    units.insert(draw.randrange(len(units) + 1), chosen)


def _part_of_a_mark(draw: random.Random, units: list[str], marks: list[str]) -> None:
    mark = draw.choice(marks)
    units.insert(draw.randrange(len(units) + 1), mark[: draw.randrange(len(mark))])


def _early_end(draw: random.Random, units: list[str], marks: list[str]) -> None:
    del units[draw.randrange(len(units) + 1) :]


_FAULTS: list[Callable[[random.Random, list[str], list[str]], None]] = [
    _missing, _missing, _doubled, _swapped, _foreign, _foreign, _part_of_a_mark, _early_end,
]  # fmt: skip
