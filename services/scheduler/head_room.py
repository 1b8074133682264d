"""Whether the head of the queue has room, without a look at its whole prefix at every plan."""

from __future__ import annotations

from typing import NamedTuple

from penstock.services.scheduler.kv_cache import KVCache
from penstock.services.scheduler.kv_holder import SequenceHolder
from penstock.services.scheduler.kv_prefix import Prefix


class _Unfit(NamedTuple):
    """A head of the queue that had no room."""

    holder: SequenceHolder
    num_tokens: int
    held: int
    """Blocks of its cached prefix that others held: it need not take them from the free ones."""


class HeadRoom:
    """Compares what a newcomer needs with what there is beside what running sequences need soon.

    Nothing is reserved by it. It only keeps a newcomer from taking blocks that its elders would
    take back by preemption a moment later.
    """

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        self._unfit: _Unfit | None = None

    def fits(self, holder: SequenceHolder, prefix: Prefix, owed: int) -> bool:
        """Whether there is room for all known tokens of a newcomer.

        ``owed``: blocks that running sequences will ask for soon.
        """
        held = self._kv.num_held(prefix)
        if self._has_room(holder, held, owed):
            self._unfit = None
            return True
        self._unfit = _Unfit(holder, len(holder.tokens), held)
        self._kv.watch(holder)
        return False

    def may_fit(self, holder: SequenceHolder, owed: int) -> bool:
        """Whether a newcomer that had no room is worth another look: its prefix of 120,000 tokens
        is not matched anew at every plan while it waits.

        What others hold of its prefix has not grown since, if nobody has taken a block out of the
        cache and none of its chain has become known. So with too few blocks free it has no room.
        """
        unfit = self._unfit
        if unfit is None or unfit.holder is not holder or not self._kv.watch_passed:
            return True
        if unfit.num_tokens != len(holder.tokens):
            return True
        return self._has_room(holder, unfit.held, owed)

    def _has_room(self, holder: SequenceHolder, held: int, owed: int) -> bool:
        """``held``: blocks of its prefix that it shares with those who hold them."""
        needed = self._kv.needed(len(holder.tokens) + 1) - held
        return needed + owed <= self._kv.num_available
