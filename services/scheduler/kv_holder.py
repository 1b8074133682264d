"""Who holds KV blocks: a sequence, or something else for a while (a transfer, a pin, a swap)."""

from __future__ import annotations

from array import array

NEVER = 1 << 62


class KVHolder:
    """Block tables, one for each group of layers. Made and changed by the ``KVCache`` alone."""

    __slots__ = ("expected", "tables")

    def __init__(self, num_groups: int) -> None:
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.expected: list[bytes] = []
        """Names of its blocks, in order, while their content is still to come."""


class SequenceHolder(KVHolder):
    """The tables of a sequence, and the names of its blocks."""

    __slots__ = ("behind", "capacity", "digests", "next_name", "root", "tenant", "tokens")

    def __init__(self, num_groups: int, tokens: array[int], root: bytes, tenant: str = "") -> None:
        super().__init__(num_groups)
        self.tokens = tokens
        """The sequence's own array of tokens, which grows with it."""
        self.root = root
        """Start of the hash chain."""
        self.tenant = tenant
        """Whose sequence it is."""
        self.digests: list[bytes] = []
        """Chained hash of each full block of ``tokens``, as far as anyone asked."""
        self.capacity = 0
        """Positions that the tables reach to; they are all of one length."""
        self.behind = [0] * num_groups
        """Blocks at the beginning of each table that are given back."""
        self.next_name = NEVER
        """Index of the next block that is to enter the prefix cache when its tokens are known.
        ``NEVER``: not while its known tokens are computed, nor when they are not to be trusted."""

    def reset(self) -> None:
        """It holds nothing; what its blocks are called stays."""
        self.tables = [[] for _ in self.tables]
        self.behind = [0] * len(self.behind)
        self.capacity = 0
        self.next_name = NEVER
