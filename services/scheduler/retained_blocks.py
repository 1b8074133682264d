"""Blocks that requests have asked to retain: they are reused after all others, for a while.

A retained block is an ordinary block of the prefix cache with a mark on it. Marks are bounded in
number; where there are too many, those set longest ago end, first of a tenant that has more than an
equal part. A mark ends too when its time is over, when the block leaves the cache, and when the
tenant that set it takes it back.

Marks that are alike along a chain are one ``Run``: a request costs what it adds to those that are
there, not what it prolongs. A run is divided where a request marks a part of it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

from penstock.services.scheduler.cache_shares import CacheShares
from penstock.services.scheduler.retained_runs import Run, RunQueue
from penstock.services.scheduler.stats import Counters

MOST_PIECES = 64
"""A chain that is in more runs which could be one is put together. Conversations that begin alike
divide it where they part; clients could do so at each block."""


class RetainedBlocks:
    """The marks, and those marked blocks that nobody holds. Time must not go backwards."""

    def __init__(
        self,
        num_blocks: int,
        shares: CacheShares,
        counters: Counters,
        find: Callable[[bytes], int | None],
    ) -> None:
        """find: the block with this content, if it is known."""
        self.most = int(shares.retained * num_blocks)
        """Marks at once."""
        self.marks: dict[int, Run] = {}
        """Why a block is retained."""
        self.idle: OrderedDict[int, None] = OrderedDict()
        """Marked blocks that nobody holds, least recently used first."""
        self.most_each = int(shares.tenant * self.most) if shares.has_tenants else self.most
        """Marks of one tenant at once."""
        self._by_seconds: dict[int, RunQueue] = {}
        """Marks set for equally long: the one that ends first comes first."""
        self._by_tenant: dict[str, RunQueue] = {}
        """The one set first comes first."""
        self._of_tenant: Counter[str] = Counter()
        """Marks of each tenant."""
        self._settings = 0
        self._counters, self._find = counters, find

    def set(
        self, names: list[bytes], first: int, tenant: str, seconds: int, now: float
    ) -> list[int]:
        """Mark the known blocks of a chain, or prolong their marks. Returns those that had none.

        names: of blocks in a row, of which the first is number ``first`` of the chain. O(blocks
        that had no mark), and O(log blocks) for each run that is there.
        """
        self._settings += 1
        # Requests of no tenant may be anybody's.
        setting = Run([], first, tenant or None, seconds, now + seconds, self._settings)
        new: list[int] = []
        pieces: list[Run] = []
        at, last = 0, None
        while at < len(names):
            block = self._find(names[at])
            if block is None:
                at, last = at + 1, None
                continue
            run = self.marks.get(block)
            if run is None:
                last = self._mark(names, at, setting, last, new)
            else:
                last = self._part(run, names, at, first)
                self._prolong(last, setting)
            at = last.first - first + len(last.names)
            if last.setting == setting.setting and last not in pieces[-1:]:
                pieces.append(last)
        if len(pieces) > MOST_PIECES:
            self._join(pieces)
        return new

    def _mark(
        self, names: list[bytes], at: int, setting: Run, last: Run | None, new: list[int]
    ) -> Run:
        """Mark the block at ``at`` and those behind it that have no mark, and add them to ``new``.
        last: the run that ends at ``at``, if one does. Returns the one that they belong to."""
        run = last
        if run is None or (run.setting, run.tenant) != (setting.setting, setting.tenant):
            run = replace(setting, names=[], first=setting.first + at)
            self._enqueue(run)
        marks = self.marks
        for name in islice(names, at, None):
            block = self._find(name)
            if block is None or block in marks:
                break
            marks[block] = run
            new.append(block)
            run.names.append(name)
        self._count(run, len(run.names) - run.live)
        run.live = len(run.names)
        return run

    def _prolong(self, run: Run, setting: Run) -> None:
        """The shorter of two marks takes nothing from the longer one."""
        owner = setting.tenant if run.tenant == setting.tenant else None
        if run.until > setting.until:
            if run.tenant != owner:
                self._leave_tenant(run)
                run.tenant = None
            return
        self._dequeue(run)
        run.tenant, run.setting = owner, setting.setting
        run.seconds, run.until = setting.seconds, setting.until
        self._enqueue(run)

    def _part(self, run: Run, names: list[bytes], at: int, first: int) -> Run:
        """The part of a run that a chain goes through from ``at`` on, as a run of its own."""
        if run.live < len(run.names):
            run = self._mend(run, names[at])
        if before := first + at - run.first:
            run = self._split(run, before)[1]
        count = run.common(names, at)
        return run if count == len(run.names) else self._split(run, count)[0]

    def _mend(self, run: Run, name: bytes) -> Run:
        """Leave out of a run what has lost its mark. Returns the one that has this name now."""
        marks, part, found = self.marks, None, run
        for index, one in enumerate(run.names):
            block = self._find(one)
            if block is None or marks.get(block) is not run:
                part = None
                continue
            if part is None:
                part = replace(run, names=[], first=run.first + index, live=0)
                self._enqueue(part)
            part.names.append(one)
            part.live += 1
            marks[block] = part
            if one == name:
                found = part
        run.live = 0
        self._dequeue(run)
        return found

    def _split(self, run: Run, at: int) -> tuple[Run, Run]:
        """Divide a run whose blocks all have its mark. O(blocks of the smaller part)."""
        head, tail = run.names[:at], run.names[at:]
        if len(tail) < len(head):
            other = replace(run, names=tail, first=run.first + at, live=0)
            run.names = head
        else:
            other = replace(run, names=head, live=0)
            run.names, run.first = tail, run.first + at
        self._enqueue(other)
        run.live, other.live = len(run.names), len(other.names)
        for name in other.names:
            self.marks[self._known(name)] = other
        return (other, run) if other.names is head else (run, other)

    def _join(self, runs: list[Run]) -> None:
        """Make one of runs of one setting that lie behind each other. O(their blocks)."""
        whole = runs[0]
        for run in runs[1:]:
            if run.tenant != whole.tenant or whole.first + len(whole.names) != run.first:
                whole = run
                continue
            for name in run.names:
                self.marks[self._known(name)] = whole
            whole.names += run.names
            whole.live, run.live = len(whole.names), 0
            self._dequeue(run)

    def end(self, block: int) -> Run | None:
        """Take the mark off a block, if it has one. Whoever calls sees to a block in ``idle``."""
        return self._drop(block) if block in self.marks else None

    def cut(self, block: int) -> Run:
        """The same before its time, for want of room."""
        self._counters.cut_retentions += 1
        return self._drop(block)

    def _drop(self, block: int) -> Run:
        run = self.marks.pop(block)
        run.live -= 1
        self._count(run, -1)
        if run.live:
            self._last(run)  # leaves out what has lost its marks, which mostly is the end
        else:
            self._dequeue(run)
        return run

    def first_over(self, now: float) -> int | None:
        """A block whose time is over, if there is any."""
        for queue in self._by_seconds.values():
            if (run := queue.first()).until <= now:
                return self._last(run)
        return None

    def excess(self, tenant: str) -> Iterator[int]:
        """Blocks whose marks must end because there are too many, or too many of a tenant's. Each
        is to be cut before the next one is asked for."""
        counts, by_tenant = self._of_tenant, self._by_tenant
        while counts[tenant] > self.most_each:
            yield self._last(by_tenant[tenant].first())
        while (over := len(self.marks) - self.most) > 0:
            largest, spare = self._largest()
            if spare:
                for _ in range(min(over, spare)):
                    yield self._last(by_tenant[largest].first())
            else:
                firsts = (queue.first() for queue in self._by_seconds.values())
                yield self._last(min(firsts, key=lambda run: run.setting))

    def _largest(self) -> tuple[str, int]:
        """Who has the most marks of several tenants, and how many more than an equal part of all
        that there may be; 0: nobody has."""
        counts = self._of_tenant
        if len(counts) < 2:
            return "", 0
        largest = max(counts, key=lambda tenant: (counts[tenant], tenant))
        return largest, max(0, counts[largest] - self.most // len(counts))

    def _last(self, run: Run) -> int:
        """The last block of a run that still has its mark."""
        while True:
            block = self._find(run.names[-1])
            if block is not None and self.marks.get(block) is run:
                return block
            run.names.pop()

    def _known(self, name: bytes) -> int:
        if (block := self._find(name)) is None:
            raise RuntimeError("a block has a mark and cannot be found")
        return block

    def _enqueue(self, run: Run) -> None:
        self._by_seconds.setdefault(run.seconds, RunQueue()).add(run)
        if run.tenant is not None:
            self._by_tenant.setdefault(run.tenant, RunQueue()).add(run)
            self._of_tenant[run.tenant] += run.live

    def _dequeue(self, run: Run) -> None:
        queue = self._by_seconds[run.seconds]
        queue.remove(run)
        if not queue:
            del self._by_seconds[run.seconds]
        self._leave_tenant(run)

    def _leave_tenant(self, run: Run) -> None:
        if run.tenant is None:
            return
        queue = self._by_tenant[run.tenant]
        queue.remove(run)
        self._count(run, -run.live)
        if not queue:
            del self._by_tenant[run.tenant], self._of_tenant[run.tenant]

    def _count(self, run: Run, blocks: int) -> None:
        """A run that is in its queues has so many more."""
        if run.tenant is not None:
            self._of_tenant[run.tenant] += blocks

    def check(self) -> None:
        """Compare all queues and runs with the marks. Raises ``RuntimeError``."""
        marks = self.marks
        runs = [run for queue in self._by_seconds.values() for run in queue]
        for run in runs:
            blocks = [block for name in run.names if (block := self._find(name)) is not None]
            if not run.live or run.live != sum(marks.get(block) is run for block in blocks):
                raise RuntimeError("a run of retained blocks is counted wrongly")
        if sum(run.live for run in runs) != len(marks) or not all(self._by_seconds.values()):
            raise RuntimeError("retained blocks and those whose time is known differ")
        for queue in self._by_seconds.values():
            ends = [run.until for run in queue]
            if ends != sorted(ends):
                raise RuntimeError("retained blocks do not end in their order")
        if len(marks) > self.most or not self.idle.keys() <= marks.keys():
            raise RuntimeError(f"{len(marks)} blocks are retained, at most {self.most} may be")
        self._check_tenants(runs)

    def _check_tenants(self, runs: list[Run]) -> None:
        owned, counts = dict[Run, None](), Counter[str]()
        for run in runs:
            if run.tenant is not None:
                owned[run] = None
                counts[run.tenant] += run.live
        known = {run: None for queue in self._by_tenant.values() for run in queue}
        if owned != known or dict(counts) != dict(self._of_tenant):
            raise RuntimeError("retained blocks and those of tenants differ")
