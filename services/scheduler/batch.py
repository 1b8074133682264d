"""The running batch: which sequence is in which slot of the worker."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from penstock.services.scheduler.cached_prefixes import CachedPrefixes
from penstock.services.scheduler.kv_cache import KVCache
from penstock.services.scheduler.kv_holder import NEVER
from penstock.services.scheduler.limits import Limits
from penstock.services.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from penstock.services.scheduler.adapter_places import AdapterPlaces


class RunningBatch:
    """Slots and those who sit in them.

    A slot that is released goes to ``gone`` for the next plan, which frees it first: slot and
    blocks can serve that same plan, because the worker executes plans in order.
    """

    def __init__(self, limits: Limits, kv: KVCache, prefixes: CachedPrefixes | None = None) -> None:
        """``prefixes``: is shown what sequences leave in the prefix cache."""
        self._kv = kv
        self._row_tokens = limits.max_row_tokens
        self._prefixes = prefixes
        self._slots: list[Sequence | None] = [None] * limits.max_num_seqs
        self._free_slots = list(range(limits.max_num_seqs))
        """A heap: low slots first keeps the worker's batch dense."""
        self._micro_batches = limits.micro_batches
        self._turn = 0
        """The micro-batch that has decoded last."""
        self._decoding: list[Sequence] | None = []
        self.sequences: dict[int, Sequence] = {}
        """Sequences by their number, in order of admission."""
        self.gone: list[int] = []
        """Slots that the next plan must drop."""
        self.adapters: AdapterPlaces | None = None
        """Hears of sequences that have an adapter."""

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    @property
    def decoding(self) -> list[Sequence]:
        """In ascending slot order: the order of their rows. A new list after every change."""
        if self._decoding is None:
            self._decoding = [s for s in self._slots if s is not None and s.decoding]
        return self._decoding

    def next_micro_batch(self) -> tuple[int, list[Sequence]]:
        """The micro-batch whose turn it is, of those with decoding sequences, and these."""
        count, decoding = self._micro_batches, self.decoding
        for number in range(self._turn + 1, self._turn + 1 + count):
            if own := [s for s in decoding if s.slot % count == number % count]:
                self._turn = number % count
                return self._turn, own
        return self._turn, []

    @property
    def prefilling(self) -> list[Sequence]:
        """In order of admission."""
        return [s for s in self.sequences.values() if not s.decoding]

    @property
    def lone_suspect(self) -> bool:
        """A suspect has the engine for itself."""
        return len(self.sequences) == 1 and next(iter(self.sequences.values())).suspect

    def admit(self, sequence: Sequence) -> None:
        """Give a sequence the lowest free slot; it has no blocks yet and begins with prefill."""
        slot = heapq.heappop(self._free_slots) if self._micro_batches == 1 else self._evenly()
        sequence.slot = slot
        sequence.decoding = False
        sequence.num_noted = 0
        self._slots[slot] = sequence
        self.sequences[sequence.number] = sequence
        if self.adapters is not None and sequence.request.head.adapter:
            self.adapters.started(sequence)

    def _evenly(self) -> int:
        """Take the lowest free slot of the smallest micro-batch."""
        sizes = [0] * self._micro_batches
        for sequence in self.sequences.values():
            sizes[sequence.slot % len(sizes)] += 1
        slot = min(self._free_slots, key=lambda slot: (sizes[slot % len(sizes)], slot))
        self._free_slots.remove(slot)
        heapq.heapify(self._free_slots)
        return slot

    def start_decoding(self, sequence: Sequence) -> None:
        """All its known tokens are planned: from the next plan on it has a decode row."""
        sequence.decoding = True
        self.set_due(sequence)
        self._decoding = None
        self._note_prefixes(sequence)

    def set_due(self, sequence: Sequence) -> None:
        """Say when the planner must look at a decoding sequence: its tables have changed."""
        sequence.due = self._due(sequence)

    def _due(self, sequence: Sequence) -> int:
        """Its limit counts where each row brings one token. Else only results tell when it is
        there, and its blocks are to suffice for the most that a row may bring."""
        capacity, last = sequence.kv.capacity, sequence.max_len - 1
        if capacity >= last:
            return last if self._row_tokens == 1 else NEVER
        return capacity - self._row_tokens + 1

    def release(self, sequence: Sequence) -> None:
        """Take slot and blocks back. What is in flight for it stays in flight."""
        self._slots[sequence.slot] = None
        heapq.heappush(self._free_slots, sequence.slot)
        self.gone.append(sequence.slot)
        del self.sequences[sequence.number]
        if self.adapters is not None and sequence.request.head.adapter:
            self.adapters.left(sequence)
        self._kv.release(sequence.kv)
        self._note_prefixes(sequence)
        if sequence.decoding:
            self._decoding = None
        sequence.slot = -1
        sequence.decoding = False
        sequence.num_served = max(sequence.num_served, sequence.num_computed)
        sequence.num_computed = 0

    def _note_prefixes(self, sequence: Sequence) -> None:
        if self._prefixes is not None:
            self._prefixes.note(sequence)

    def take_gone(self) -> list[int]:
        gone, self.gone = self.gone, []
        return gone

    def check(self) -> None:
        """Every slot is used once or free. Raises ``RuntimeError``."""
        used = [slot for slot, sequence in enumerate(self._slots) if sequence is not None]
        if sorted([*used, *self._free_slots]) != list(range(len(self._slots))):
            raise RuntimeError("used and free slots are not all slots")
        if sorted(s.slot for s in self.sequences.values()) != used:
            raise RuntimeError("slots and running sequences differ")
        for sequence in self.sequences.values():
            if self._slots[sequence.slot] is not sequence or sequence.finished:
                raise RuntimeError(f"slot {sequence.slot} holds a sequence that is not running")
            due, most = self._due(sequence), self._row_tokens
            if sequence.decoding and sequence.due != due:
                raise RuntimeError(f"slot {sequence.slot} is due at {sequence.due}, not at {due}")
            surely = sequence.num_computed
            if most > 1 and sequence.decoding:
                surely = min(surely - (most - 1), sequence.max_len - 1)
            if not surely <= sequence.kv.capacity:
                raise RuntimeError(f"slot {sequence.slot}: computed positions without a block")
