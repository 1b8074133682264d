"""What the prefix cache has of the beginning of a sequence, and tables as plans tell them."""

from __future__ import annotations

from typing import NamedTuple


class Prefix(NamedTuple):
    """What the cache has of the beginning of a sequence. Nobody holds it on that account."""

    length: int
    """In blocks."""
    tables: list[list[int]]
    """For each group, ``length`` long; ``NO_BLOCK`` where none is needed."""

    def flat(self) -> list[int]:
        """As a plan tells a table: the blocks of all groups for each stretch of positions."""
        return interleaved(self.tables)


NOTHING = Prefix(0, [])


def interleaved(tables: list[list[int]]) -> list[int]:
    """Tables of one length as one list: the first block of every group, then the second ones."""
    if len(tables) == 1:
        return tables[0]
    return [block for blocks in zip(*tables, strict=True) for block in blocks]
