"""Blocks that requests have asked to retain: they are reused after all others, for a while.

A retained block is an ordinary block of the prefix cache with a mark on it. Marks are bounded in
number; where there are too many, the one set longest ago ends. A mark ends too when its time is
over, when the block leaves the cache, and when the tenant that set it takes it back.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from penstock.services.scheduler.cache_shares import CacheShares
from penstock.services.scheduler.stats import Counters


class Mark(NamedTuple):
    """Why a block is retained."""

    tenant: str | None
    """Whose request asked for it; ``None``: requests of several tenants did."""
    seconds: int
    until: float
    """Monotonic seconds."""


class RetainedBlocks:
    """The marks, and those marked blocks that nobody holds.

    All operations are O(1) for each block. Time must not go backwards.
    """

    def __init__(self, num_blocks: int, shares: CacheShares, counters: Counters) -> None:
        self.most = int(shares.retained * num_blocks)
        """Marks at once."""
        self.marks: dict[int, Mark] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()
        """Marked blocks that nobody holds, least recently used first."""
        self.most_each = int(shares.tenant * self.most) if shares.has_tenants else self.most
        """Marks of one tenant at once."""
        self._by_seconds: dict[int, OrderedDict[int, None]] = {}
        """Marks set for equally long: the one that ends first comes first."""
        self._by_tenant: dict[str, OrderedDict[int, None]] = {}
        """The one set first comes first; kept where one tenant may not have all."""
        self._bounds_tenants = self.most_each < self.most
        self._counters = counters

    def set(self, block: int, tenant: str, seconds: int, now: float) -> bool:
        """Mark a block, or prolong its mark. Returns whether it had none."""
        old, until, owner = self.marks.get(block), now + seconds, _owner(tenant)
        if old is not None:
            if old.tenant != owner:
                owner = None
            if old.until > until:
                if owner != old.tenant:
                    self._set_owner(block, old, owner)
                return False
            self._drop(block)
        self.marks[block] = Mark(owner, seconds, until)
        self._by_seconds.setdefault(seconds, OrderedDict())[block] = None
        if self._bounds_tenants and owner is not None:
            self._by_tenant.setdefault(owner, OrderedDict())[block] = None
        return old is None

    def end(self, block: int) -> Mark | None:
        """Take the mark off a block, if it has one. Whoever calls sees to a block in ``idle``."""
        return self._drop(block) if block in self.marks else None

    def cut(self, block: int) -> Mark:
        """The same before its time, for want of room."""
        self._counters.cut_retentions += 1
        return self._drop(block)

    def first_over(self, now: float) -> int | None:
        """A block whose time is over, if there is any."""
        for queue in self._by_seconds.values():
            block = next(iter(queue))
            if self.marks[block].until <= now:
                return block
        return None

    def first_of_excess(self, tenant: str) -> int | None:
        """A block whose mark must end because there are too many, or too many of a tenant's."""
        if self._bounds_tenants and len(own := self._by_tenant.get(tenant, ())) > self.most_each:
            return next(iter(own))
        if len(self.marks) <= self.most:
            return None
        firsts = [next(iter(queue)) for queue in self._by_seconds.values()]
        return min(firsts, key=self._set_at)

    def _set_at(self, block: int) -> tuple[float, int]:
        mark = self.marks[block]
        return mark.until - mark.seconds, mark.seconds

    def _set_owner(self, block: int, mark: Mark, owner: str | None) -> None:
        self.marks[block] = mark._replace(tenant=owner)
        self._leave_tenant(block, mark)

    def _drop(self, block: int) -> Mark:
        mark = self.marks.pop(block)
        queue = self._by_seconds[mark.seconds]
        del queue[block]
        if not queue:
            del self._by_seconds[mark.seconds]
        self._leave_tenant(block, mark)
        return mark

    def _leave_tenant(self, block: int, mark: Mark) -> None:
        if not self._bounds_tenants or mark.tenant is None:
            return
        own = self._by_tenant[mark.tenant]
        del own[block]
        if not own:
            del self._by_tenant[mark.tenant]

    def check(self) -> None:
        """Compare all queues with the marks. Raises ``RuntimeError``."""
        marks = self.marks
        queued = [block for queue in self._by_seconds.values() for block in queue]
        if sorted(queued) != sorted(marks) or not all(self._by_seconds.values()):
            raise RuntimeError("retained blocks and those whose time is known differ")
        for queue in self._by_seconds.values():
            ends = [marks[block].until for block in queue]
            if ends != sorted(ends):
                raise RuntimeError("retained blocks do not end in their order")
        if len(marks) > self.most or not self.idle.keys() <= marks.keys():
            raise RuntimeError(f"{len(marks)} blocks are retained, at most {self.most} may be")
        owned = {(mark.tenant, block) for block, mark in marks.items() if mark.tenant is not None}
        known = {(tenant, block) for tenant, own in self._by_tenant.items() for block in own}
        if self._bounds_tenants and owned != known:
            raise RuntimeError("retained blocks and those of tenants differ")


def _owner(tenant: str) -> str | None:
    """Requests of no tenant may be anybody's."""
    return tenant or None
