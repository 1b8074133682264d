"""Drafts of what computes beside the target, with keys and values of its own in the same blocks.

A drafter keeps what it needs of each sequence that it may draft for, in the step that computes the
same positions of the target: so whatever the target's blocks are good for (cached prefixes, a
preempted sequence that goes on), its own are too. Where it drafts, it writes positions that are not
accepted yet; those that are not in the end are cleared in the same step.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.kv_cache import clear_places
from penstock.kernels.sampling import SamplingRows, sample
from penstock.protocol.sampling import GREEDY_TEMPERATURE
from penstock.services.worker.kv_memory import KVMemory
from penstock.services.worker.layer_groups import LayerGroups
from penstock.services.worker.memory import EXTRA_BLOCKS
from penstock.services.worker.models.causal_model import StepInputs
from penstock.services.worker.models.specification import CacheSpecification
from penstock.services.worker.plain_attention import REFERENCE
from penstock.services.worker.planned_step import DraftRows, IntArray, PlannedStep
from penstock.services.worker.slots import SlotTable
from penstock.services.worker.speculation.proposer import Draft
from penstock.services.worker.step_inputs import InputBuilder, RowPadding, attended_caches


class ModelDrafter(ABC):
    """A ``SpeculativeProposer`` that promises drafts, and makes those of a step together."""

    def __init__(
        self,
        source: str,
        slots: SlotTable,
        caches: Sequence[CacheSpecification],
        dtype: torch.dtype,
        device: torch.device,
        rows: RowPadding,
        first_position: int = 0,
    ) -> None:
        """source: of its drafts; caches: what its layers keep; device: of its layers; rows: the
        numbers of rows that they take; first_position: the first that is attended to.

        Raises ``MemoryError`` where the system does not promise memory for the slots' blocks."""
        self.source = source
        self.slots = slots
        self.live = np.zeros(slots.capacity.max_num_seqs, np.bool_)
        """Slots of which all is kept that drafts need."""
        self.rests = False
        """Whether sequences that come now get no drafts."""
        self._behind = np.zeros(len(self.live), np.int64)
        """Positions behind each slot's own that are written, but not accepted."""
        self._seconds, self._passes = 0.0, 0
        self._device = device
        capacity = slots.capacity
        blocks = capacity.num_blocks + EXTRA_BLOCKS
        grouped = LayerGroups([], len(caches), [(0, place) for place in range(len(caches))])
        with torch.inference_mode():
            self._memory = KVMemory(caches, grouped, blocks, capacity.block_size, dtype, device)
        attended, of_layers = attended_caches(
            caches, grouped, REFERENCE, blocks, capacity.block_size, dtype, first=first_position
        )
        self.inputs = InputBuilder(
            slots, attended, of_layers, self._memory.layers, rows, capacity.num_blocks, device
        )

    def begin(self, slot: int, text: npt.NDArray[np.int32], prompt_len: int, corpus: bytes) -> None:
        """See ``SpeculativeProposer``, for all methods up to ``clear``. What follows virtual tokens
        has no drafts: a drafter has no rows for them."""
        self.live[slot], self._behind[slot] = not (self.rests or self.slots.virtual[slot]), 0

    def next_step(self) -> None:
        """Also clears what the step's new blocks held before: what is not kept is zero."""
        if self.slots.blocks.fresh:
            with self._measured():
                self._memory.clear(self.slots.blocks.fresh, keys=True)

    def took(self, slot: int, tokens: Sequence[int]) -> None:
        """What a drafter needs of a text it sees in its steps."""
        return

    def propose(self, slot: int, most: int) -> Draft | None:
        """A promise: ``draft`` makes as many of its tokens as are wanted."""
        return Draft([0] * most, self.source, 0) if self.live[slot] and most > 0 else None

    def forget(self, slot: int) -> None:
        self.live[slot] = False

    def clear(self) -> None:
        self.live[:] = False

    def spent(self) -> tuple[float, int]:
        """Seconds since it was asked last, and in how many passes drafts were made."""
        found = self._seconds, self._passes
        self._seconds, self._passes = 0.0, 0
        return found

    def draft(self, decoding: IntArray, wanted: IntArray) -> list[list[int]]:
        """Make drafts ahead of a step. decoding: [R] slots of its rows; wanted: [R] how many drafts
        each gets. All first rows of live slots are kept then; ``settle`` or ``keep`` comes next."""
        found: list[list[int]] = [[] for _ in decoding]
        with self._measured():
            live = self.live[decoding]
            idle = decoding[live & (wanted == 0)]
            if len(idle):
                self._keep_last(idle)
            rows = np.flatnonzero(live & (wanted > 0))
            self._behind[decoding[rows]] = wanted[rows] - 1
            tokens, state = self.slots.last_token[decoding[rows]], self._first(decoding[rows])
            place = 0
            while len(rows):
                at = decoding[rows]
                state = self._pass(self._inputs_of(at, tokens, place), state)
                tokens = self._draw(self._logits(state), at, place)
                for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
                    found[row].append(token)
                place += 1
                going = np.flatnonzero(wanted[rows] > place)
                if len(going) < len(rows):
                    rows, tokens = rows[going], tokens[going]
                    state = state.index_select(0, self.on_device(going))
            self._passes += place
        return found

    def keep(self, step: PlannedStep) -> None:
        """Keep what drafts need of a step without any, which the target has just computed."""
        with self._measured():
            if len(at := step.decoding[self._behind[step.decoding] > 0]):
                self._drop_behind(at, np.zeros(len(at), np.int64))
            self._keep(step)

    def settle(self, slots: IntArray, drafts: DraftRows, accepted: IntArray) -> None:
        """The target has computed a step with drafts. slots: [S] of its rows, each once; accepted:
        [S] how many drafts of each."""
        with self._measured():
            self._settle(slots, drafts, accepted)
            self._drop_behind(slots, accepted)

    @abstractmethod
    def _first(self, slots: IntArray) -> Tensor:
        """What the first pass for the last tokens of these slots begins with, [S, …]."""

    @abstractmethod
    def _pass(self, inputs: StepInputs, state: Tensor) -> Tensor:
        """Compute one row each. state: of ``_first`` or of the pass before; returns the next."""

    @abstractmethod
    def _logits(self, state: Tensor) -> Tensor:
        """[rows, vocab of the target, or less]: of what a pass returned."""

    @abstractmethod
    def _keep_last(self, slots: IntArray) -> None:
        """Keep the last tokens of these slots."""

    @abstractmethod
    def _keep(self, step: PlannedStep) -> None:
        """See ``keep``."""

    @abstractmethod
    def _settle(self, slots: IntArray, drafts: DraftRows, accepted: IntArray) -> None:
        """Keep what is accepted: see ``settle``."""

    def places(self, owners: IntArray, positions: IntArray) -> Tensor:
        """[N] int64, as ``write_kv`` takes them: of these slots' positions."""
        table, size = self.slots.blocks.tables[0], self.slots.capacity.block_size
        return self.on_device(table[owners, positions // size] * size + positions % size)

    def on_device(self, values: IntArray) -> Tensor:
        """These numbers of the host, where the drafter's layers are."""
        return torch.from_numpy(values).to(self._device)

    def _inputs_of(self, at: IntArray, tokens: IntArray, place: int) -> StepInputs:
        """Of a row for each of these slots, so many positions behind its own."""
        ahead = np.full(len(at), place)
        rows = DraftRows(tokens, self.slots.position[at] + place, ahead)
        return self.inputs.build(PlannedStep(at, [], at, drafts=rows))

    def _draw(self, logits: Tensor, at: IntArray, place: int) -> IntArray:
        """Drawn as the target will draw at the same positions: so the same logits give the same
        tokens, whatever the temperature."""
        slots, temperature = self.slots, self.slots.temperature[at]
        keys = np.zeros(len(at), np.uint64)
        if not (temperature < GREEDY_TEMPERATURE).all():
            keys = slots.keys(at, slots.num_output[at].astype(np.int64) + place)
        rows = SamplingRows(temperature, slots.top_k[at], slots.top_p[at], keys, slots.min_p[at])
        drawn: IntArray = sample(logits, rows, GREEDY_TEMPERATURE).numpy()
        return drawn

    def _drop_behind(self, slots: IntArray, accepted: IntArray) -> None:
        """Clear what was written behind the accepted drafts of these slots."""
        counts = np.where(self.live[slots], self._behind[slots] - accepted, 0).clip(0)
        self._behind[slots] = 0
        if not counts.any():
            return
        owners = np.repeat(slots, counts)
        inside = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        first = self.slots.position[slots] + accepted + 1
        places = self.places(owners, np.repeat(first, counts) + inside)
        for cache in (cache for layer in self._memory.layers for cache in layer):
            clear_places(cache, places)

    @contextmanager
    def _measured(self) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - begun
