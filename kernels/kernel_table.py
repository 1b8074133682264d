"""Choices between kernels, and between ways to cut them, that were measured on the device at hand.

A choice is a line, ``few_rows 4096x1024x8 = 1 4 8 8``: a table, what it is for, and what is chosen.
``penstock tune`` measures choices and writes them; without one a kernel has its own tables and
rules. Needs no torch.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Table(NamedTuple):
    """What its lines say, for errors and documentation."""

    sizes: tuple[str, ...]
    numbers: tuple[str, ...]


_CUT = ("blocks", "warps", "depth", "x_depth")
_KINDS = ("int4", "int8", "fp8")
_WEIGHT = ("outputs", "inputs", "rows")
TABLES = {
    "few_rows": Table(_WEIGHT, _CUT),
    "gated_few_rows": Table(_WEIGHT, _CUT),
    "hopper_rows": Table(("hidden", "mlp"), ("first", "last")),
    "compressed_rows": Table(("hidden", "mlp"), ("first", "last")),
    **{f"few_{kind}": Table(_WEIGHT, (*_CUT, "splits")) for kind in _KINDS},
    **{
        f"tiled_{kind}": Table(_WEIGHT, ("tile_rows", "tile_columns", "warps", "stages", "splits"))
        for kind in _KINDS
    },
}
"""``few_rows``: ``few_rows_linear``, ``few_…`` and ``tiled_…``: ``code_shapes``. ``…_rows`` of a
model: the numbers of rows, from and to, that ``rows_linear_hopper`` or ``compressed_linear_hopper``
multiplies; 0 0: none."""
MOST_HOPPER_ROWS = 128
_LARGEST = 256
_LINE = re.compile(r"(\w+) (\d+(?:x\d+)*) = (\d+(?: \d+)*)")


class Choice(NamedTuple):
    table: str
    sizes: tuple[int, ...]
    numbers: tuple[int, ...]

    def __str__(self) -> str:
        sizes, numbers = "x".join(map(str, self.sizes)), " ".join(map(str, self.numbers))
        return f"{self.table} {sizes} = {numbers}"


def read_choice(line: str) -> Choice:
    """Raises ``ValueError`` that names the line."""
    found = _LINE.fullmatch(line.strip())
    if found is None:
        raise ValueError(f"{line!r}: a choice is TABLE SIZES = NUMBERS, few_rows 4096x1024x8 = …")
    table = TABLES.get(found[1])
    if table is None:
        raise ValueError(f"{line!r}: no such table; there are {', '.join(TABLES)}")
    sizes, numbers = tuple(map(int, found[2].split("x"))), tuple(map(int, found[3].split()))
    if (len(sizes), len(numbers)) != (len(table.sizes), len(table.numbers)):
        wanted = f"{'x'.join(table.sizes)} = {' '.join(table.numbers)}"
        raise ValueError(f"{line!r}: {found[1]} has {wanted}")
    choice = Choice(found[1], sizes, numbers)
    if reason := _why_not(table, numbers):
        raise ValueError(f"{line!r}: {reason}")
    return choice


def _why_not(table: Table, numbers: tuple[int, ...]) -> str:
    named = dict(zip(table.numbers, numbers, strict=True))
    if "first" in named:
        first, last = numbers
        if numbers != (0, 0) and not 1 <= first <= last <= MOST_HOPPER_ROWS:
            return f"rows go from 1 to {MOST_HOPPER_ROWS} at most, or are 0 0"
        return ""
    for name, number in named.items():
        if not 1 <= number <= _LARGEST:
            return f"{name} goes from 1 to {_LARGEST}"
        if name in ("warps", "tile_rows", "tile_columns") and number & (number - 1):
            return f"{name} is a power of two"
    return ""


_chosen: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
_tried = threading.local()


def use_choices(choices: Iterable[Choice]) -> None:
    """Let kernels of this process have these and no others. Before they are compiled."""
    _chosen.clear()
    _chosen.update({(each.table, each.sizes): each.numbers for each in choices})


@contextmanager
def trying(choice: Choice) -> Iterator[None]:
    """Let kernels that this thread launches meanwhile have it."""
    _tried.choice = choice
    try:
        yield
    finally:
        _tried.choice = None


def chosen(table: str, *sizes: int) -> tuple[int, ...] | None:
    """What was chosen; ``None``: nothing was."""
    tried: Choice | None = getattr(_tried, "choice", None)
    if tried is not None and (tried.table, tried.sizes) == (table, sizes):
        return tried.numbers
    return _chosen.get((table, sizes))
