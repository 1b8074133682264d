"""The batch between steps: numbered slots, and what a plan's differences do to them.

A slot is free, prefilling (a plan's chunks compute its known tokens) or decoding (it computes its
last token in every step). All state is in numpy columns indexed by slot, so that a decode step
costs a few array operations whatever the batch. This module knows no model and no torch.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.kernels.draw_keys import UInt64Array, draw_keys
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.steps import (
    Chunk,
    NewSlot,
    RowFailure,
    SlotSampling,
    StepPlan,
)
from penstock.services.worker.block_tables import BlockTables, PlanError
from penstock.services.worker.plan_order import PlanOrder
from penstock.services.worker.planned_step import DraftRows, IntArray, PlannedChunk, PlannedStep
from penstock.services.worker.slot_columns import SlotColumns

__all__ = ["DraftRows", "IntArray", "PlanError", "PlannedChunk", "PlannedStep", "SlotTable"]
FREE, PREFILLING, DECODING = 0, 1, 2
_UINT64 = (1 << 64) - 1
_NEUTRAL = SlotSampling(0.0, 0, 1.0, 0)


class SlotTable(SlotColumns):
    """The slots of one executor.

    Call ``apply`` with a plan, compute, then ``finish`` with the sampled tokens. After a
    ``PlanError`` or a failed computation call ``reset``: only a full plan is then accepted.
    """

    def __init__(
        self, capacity: EngineSizes, table_multiple: int = 1, empty_block: int = 0
    ) -> None:
        """``table_multiple``: block tables are this many entries wide, or a multiple of it;
        ``empty_block``: what stands in the entries that have no block."""
        self.capacity = capacity
        self._micro_batches = capacity.micro_batches
        slots = capacity.max_num_seqs
        self.blocks = BlockTables(capacity, table_multiple, empty_block)
        self.added: list[int] = []
        """Slots that the last plan filled."""
        self.position = np.zeros(slots, np.int64)
        """Positions whose K and V are in the cache: where the slot's next token goes."""
        self.last_token = np.zeros(slots, np.int64)
        self.num_output = np.zeros(slots, np.uint64)
        super().__init__(slots)
        self.row_tokens = 1
        """Tokens that a row may bring, at most."""
        self.pending = np.zeros(slots, np.int64)
        """Drafts of steps under way: so far may each slot stand beyond ``position``."""
        self._checked, self._spare = self.last_token, 0
        """Decoding slots that all had room for a token, and for how many more they surely have."""
        self.adapter_numbers: Mapping[str, int] = {}
        """Digest → number of the adapters that are loaded."""
        self._tasks: dict[int, str] = {}
        """Slot → its task, of slots that have one."""
        self._unreadable: dict[int, str] = {}
        """Slots whose sampling could not be read, or that lack their adapter, and why: they get no
        token."""
        self._decode_sampling = msgspec.msgpack.Decoder(SlotSampling).decode
        self._latest: tuple[bytes | None, SlotSampling] = (None, _NEUTRAL)
        """The sampling read last: the choices of a request come one after another."""
        self._state = [FREE] * slots
        self._known: list[npt.NDArray[np.int32] | None] = [None] * slots
        """Tokens of prefilling slots …"""
        self._known_from = [0] * slots
        """… and the position of the first of them."""
        self._order: list[int] = []
        self._decoding: IntArray | None = None
        self._plans = PlanOrder()
        self.reset()

    def reset(self) -> None:
        """Free every slot; the next plan must be full."""
        self._clear()
        self._plans.reset()

    def _clear(self) -> None:
        self._state = [FREE] * len(self._state)
        self._known = [None] * len(self._known)
        self._order.clear()
        self._decoding = None
        self._unreadable.clear()
        self._tasks.clear()

    def decoding(self) -> IntArray:
        """Decoding slots, ascending."""
        if self._decoding is None:
            self._decoding = np.array(self._order, np.int64)
        return self._decoding

    def keys(self, slots: IntArray, num_output: IntArray | None = None) -> UInt64Array:
        """The draw's key for the next output token of each of these slots; num_output: how many
        each has, if others than are known here."""
        number = self.num_output[slots] if num_output is None else num_output.astype(np.uint64)
        return draw_keys(self.seed[slots], self.choice[slots], number)

    def apply(self, plan: StepPlan) -> PlannedStep:
        """Change the slots as the plan says. Raises ``PlanError``; the slots are then undefined."""
        if plan.full:
            self._clear()
        self._plans.take(plan)
        self.blocks.begin()
        self.added = [new.slot for new in plan.added]
        for slot in plan.gone:
            self._free(slot)
        for new in plan.added:
            self._add(new)
            self._check_history(new, plan.prompts)
        if plan.grown:
            self._check_grown(plan.grown)
            self.blocks.grow(plan.grown)
        decoding, full = self.decoding(), None
        if self._micro_batches > 1:
            decoding = decoding[decoding % self._micro_batches == plan.micro_batch]
        if self.row_tokens > 1 and len(decoding):
            if self._spare <= 0 or decoding is not self._checked:
                decoding, full = self._with_room(decoding)
            if self.blocks.has_windows:
                certain = self.position[decoding] - (self.pending[decoding] > 0)
                self.blocks.forget_behind_all(decoding, certain)
        elif len(decoding):
            self._check_decoding(decoding)
            self.blocks.step_windows(decoding, self.position[decoding])
        chunks = [self._start_chunk(chunk) for chunk in plan.chunks]
        self._check_budget(len(decoding), chunks)
        sampling = [chunk.slot for chunk in chunks if chunk.sample]
        sampled = np.concatenate((decoding, np.array(sampling, np.int64))) if sampling else decoding
        return PlannedStep(decoding, chunks, sampled, full)

    def _with_room(self, decoding: IntArray) -> tuple[IntArray, IntArray | None]:
        """Those of these slots that may go on, and the places of the others, if there are any."""
        room = self.room(decoding)
        self._checked, self._spare = decoding, int(room.min())
        if self._spare > 0:
            return decoding, None
        return decoding[room > 0], np.flatnonzero(room <= 0)

    def room(self, slots: IntArray) -> IntArray:
        """How many tokens a decode row of each of these slots may bring: for so many there are
        positions, and no more are wanted."""
        positions = self.blocks.length[slots] * self.capacity.block_size
        room: IntArray = np.minimum(positions, self.most[slots] - 1) - self.position[slots]
        return room - self.pending[slots]

    def took(self, slots: IntArray, counts: IntArray, last: IntArray) -> None:
        """These decoding slots got so many tokens more in a step, each the last of them."""
        self.last_token[slots] = last
        self.brought(slots, counts)

    def drafted(self, slots: IntArray, counts: IntArray) -> None:
        """A step is on its way in which these slots have so many drafts each."""
        self.pending[slots] += counts
        self._spare = 0

    def brought(self, slots: IntArray, counts: IntArray) -> None:
        """``took``, where the tokens are known to the device."""
        self._spare = 0
        self.num_output[slots] += counts.astype(np.uint64)
        self.position[slots] += counts

    def finish(self, step: PlannedStep, tokens: npt.NDArray[np.int32]) -> None:
        """Feed the sampled tokens, one for each row of ``step.sampled``, and ``advance``."""
        self.last_token[step.sampled] = tokens
        self.advance(step)

    def advance(self, step: PlannedStep) -> None:
        """The step is on its way: every sampled slot has one output token more."""
        self._spare -= 1
        self.num_output[step.sampled] += np.uint64(1)
        self.position[step.decoding] += 1
        for slot in step.sampled[len(step.decoding) :].tolist():
            self._state[slot] = DECODING
            self.blocks.forget_behind(slot, int(self.position[slot]))
            self._known[slot] = None
            insort(self._order, slot)
            self._decoding = None

    def _state_of(self, slot: int) -> int:
        if not 0 <= slot < len(self._state):
            raise PlanError(f"slot {slot}: slots are 0 … {len(self._state) - 1}")
        return self._state[slot]

    def _free(self, slot: int) -> None:
        state = self._state_of(slot)
        if state == FREE:
            raise PlanError(f"slot {slot} is gone, but nothing is in it")
        if state == DECODING:
            del self._order[bisect_left(self._order, slot)]
            self._decoding = None
        self._state[slot] = FREE
        self._known[slot] = None
        self._unreadable.pop(slot, None)
        self._tasks.pop(slot, None)

    def _add(self, new: NewSlot) -> None:
        slot = new.slot
        if self._state_of(slot) != FREE:
            raise PlanError(f"slot {slot} is added, but it is in use")
        if len(new.tokens) % 4:
            raise PlanError(f"slot {slot}: tokens are int32, got {len(new.tokens)} bytes")
        tokens = np.frombuffer(new.tokens, "<i4")
        limits = self.capacity
        length = new.length
        if not 1 <= length <= limits.max_model_len:
            raise PlanError(f"slot {slot}: {length} tokens; allowed are 1 … {limits.max_model_len}")
        self._check_ids(slot, tokens, new.virtual_tokens - new.start)
        if not 1 <= new.prompt_len <= length:
            raise PlanError(f"slot {slot}: prompt_len {new.prompt_len} of {length} tokens")
        if not 0 <= new.num_computed < length:
            raise PlanError(
                f"slot {slot}: num_computed {new.num_computed} of {length} tokens leaves "
                "nothing to compute"
            )
        if not 0 <= new.start <= new.num_computed:
            raise PlanError(
                f"slot {slot}: tokens from position {new.start} on, {new.num_computed} are computed"
            )
        self._state[slot] = PREFILLING
        self._known[slot], self._known_from[slot] = tokens, new.start
        self.position[slot], self.pending[slot] = new.num_computed, 0
        self.num_output[slot] = length - new.prompt_len
        self.blocks.clear(slot)
        computed = -(-new.num_computed // limits.block_size)
        self.blocks.append(slot, new.blocks, computed)
        if new.num_computed > self.blocks.length[slot] * limits.block_size:
            raise PlanError(f"slot {slot}: {new.num_computed} positions computed without blocks")
        if new.task:
            self._tasks[slot] = new.task
        self.second[slot] = new.second
        self._set_adapter(new)
        sampling = self._read_sampling(new)
        self.most[slot] = min(new.most or limits.max_model_len, limits.max_model_len)
        self.temperature[slot] = sampling.temperature
        self.top_k[slot] = max(0, sampling.top_k)
        self.top_p[slot] = sampling.top_p
        self.min_p[slot] = sampling.min_p
        self.logprobs[slot] = -1 if sampling.logprobs is None else sampling.logprobs
        self.prompt_logprobs[slot] = -1 if new.prompt_logprobs is None else new.prompt_logprobs
        self.prompt_length[slot] = new.prompt_len
        self.adjustments[slot] = sampling.adjustments
        self.asks[slot] = sampling.adjustments is not None
        self.steers[slot] = sampling.adjustments is not None and sampling.adjustments.steers
        self.seed[slot] = sampling.seed & _UINT64
        self.choice[slot] = new.choice & _UINT64

    def _set_adapter(self, new: NewSlot) -> None:
        number = self.adapter_numbers.get(new.adapter, 0)
        self.virtual[new.slot] = new.virtual_tokens
        both = (number, 0) if not new.virtual_tokens else (0, number)
        self.adapter[new.slot], self.soft_prompt[new.slot] = both
        if new.adapter and not number:
            self._unreadable[new.slot] = "its adapter is not loaded here: did its files change?"

    def _read_sampling(self, new: NewSlot) -> SlotSampling:
        """A slot whose sampling cannot be read fails when it would draw; the others go on."""
        data, sampling = self._latest
        if new.sampling == data:
            return sampling
        try:
            sampling = self._decode_sampling(new.sampling)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._unreadable[new.slot] = f"the sampling parameters cannot be read: {error}"
            return _NEUTRAL
        self._latest = new.sampling, sampling
        return sampling

    def task_rows(self, step: PlannedStep) -> dict[int, str]:
        """Task of each row whose slot has one, ascending."""
        if not self._tasks:
            return {}
        slots = enumerate(step.sampled.tolist())
        return {row: self._tasks[slot] for row, slot in slots if slot in self._tasks}

    def task_chunks(self, step: PlannedStep) -> set[int]:
        """Slots that have a task, and a chunk in this step."""
        return {chunk.slot for chunk in step.chunks if chunk.slot in self._tasks}

    def unreadable_rows(self, step: PlannedStep) -> list[RowFailure]:
        """Rows of slots whose sampling cannot be read."""
        if not self._unreadable:
            return []
        return [
            RowFailure(row, self._unreadable[slot], 500)
            for row, slot in enumerate(step.sampled.tolist())
            if slot in self._unreadable
        ]

    def _check_ids(self, slot: int, tokens: npt.NDArray[np.int32], virtual: int) -> None:
        """virtual: so many of the first are no tokens of the vocabulary; perhaps none or less."""
        vocab = self.capacity.vocab_size
        tokens = tokens[max(virtual, 0) :]
        if (
            len(tokens) and int(tokens.view(np.uint32).max()) >= vocab
        ):  # negative ones are the highest
            raise PlanError(f"slot {slot}: token ids are 0 … {vocab - 1}")

    def _check_history(self, new: NewSlot, prompts: Sequence[bytes]) -> None:
        """What a slot's adjustments read must have come with it."""
        slot, asked = new.slot, self.adjustments[new.slot]
        if new.prompt >= 0:
            if new.prompt >= len(prompts) or len(prompts[new.prompt]) != 4 * new.prompt_len:
                raise PlanError(
                    f"slot {slot}: prompt {new.prompt} of {len(prompts)} is not its prompt of "
                    f"{new.prompt_len} tokens"
                )
            self._check_ids(slot, np.frombuffer(prompts[new.prompt], "<i4"), new.virtual_tokens)
        elif new.start and asked is not None and asked.reads_prompt:
            raise PlanError(f"slot {slot}: its adjustments read the prompt, which is not there")
        if asked is not None and new.start > new.prompt_len:
            raise PlanError(
                f"slot {slot}: it has adjustments, and its output before position {new.start} is "
                "not there"
            )
        if self.steers[slot] and new.length > new.prompt_len and new.num_computed >= new.prompt_len:
            raise PlanError(f"slot {slot}: how probable its output was is not computed anew")

    def _check_grown(self, grown: list[int]) -> None:
        for slot in grown[::2]:
            if self._state_of(slot) == FREE:
                raise PlanError(f"slot {slot} grows, but nothing is in it")

    def _check_decoding(self, slots: IntArray) -> None:
        position = self.position[slots]
        short = position >= self.blocks.length[slots] * self.capacity.block_size
        if short.any():
            slot = int(slots[short.argmax()])
            raise PlanError(
                f"slot {slot}: no block for position {self.position[slot]}, it has "
                f"{self.blocks.length[slot]} blocks of {self.capacity.block_size}"
            )
        if int(position.max()) >= self.capacity.max_model_len:
            slot = int(slots[position.argmax()])
            raise PlanError(
                f"slot {slot}: position {self.position[slot]} is past max_model_len "
                f"{self.capacity.max_model_len}"
            )

    def _start_chunk(self, chunk: Chunk) -> PlannedChunk:
        slot = chunk.slot
        if self._state_of(slot) != PREFILLING:
            raise PlanError(f"slot {slot}: a chunk for a slot that is not prefilling")
        known, skipped = self._known[slot], self._known_from[slot]
        length = 0 if known is None else skipped + len(known)
        end = chunk.start + chunk.count
        if known is None or chunk.start != self.position[slot] or not chunk.start < end <= length:
            raise PlanError(
                f"slot {slot}: chunk of positions {chunk.start} … {end - 1}; computed are "
                f"{self.position[slot]} of {length}"
            )
        if chunk.sample != (end == length):
            raise PlanError(f"slot {slot}: the chunk that reaches position {length - 1} samples")
        self.blocks.append(slot, chunk.blocks)
        self.blocks.forget_behind(slot, chunk.start)
        if end > self.blocks.length[slot] * self.capacity.block_size:
            raise PlanError(
                f"slot {slot}: no block for position {end - 1}, it has "
                f"{self.blocks.length[slot]} blocks of {self.capacity.block_size}"
            )
        self.position[slot] = end
        first, past = chunk.start - skipped, end - skipped
        last = int(self.prompt_length[slot]) - skipped if self.prompt_logprobs[slot] >= 0 else 0
        virtual = int(self.virtual[slot])
        shown = max(virtual - chunk.start, 0)
        predicted = known[first + shown + 1 : max(min(past + 1, last), 0)]
        prompt = int(self.prompt_length[slot]) - skipped
        drawn_from = max(first, prompt - 1) if self.steers[slot] else past
        return PlannedChunk(
            slot, chunk.start, known[first:past], chunk.sample, predicted,
            known[drawn_from + 1 : past + 1], drawn_from - first, shown, virtual,
        )  # fmt: skip

    def _check_budget(self, decoding: int, chunks: list[PlannedChunk]) -> None:
        tokens = decoding + sum(len(chunk.tokens) for chunk in chunks)
        budget = max(self.capacity.max_num_batched_tokens, self.capacity.max_num_seqs)
        if tokens > budget:
            raise PlanError(f"{tokens} tokens in one step; max_num_batched_tokens is {budget}")
