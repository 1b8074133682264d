"""Which prefixes this engine's KV cache holds, as it tells the router in its beats.

A prefix is known by its digest (``penstock.protocol.prefix_digest``) and held as long as the prefix
cache can find the block that ends it. Sequences are looked at ahead of a beat if their prompts have
been computed or they have left their slots since the last one, so no step waits for it. An engine
that is the only one of its model tells nothing, since the router has no choice; when another one
joins it tells all that it holds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict

from penstock.protocol.prefix_digest import BOUNDARIES, DIGEST_BYTES, covered, extended, split
from penstock.protocol.wire.messages.membership import PrefixReport
from penstock.services.scheduler.kv_cache import KVCache
from penstock.services.scheduler.sequence import Sequence

MAX_HELD = 8192
"""Digests that are told of, those in latest use: 64 KiB in a report of all."""
MAX_CHANGES = 1024
"""Digests in a report of changes: 8 KiB."""
MAX_LATE = 4 * MAX_CHANGES
"""If the router has missed more changes than this, it is told everything again."""
MAX_UNSEEN = 1024
"""Sequences that wait to be looked at, so that no more of them are kept in memory."""


class CachedPrefixes:
    """The prefixes that are held, and what has changed since the router was last told.

    A change is told until the router says that it knows it, so what a lost beat brought comes with
    the next one.
    """

    def __init__(self) -> None:
        self._held: OrderedDict[bytes, bytes] = OrderedDict()
        """Digest of a prefix → name of its last block; those in latest use come last."""
        self._ends: dict[bytes, bytes] = {}
        """The same the other way round."""
        self._changed: OrderedDict[bytes, int] = OrderedDict()
        """Digest → version of its last change, in ascending order."""
        self._version = 1
        """The number of the latest change; 1 where there was none yet."""
        self._logged_from = 1
        """``_changed`` has all changes after this version."""
        self._unseen: dict[int, Sequence] = {}
        """Sequences whose prefixes are to be looked at, by number."""
        self._kv: KVCache | None = None
        self._told = True

    def begin(self, kv: KVCache) -> None:
        """Follow a cache, which is empty."""
        self._unseen.clear()
        self._kv = kv
        kv.follow(self.evicted)

    def tell(self, told: bool) -> None:
        """Whether the router has a use for reports."""
        if told and not self._told:
            self._logged_from = self._version
        elif self._told and not told:
            self._changed.clear()
        self._told = told

    def note(self, sequence: Sequence) -> None:
        """A sequence has more in the cache, or leaves it there: look at it ahead of a report."""
        self._unseen[sequence.number] = sequence
        if len(self._unseen) >= MAX_UNSEEN:
            self._look_at_unseen()

    def _look_at_unseen(self) -> None:
        unseen, self._unseen = self._unseen, {}
        if self._kv is not None:
            for sequence in unseen.values():
                self._look(sequence, self._kv)

    def _look(self, sequence: Sequence, kv: KVCache) -> None:
        """Look which prefixes of a sequence are held, unless it has no more than last time."""
        request, names, block_size = sequence.request, sequence.kv.digests, kv.block_size
        virtual = request.head.virtual_tokens  # a digest names what stands behind them
        reach = bisect_right(BOUNDARIES, len(names) * block_size - virtual)
        if sequence.num_noted == reach:
            return
        sequence.num_noted = reach
        digests, is_batch = request.prefix, request.num_prompts > 1
        count = len(digests) // DIGEST_BYTES
        if not is_batch and count != bisect_right(BOUNDARIES, request.prompt_len - virtual):
            return  # whoever sent the request does not make any
        # Of a batch the router knows only what all its prompts begin with.
        if not is_batch and reach > count:
            more = sequence.tokens[virtual + covered(count) :]
            digests = extended(digests, request.root, more.tobytes())
        for boundary, digest in zip(BOUNDARIES, split(digests), strict=False):
            index, inside = divmod(virtual + boundary, block_size)
            if index > len(names):
                return
            if not inside and kv.finds(names[index - 1]):
                self._hold(digest, names[index - 1])

    def evicted(self, name: bytes) -> None:
        """The prefix cache finds a block no more."""
        digest = self._ends.pop(name, None)
        if digest is not None:
            self._held.pop(digest, None)
            self._change(digest)

    def report(self, known: int) -> PrefixReport | None:
        """What the router, which knows version ``known``, lacks; ``None``: nothing."""
        self._look_at_unseen()
        if not self._told:
            return None
        changed = self._changed
        while changed and next(iter(changed.values())) <= known:
            _, self._logged_from = changed.popitem(last=False)
        if known < self._logged_from or len(changed) > MAX_LATE:
            return PrefixReport(0, self._version, b"".join(self._held))
        if not changed:
            return None
        told = [digest for digest, _ in zip(changed, range(MAX_CHANGES), strict=False)]
        held = [digest for digest in told if digest in self._held]
        gone = [digest for digest in told if digest not in self._held]
        return PrefixReport(known, changed[told[-1]], b"".join(held), b"".join(gone))

    def _hold(self, digest: bytes, name: bytes) -> None:
        before = self._held.get(digest)
        if before == name:
            self._held.move_to_end(digest)
            return
        if before is not None:
            self._ends.pop(before, None)
        self._held[digest] = name
        self._held.move_to_end(digest)
        self._ends[name] = digest
        self._change(digest)
        if len(self._held) > MAX_HELD:
            oldest, name = self._held.popitem(last=False)
            self._ends.pop(name, None)
            self._change(oldest)

    def _change(self, digest: bytes) -> None:
        self._version += 1
        if not self._told:
            return
        self._changed[digest] = self._version
        self._changed.move_to_end(digest)
        if len(self._changed) > 2 * MAX_LATE:
            _, self._logged_from = self._changed.popitem(last=False)
