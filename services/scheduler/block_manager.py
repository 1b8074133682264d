"""KV blocks: who holds them, and which ones still hold the K and V of a known prefix.

Every block is in exactly one of three states:

    free     nobody holds it and its content is worthless
    cached   nobody holds it, but its content can be found by hash; the least recently used goes
             first when free blocks run out
    used     held by ``ref_count`` sequences (and perhaps also found by hash)

All operations are O(1) for each block, except the repair after a failed step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

OnEvicted = Callable[[bytes], None]
"""The content of this digest can be found no more."""
OnBlock = Callable[[bytes, int], None]
"""The content of this digest is in this block."""


class BlockManager:
    """Hands out the blocks 0 … ``num_blocks`` - 1."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._steps = [0] * num_blocks
        """The step that completes a block that is in the prefix cache."""
        self._by_digest: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._watched: frozenset[bytes] = frozenset()
        self._watch_losses = False
        self.watch_passed = True
        """Nothing has happened since ``watch`` by which more of that chain's blocks may be held."""
        self.on_evicted: OnEvicted | None = None
        self.on_named: OnBlock | None = None
        """Hears of blocks that can be found from now on."""
        self.on_reused: OnBlock | None = None
        """Hears of blocks whose content is about to be overwritten, while it can still be read."""

    def watch(self, digests: Iterable[bytes], also_lost: bool = False) -> None:
        """Look out for blocks of this chain that become known, or known ones that are taken; with
        ``also_lost`` for those that can be found no more too."""
        self._watched = frozenset(digests)
        self._watch_losses = also_lost
        self.watch_passed = True

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def allocate(self, count: int) -> list[int]:
        """Take blocks nobody holds; the caller has looked at ``num_available``."""
        blocks, free, counts = [], self._free, self._ref_counts
        for _ in range(count):
            if free:
                block = free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                if self.on_reused is not None and (digest := self._digests[block]) is not None:
                    self.on_reused(digest, block)
                self._unname(block)
            counts[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: list[int]) -> None:
        """Give up one hold on each. The last blocks of a prefix become the first to be reused."""
        counts, digests, cached = self._ref_counts, self._digests, self._cached
        for block in reversed(blocks):
            count = counts[block] = counts[block] - 1
            if count == 0:
                if digests[block] is None:
                    self._free.append(block)
                else:
                    cached[block] = None

    def match(self, digests: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known beginning of a hash chain. Holds nothing yet."""
        found, known = [], self._by_digest.get
        for digest in digests:
            block = known(digest)
            if block is None:
                break
            found.append(block)
        return found

    def find(self, digest: bytes) -> int | None:
        """The block with this content, if it is known."""
        return self._by_digest.get(digest)

    def completed_by(self, block: int) -> int:
        """The step that completes a block that can be found."""
        return self._steps[block]

    def num_unheld(self, blocks: list[int]) -> int:
        """How many of these nobody holds: holding them takes as many from ``num_available``."""
        counts = self._ref_counts
        return [counts[block] for block in blocks].count(0)

    def hold(self, blocks: list[int]) -> None:
        """Take matched blocks, before anything else is allocated."""
        counts, cached = self._ref_counts, self._cached
        for block in blocks:
            count = counts[block]
            if count == 0:
                del cached[block]
                self.watch_passed = False
            counts[block] = count + 1

    def cache(self, block: int, digest: bytes, step: int) -> None:
        """Let a held, full block be found, from the step that completes it on.

        Of two blocks with the same content the first stays known.
        """
        if self._digests[block] is None and digest not in self._by_digest:
            if digest in self._watched:
                self.watch_passed = False
            self._by_digest[digest] = block
            self._digests[block] = digest
            self._steps[block] = step
            if self.on_named is not None:
                self.on_named(digest, block)

    def forget(self, digests: Iterable[bytes]) -> None:
        """Let these blocks be found no more; whoever holds them keeps them."""
        for digest in digests:
            block = self._by_digest.get(digest)
            if block is not None:
                self._forget(block)

    def forget_since(self, step: int) -> None:
        """Forget every block that a step from this one on completes. O(cached blocks)."""
        for block in [b for b in self._by_digest.values() if self._steps[b] >= step]:
            self._forget(block)

    def forget_all(self) -> None:
        """Forget every block. O(cached blocks)."""
        for block in list(self._by_digest.values()):
            self._forget(block)

    def _forget(self, block: int) -> None:
        self._unname(block)
        if self._ref_counts[block] == 0:
            del self._cached[block]
            self._free.append(block)

    def _unname(self, block: int) -> None:
        digest = self._digests[block]
        if digest is not None:
            del self._by_digest[digest]
            self._digests[block] = None
            if self._watch_losses and digest in self._watched:
                self.watch_passed = False
            if self.on_evicted is not None:
                self.on_evicted(digest)

    def check(self, tables: Iterable[list[int]]) -> None:
        """Compare every count with the block tables in use. Raises ``RuntimeError``."""
        held = [0] * self.num_blocks
        for table in tables:
            if len(dict.fromkeys(table)) != len(table):
                raise RuntimeError(f"a block table names a block twice: {table}")
            for block in table:
                held[block] += 1
        if held != self._ref_counts:
            wrong = [b for b in range(self.num_blocks) if held[b] != self._ref_counts[b]]
            raise RuntimeError(f"blocks with wrong reference counts: {wrong}")
        idle = sorted([*self._free, *self._cached])
        if idle != [b for b in range(self.num_blocks) if not held[b]]:
            raise RuntimeError("free + cached + used blocks are not all blocks")
        for block, digest in enumerate(self._digests):
            if digest is not None and self._by_digest.get(digest) != block:
                raise RuntimeError(f"block {block} has a hash that finds another block")
        named = sum(digest is not None for digest in self._digests)
        if named != len(self._by_digest) or any(self._digests[b] is None for b in self._cached):
            raise RuntimeError("the prefix cache and the cached blocks differ")
