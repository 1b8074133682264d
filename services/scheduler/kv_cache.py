"""The one owner of KV memory: who holds which blocks, and what can be found in the prefix cache.

A block belongs to one group of layers while somebody holds it or it can be found; all groups draw
on the same blocks. The tables of a sequence, one for each group, have one length. A group with a
window gives blocks back that lie wholly before it, and its table names no block there.

A block may serve the next plan as soon as it is given back, because the worker executes plans in
order. Whatever runs outside of its steps (a transfer, a copy) must wait for the step that was
planned last when it took its blocks.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Ordered

from penstock.protocol.wire.messages.engine import NO_BLOCK, LayerGroup
from penstock.services.scheduler.block_hash import BLOCK_HASH_BYTES, BlockHasher
from penstock.services.scheduler.block_manager import BlockManager, OnEvicted
from penstock.services.scheduler.cache_shares import DEFAULT_SHARES, CacheShares
from penstock.services.scheduler.kv_groups import ONE_FULL, make_groups
from penstock.services.scheduler.kv_holder import NEVER, KVHolder, SequenceHolder
from penstock.services.scheduler.kv_prefix import NOTHING, Prefix, interleaved
from penstock.services.scheduler.stats import Counters

COMPLETE = 0
"""In place of a step's number: the content is there whatever becomes of unanswered steps."""


class KVCache:
    """KV memory of one engine."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        groups: Ordered[LayerGroup] = ONE_FULL,
        most_step: int = 1,
        shares: CacheShares = DEFAULT_SHARES,
        counters: Counters | None = None,
    ) -> None:
        """``most_step``: positions of one sequence that are computed at once, at most: its tables
        reach no further beyond the position that it has come to for certain."""
        self.block_size = block_size
        self.num_groups = len(groups)
        self.blocks = BlockManager(num_blocks, shares, counters)
        """Nobody else touches these, checks and tests excepted."""
        self._groups = make_groups(groups, block_size, most_step)
        self._windows = any(group.window for group in groups)
        self._several = self._windows or len(groups) > 1
        """Not the one group without a window that has a shorter way everywhere."""
        self._caching = enable_prefix_caching
        self._hasher = BlockHasher(block_size)
        self._holders: dict[KVHolder, None] = {}
        """All that hold blocks or did lately, in the order in which they began."""
        self._others = 0
        """How many of them are no sequences."""
        self._unnamed: deque[SequenceHolder] = deque()
        """Sequences whose known tokens have completed blocks that nobody finds yet."""

    # Counts.

    @property
    def num_available(self) -> int:
        """Blocks that can be had: free ones, and those that the cache can do without."""
        return self.blocks.num_available

    @property
    def held_aside(self) -> bool:
        """Something that is no sequence holds blocks, and will give them back."""
        return self._others > 0

    def blocks_for(self, positions: int) -> int:
        """How long a table is that reaches over so many positions."""
        return -(-positions // self.block_size)

    def needed(self, positions: int) -> int:
        """Blocks that a sequence of this length holds at once, at most, over all groups."""
        length = self.blocks_for(positions)
        if not self._windows:
            return length * self.num_groups
        return sum(group.needed(length) for group in self._groups)

    def owed(self, holder: SequenceHolder) -> int:
        """Blocks that a running sequence will ask for until its known tokens and one more are
        computed; at least one for each group."""
        length = self.blocks_for(len(holder.tokens) + 1)
        if not self._windows:
            return self.num_groups * max(1, length - len(holder.tables[0]))
        tables = zip(self._groups, holder.tables, holder.behind, strict=True)
        return sum(
            max(1, min(length - len(table), group.needed(length) - len(table) + behind))
            for group, table, behind in tables
        )

    def room(self, holder: SequenceHolder) -> int:
        """Positions that a sequence's tables can reach to with all blocks that can be had."""
        return holder.capacity + self.num_available // self.num_groups * self.block_size

    # Sequences.

    def new_holder(self, tokens: array[int], root: bytes, tenant: str = "") -> SequenceHolder:
        """For a tenant's sequence of these tokens, which may grow. It holds nothing yet."""
        return SequenceHolder(self.num_groups, tokens, root, tenant)

    def digests(self, holder: SequenceHolder, count: int) -> list[bytes]:
        """The names of the first ``count`` blocks of a sequence, which must be full."""
        return self._hasher.extend(holder, count)[:count]

    def match(self, holder: SequenceHolder) -> Prefix:
        """What the prefix cache has for a sequence to begin with.

        Of a group with a window that is what the next position attends to. The block of the last
        known token is left out: its K and V may be there, but the logits that the next token is
        drawn from are not.
        """
        if not self._caching:
            return NOTHING
        count = (len(holder.tokens) - 1) // self.block_size
        digests = self.digests(holder, count)
        if not self._several:
            table = self.blocks.match(digests)
            return Prefix(len(table), [table])
        return self._match_groups(digests)

    def _match_groups(self, digests: list[bytes]) -> Prefix:
        length, before = len(digests), -1
        while length != before:  # what suits one group may be too long for another
            before = length
            for group in self._groups:
                length = group.longest(self.blocks, digests, length)
        tables = []
        for group in self._groups:
            behind = group.blocks_behind(length * self.block_size)
            found = self.blocks.match(group.names(digests[behind:length]))
            tables.append([NO_BLOCK] * behind + found)
        return Prefix(length, tables)

    def num_held(self, prefix: Prefix) -> int:
        """Blocks of a prefix that others hold: to hold them takes none from those to be had."""
        if not self._several and prefix.length:
            (table,) = prefix.tables
            return len(table) - self.blocks.num_unheld(table)
        tables = [[b for b in table if b != NO_BLOCK] for table in prefix.tables]
        return sum(len(table) - self.blocks.num_unheld(table) for table in tables)

    def watch(self, holder: SequenceHolder) -> None:
        """Look out for what may let others hold more of a sequence's prefix."""
        names = (name for group in self._groups for name in group.names(holder.digests))
        self.blocks.watch(names, also_lost=self._windows)

    @property
    def watch_passed(self) -> bool:
        """Nothing has happened since ``watch`` by which others may hold more of that prefix."""
        return self.blocks.watch_passed

    def begin(self, holder: SequenceHolder, prefix: Prefix) -> None:
        """Hold a prefix that was just matched, before anything else is taken."""
        self._holders[holder] = None
        if not prefix.length:
            return
        for number, found in enumerate(prefix.tables):
            if self._windows:
                behind = self._groups[number].blocks_behind(prefix.length * self.block_size)
                holder.behind[number] = behind
                self.blocks.hold(found[behind:])
            else:
                self.blocks.hold(found)
            holder.tables[number] += found
        holder.capacity = prefix.length * self.block_size

    def lacks(self, holder: SequenceHolder, positions: int) -> int:
        """Blocks that ``grow`` would take."""
        missing = -(-(positions - holder.capacity) // self.block_size)
        return self.num_groups * max(0, missing)

    def grow(self, holder: SequenceHolder, positions: int) -> list[int]:
        """Let the tables of a sequence that has begun reach over this many positions, or more; the
        caller has looked at ``room``. Returns what is new, as a plan tells it."""
        missing = -(-(positions - holder.capacity) // self.block_size)
        if missing <= 0:
            return []
        holder.capacity += missing * self.block_size
        if self.num_groups == 1:
            new = self.blocks.allocate(missing)
            holder.tables[0] += new
            return new
        parts = [self.blocks.allocate(missing) for _ in self._groups]
        for table, part in zip(holder.tables, parts, strict=True):
            table += part
        return interleaved(parts)

    def advance(self, holder: SequenceHolder, position: int) -> None:
        """No plan from now on computes a position of this sequence before this one.

        The blocks that its known tokens complete enter the prefix cache soon (``name_some``), with
        windows at once, since their groups then give back what lies before. ``position`` is what is
        certain: where a step may bring several tokens, the first that the next may begin with.
        """
        if self._windows:
            self._name_known(holder)
            self._give_back(holder, position)
        elif (holder.next_name + 1) * self.block_size < len(holder.tokens):
            self._unnamed.append(holder)

    def name_some(self, share: int = 8) -> None:
        """Let blocks that were completed be found: of so many sequences one, and eight at least.
        Those of one length complete a block in the same step: a plan that named all of them would
        come too late for the device."""
        for _ in range(min(len(self._unnamed), max(8, len(self._unnamed) // share))):
            self._name_known(self._unnamed.popleft())

    def _give_back(self, holder: SequenceHolder, position: int) -> None:
        for number, (group, table) in enumerate(zip(self._groups, holder.tables, strict=True)):
            first = holder.behind[number]
            end = min(group.blocks_behind(position), len(table))
            if end > first:
                self.blocks.release(table[first:end], holder.tenant)
                table[first:end] = [NO_BLOCK] * (end - first)
                holder.behind[number] = end

    def name_chunk(self, holder: SequenceHolder, start: int, end: int, step: int) -> None:
        """Step ``step`` computes positions ``start`` to ``end`` of a sequence's known tokens: the
        blocks that it completes can be found from that step on."""
        if not self._caching:
            return
        full = end // self.block_size
        self._name_blocks(holder, start // self.block_size, full, step)
        holder.next_name = full if end == len(holder.tokens) else NEVER

    def _name_known(self, holder: SequenceHolder) -> None:
        """Name blocks of generated tokens. The last known token's K and V are not there yet; those
        of all before it were written by steps that have been answered."""
        first = holder.next_name
        full = (len(holder.tokens) - 1) // self.block_size
        if first < full:
            holder.next_name = full
            self._name_blocks(holder, first, full, COMPLETE)

    def _name_blocks(self, holder: SequenceHolder, first: int, end: int, step: int) -> None:
        digests, cache = self._hasher.extend(holder, end), self.blocks.cache
        if not self._several:
            table = holder.tables[0]
            for index in range(first, end):
                cache(table[index], digests[index], step)
            return
        for group, table, behind in zip(self._groups, holder.tables, holder.behind, strict=True):
            for index in range(max(first, behind), end):
                cache(table[index], group.name(digests[index]), step)

    def compute_again(self, holder: SequenceHolder) -> None:
        """A step brought no token: the next one writes K and V of the last known token once more.
        If it ends a block, that must not be found until it is done: the step may fail."""
        full, rest = divmod(len(holder.tokens), self.block_size)
        if rest or holder.next_name != full:
            return
        holder.next_name = full - 1
        for group in self._groups:
            self.blocks.forget(group.names(holder.digests[full - 1 : full]))

    def distrust(self, holder: SequenceHolder) -> None:
        """What a sequence computed, or began with, must not be used by anyone who comes."""
        for group in self._groups:
            self.blocks.forget(group.names(holder.digests))
        holder.next_name = NEVER

    # What requests ask of the prefix cache.

    def retain(self, holder: SequenceHolder, tokens: int, seconds: int, now: float) -> list[bytes]:
        """Let the full blocks of a sequence's first tokens be reused after all others for so long.
        Returns their names in the first group without a window, as far as they are retained."""
        count = min(tokens // self.block_size, len(holder.digests))
        for group in self._groups:
            behind = group.blocks_behind(count * self.block_size)
            names = group.names(holder.digests[behind:count])
            self.blocks.retain(names, holder.tenant, seconds, now, behind)
        return holder.digests[: min(count, self.blocks.retained.most_each)]

    def lapse(self, now: float) -> None:
        """Retain nothing beyond its time. To be called often."""
        self.blocks.lapse(now)

    def let_go(self, holder: SequenceHolder, begin: int = 0, *, shared: bool) -> None:
        """Reuse first what nobody holds of a sequence, from a position on; of a shared one what its
        tenant retains."""
        first, count = begin // self.block_size, len(holder.tokens) // self.block_size
        digests = self.digests(holder, count)[first:] if self._caching and first < count else []
        for group in self._groups:
            self.blocks.let_go(group.names(digests), holder.tenant, shared=shared)

    # What is no sequence.

    def pin(self, digests: list[bytes], group: int = 0) -> KVHolder:
        """Hold the longest known beginning of a chain in one group, to be read (sent, swapped
        out) while its sequence may end."""
        found = self.blocks.match(self._groups[group].names(digests))
        self.blocks.hold(found)
        return self._aside(group, found)

    def expect(self, digests: list[bytes], group: int = 0) -> KVHolder | None:
        """Take a block of one group for each digest, whose content is to come from elsewhere.

        Nobody finds them before ``ready``. ``None``: there are not enough blocks.
        """
        if len(digests) > self.num_available:
            return None
        holder = self._aside(group, self.blocks.allocate(len(digests)))
        holder.expected = self._groups[group].names(digests)
        return holder

    def _aside(self, group: int, blocks: list[int]) -> KVHolder:
        holder = KVHolder(self.num_groups)
        holder.tables[group] = blocks
        self._holders[holder] = None
        self._others += 1
        return holder

    def ready(self, holder: KVHolder) -> None:
        """The content of expected blocks is there: they can be found, and are held until
        ``release``. One whose content has become known otherwise meanwhile is not."""
        blocks = (block for table in holder.tables for block in table)
        for name, block in zip(holder.expected, blocks, strict=False):
            self.blocks.cache(block, name, COMPLETE)
        holder.expected = []

    # All holders.

    def release(self, holder: KVHolder) -> None:
        """Give back all that it holds. What can be found stays in the cache until its blocks are
        needed; expected content that never came is forgotten. It may begin anew."""
        del self._holders[holder]
        if isinstance(holder, SequenceHolder):
            self._name_known(holder)
            for table, behind in zip(holder.tables, holder.behind, strict=True):
                self.blocks.release(table[behind:] if behind else table, holder.tenant)
            holder.reset()
            return
        self._others -= 1
        for table in holder.tables:
            self.blocks.release(table)
        holder.tables = [[] for _ in holder.tables]
        holder.expected = []

    # After failures.

    def forget_since(self, step: int) -> None:
        """What this step and later ones complete cannot be found any more."""
        self.blocks.forget_since(step)

    def forget_all(self) -> None:
        """Nothing can be found any more."""
        self.blocks.forget_all()

    # Looking in.

    def finds(self, digest: bytes) -> bool:
        """Whether a block of the first group without a window can be found by this name."""
        return self.blocks.find(digest) is not None

    def follow(self, on_evicted: OnEvicted) -> None:
        """Tell of every digest that can be found no more, from now on; of several groups those of
        the first one without a window."""
        if self.num_groups == 1:
            self.blocks.on_evicted = on_evicted
            return

        def if_whole(digest: bytes) -> None:
            if len(digest) == BLOCK_HASH_BYTES:
                on_evicted(digest)

        self.blocks.on_evicted = if_whole

    def check(self, sequences: Iterable[SequenceHolder]) -> None:
        """Compare all counts with the tables: ``sequences`` are those that run. O(blocks). Raises
        ``RuntimeError``."""
        running = dict.fromkeys(sequences)
        held = {holder: None for holder in self._holders if isinstance(holder, SequenceHolder)}
        if running.keys() != held.keys():
            raise RuntimeError("those that hold KV blocks and those that run differ")
        if len(self._holders) - len(held) != self._others:
            raise RuntimeError("holders that are no sequences are counted wrongly")
        for holder in held:
            self._check_tables(holder)
        tables, groups = [table for one in self._holders for table in one.tables], dict[int, int]()
        for place, table in enumerate(tables):
            group = place % self.num_groups
            for block in table:
                if block != NO_BLOCK and groups.setdefault(block, group) != group:
                    raise RuntimeError(f"block {block} is in tables of two groups")
        self.blocks.check([b for b in table if b != NO_BLOCK] for table in tables)

    def _check_tables(self, holder: SequenceHolder) -> None:
        for table, behind in zip(holder.tables, holder.behind, strict=True):
            if len(table) * self.block_size != holder.capacity:
                raise RuntimeError("capacity and block table differ")
            if NO_BLOCK in table[behind:] or any(block != NO_BLOCK for block in table[:behind]):
                raise RuntimeError(f"a table has other gaps than its first {behind} blocks")
