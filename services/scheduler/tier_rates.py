"""How long copies of KV blocks take, against the prefill that they spare."""

from __future__ import annotations

from penstock.services.scheduler.prefill_budget import PrefillBudget

LEAST_WAIT_SECONDS = 1.0
MOST_WAIT_SECONDS = 10.0
"""What a sequence waits for a load at most, and while nobody knows what its prefill would take."""
SLOWER_WAIT = 2.0
"""A load may take this many times as long as the prefill that it saves before that is done."""
_SMOOTHING = 0.2
_FORGETTING = 0.9
"""What a rate that keeps loads away is multiplied by each time, so that it is measured again."""


class TierRates:
    """Of one engine: seconds for a byte, 0 while that is not known."""

    def __init__(self, prefill: PrefillBudget) -> None:
        self._prefill = prefill
        self.slot_bytes = self.block_size = 1
        self.store = self.load = 0.0
        self._loaded_at = self._stored_at = 0.0
        """When a load, and a store, was over last."""

    def forget(self) -> None:
        """Blocks are others from now on."""
        self.store = self.load = 0.0

    def _prefill_seconds(self, blocks: int) -> float:
        return self._prefill.prefill_seconds(blocks * self.block_size)

    def pays(self, blocks: int, rate: float) -> bool:
        """Whether it is quicker to copy so many blocks than to compute them, as far as known."""
        prefill = self._prefill_seconds(blocks)
        return not prefill or not rate or blocks * self.slot_bytes * rate < prefill

    def load_pays(self, blocks: int) -> bool:
        """The same of a load. A rate that keeps it away fades."""
        if self.pays(blocks, self.load):
            return True
        self.load *= _FORGETTING
        return False

    def longest_wait(self, blocks: int) -> float:
        """Seconds that a load of so many blocks may take."""
        saved = self._prefill_seconds(blocks)
        wait = max(LEAST_WAIT_SECONDS, SLOWER_WAIT * saved) if saved else MOST_WAIT_SECONDS
        return min(wait, MOST_WAIT_SECONDS)

    def stored(self, blocks: int, seconds: float, now: float) -> None:
        """So many blocks were stored. Stores that are under way at a time share the way, too."""
        seconds, self._stored_at = min(seconds, now - self._stored_at), now
        self.store = _mean(self.store, seconds / (blocks * self.slot_bytes))

    def loaded(self, blocks: int, began: float, now: float, piece: int) -> None:
        """So many blocks were loaded; fewer than ``piece`` count for less, and not at first: their
        time is mostly latency. Loads that are under way at a time share the way: each counts from
        the end of the one before."""
        seconds, self._loaded_at = now - max(began, self._loaded_at), now
        share = blocks / piece
        if self.load or share >= 1:
            self.load = _mean(self.load, seconds / (blocks * self.slot_bytes), min(1.0, share))

    def late(self, blocks: int) -> None:
        """Nobody waited for a load any longer: what takes so long is computed, for a while."""
        seconds = SLOWER_WAIT * self._prefill_seconds(blocks)
        self.load = max(self.load, seconds / blocks / self.slot_bytes)


def _mean(old: float, new: float, share: float = 1.0) -> float:
    return old + share * _SMOOTHING * (new - old) if old else new
