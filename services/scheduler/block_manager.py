"""KV blocks: who holds them, and which ones still hold the K and V of a known prefix.

Every block is in exactly one of three states:

    free     nobody holds it and its content is worthless
    cached   nobody holds it, but its content can be found by hash; when free blocks run out, the
             least recently used goes first: of a tenant that has too many, else of those that no
             request retains, else of all
    used     held by ``ref_count`` sequences (and perhaps also found by hash)

All operations are O(1) for each block, except the repair after a failed step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from penstock.services.scheduler.cache_shares import DEFAULT_SHARES, CacheShares, TenantQueues
from penstock.services.scheduler.retained_blocks import RetainedBlocks
from penstock.services.scheduler.stats import Counters

MOST_LAPSES = 2048
"""Marks whose time is over that end at once: about 2 ms."""
OnEvicted = Callable[[bytes], None]
"""The content of this digest can be found no more."""
OnBlock = Callable[[bytes, int], None]
"""The content of this digest is in this block."""


class BlockManager:
    """Hands out the blocks 0 … ``num_blocks`` - 1."""

    def __init__(
        self,
        num_blocks: int,
        shares: CacheShares = DEFAULT_SHARES,
        counters: Counters | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        most_each = int(shares.tenant * num_blocks)
        self._tenants = TenantQueues(most_each) if shares.has_tenants else None
        self._ref_counts = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._steps = [0] * num_blocks
        """The step that completes a block that is in the prefix cache."""
        self._by_digest: dict[bytes, int] = {}
        self.retained = RetainedBlocks(
            num_blocks, shares, counters or Counters(), self._by_digest.get
        )
        """Nobody else changes it."""
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Without those in ``retained.idle``."""
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
        return len(self._free) + len(self._cached) + len(self.retained.idle)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached) + len(self.retained.idle)

    @property
    def num_retained(self) -> int:
        """Blocks that requests have asked to retain, cached or used."""
        return len(self.retained.marks)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def allocate(self, count: int) -> list[int]:
        """Take blocks nobody holds; the caller has looked at ``num_available``."""
        blocks, free, counts = [], self._free, self._ref_counts
        cached = self._cached if self._tenants is None else None
        for _ in range(count):
            if free:
                block = free.pop()
            else:
                block = cached.popitem(last=False)[0] if cached else self._first_to_go()
                if self.on_reused is not None and (digest := self._digests[block]) is not None:
                    self.on_reused(digest, block)
                self._unname(block)
            counts[block] = 1
            blocks.append(block)
        return blocks

    def _first_to_go(self) -> int:
        """Take a block out of the cache where tenants are bounded, or all others are retained."""
        block = None if self._tenants is None else self._tenants.first_of_excess()
        if block is None and self._cached:
            block = next(iter(self._cached))
        if block is None:
            block = next(iter(self.retained.idle))
        self._take_out(block)
        if block in self.retained.marks:
            self.retained.cut(block)
        return block

    def release(self, blocks: list[int], tenant: str = "") -> None:
        """Give up one hold on each, of a tenant's sequence. The last blocks of a prefix become the
        first to be reused."""
        counts, digests, cached = self._ref_counts, self._digests, self._cached
        marks, idle = self.retained.marks, self.retained.idle
        for block in reversed(blocks):
            count = counts[block] = counts[block] - 1
            if count == 0:
                if digests[block] is None:
                    self._free.append(block)
                elif self._tenants is None:
                    (idle if block in marks else cached)[block] = None
                else:
                    self._put_in(block, tenant)

    def _put_in(self, block: int, tenant: str) -> None:
        """Nobody holds this block any more, and it can be found."""
        if block in self.retained.marks:
            self.retained.idle[block] = None
            return
        self._cached[block] = None
        if self._tenants is not None:
            self._tenants.add(block, tenant)

    def _take_out(self, block: int) -> None:
        """Undo that."""
        if block not in self._cached:
            del self.retained.idle[block]
            return
        del self._cached[block]
        if self._tenants is not None:
            self._tenants.remove(block)

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
        counts, cached, idle = self._ref_counts, self._cached, self.retained.idle
        for block in blocks:
            count = counts[block]
            if count == 0:
                if self._tenants is None:
                    del (cached if block in cached else idle)[block]
                else:
                    self._take_out(block)
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

    # What requests ask of the cache.

    def retain(
        self, digests: list[bytes], tenant: str, seconds: int, now: float, first: int = 0
    ) -> None:
        """Let the known blocks of a chain be reused after all others for so long, for a request of
        this tenant. ``now``: monotonic seconds; ``first``: where the first of them lies in the
        chain. O(blocks that are not retained yet)."""
        retained = self.retained
        new = retained.set(digests[: retained.most_each], first, tenant, seconds, now)
        for block in reversed(new):
            if self._ref_counts[block] == 0:
                self._take_out(block)
                retained.idle[block] = None
        for block in retained.excess(tenant):
            self._end_retention(block, cut=True)

    def lapse(self, now: float) -> None:
        """End what was to be retained until now; of very many blocks the rest the next time."""
        for _ in range(MOST_LAPSES):
            if (block := self.retained.first_over(now)) is None:
                return
            self._end_retention(block)

    def let_go(self, digests: Iterable[bytes], tenant: str, *, shared: bool) -> None:
        """Let the known blocks of a chain that nobody holds be reused before all others, the last
        ones first, and retain none of the chain any longer. Where the chain is ``shared`` by
        several tenants, that holds for the blocks which this one alone has asked to retain."""
        for digest in digests:
            block = self._by_digest.get(digest)
            if block is None:
                continue
            mark = self.retained.marks.get(block)
            if shared and (mark is None or mark.tenant != tenant):
                continue
            self._end_retention(block)
            if self._ref_counts[block] == 0:
                self._cached.move_to_end(block, last=False)
                if self._tenants is not None:
                    self._tenants.put_first(block)

    def _end_retention(self, block: int, *, cut: bool = False) -> None:
        """Take the mark off a block, if it has one."""
        mark = self.retained.cut(block) if cut else self.retained.end(block)
        if mark is not None and self._ref_counts[block] == 0:
            del self.retained.idle[block]
            self._put_in(block, mark.tenant or "")

    def _forget(self, block: int) -> None:
        if self._ref_counts[block] == 0:
            self._take_out(block)
            self._free.append(block)
        self._unname(block)

    def _unname(self, block: int) -> None:
        digest = self._digests[block]
        if digest is not None:
            del self._by_digest[digest]
            self._digests[block] = None
            if self.retained.marks:
                self.retained.end(block)
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
        self.retained.check()
        if self._tenants is not None:
            self._tenants.check(self._cached)
        cached = [*self._cached, *self.retained.idle]
        idle = sorted([*self._free, *cached])
        if idle != [b for b in range(self.num_blocks) if not held[b]]:
            raise RuntimeError("free + cached + used blocks are not all blocks")
        for block, digest in enumerate(self._digests):
            if digest is not None and self._by_digest.get(digest) != block:
                raise RuntimeError(f"block {block} has a hash that finds another block")
        named = sum(digest is not None for digest in self._digests)
        if named != len(self._by_digest) or any(self._digests[b] is None for b in cached):
            raise RuntimeError("the prefix cache and the cached blocks differ")
        marks = self.retained.marks
        if any(self._digests[b] is None for b in marks) or marks.keys() & self._cached.keys():
            raise RuntimeError("blocks are retained that cannot be found, or are reused too early")
