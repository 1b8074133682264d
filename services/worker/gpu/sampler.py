"""What slots ask of the sampler, on the device, and the kernels that answer it.

Rows that ask for nothing but a temperature are drawn by the step's graph. A step with any other row
runs the whole chain, launch by launch: bans, biases, penalties, samplers in the rows' own orders
(``stage_rows``), the floor of min_p, top_k and top_p, the draw, and the note of what was drawn.
Nothing waits for the host: what follows from a token (its count, the latest tokens) is written by
kernels, so the next step may be on the stream before this one's tokens are known. Only rows that
ask what sequences came before (``history_rows``) do, as those with a grammar.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.gpu.adjust_logits import adjust_logits
from penstock.kernels.gpu.draw import draw
from penstock.kernels.gpu.keep_floor import keep_floor
from penstock.kernels.gpu.sampler_memory import (
    ALWAYS,
    sampler_slots,
    sampler_space,
)
from penstock.kernels.gpu.token_history import add_tokens, ban_words
from penstock.kernels.sampling import WordTable, allowed_mask, packed_counts
from penstock.protocol.sampler_parameters import MAX_REDRAWS
from penstock.protocol.sampling import GREEDY_TEMPERATURE, MAX_BIASES, MAX_STOP_TOKENS
from penstock.protocol.wire.messages.steps import NewSlot, SlotAdjustments
from penstock.services.worker.gpu.batch_state import BatchState
from penstock.services.worker.gpu.history_rows import HistoryRows
from penstock.services.worker.gpu.sent import sent
from penstock.services.worker.gpu.stage_rows import StageRows
from penstock.services.worker.grammar_rows import only
from penstock.services.worker.slot_history import History, history
from penstock.services.worker.slots import IntArray, SlotTable

MOST_ENTRIES = MAX_BIASES + 2 * MAX_STOP_TOKENS + MAX_REDRAWS
"""Of one slot: biases, stop and end tokens that may not come yet, tokens not to be drawn again."""


class GpuSampler:
    """The sampler's memory for every slot and every row of a step."""

    def __init__(self, table: SlotTable, state: BatchState, vocab: int) -> None:
        count, device = len(state.rows), state.rows.device
        self._table, self._state, self._device = table, state, device
        self.slots = sampler_slots(
            count, vocab, MOST_ENTRIES, device,
            num_output=state.num_output, **state.asked,
        )  # fmt: skip
        self.space = sampler_space(count, vocab, device)
        self.stages = StageRows(table, state, self.slots, self.space)
        self.history = HistoryRows(count, device)
        self._vocab = vocab
        self._words = WordTable(count)
        self._word_arrays = tuple(
            torch.from_numpy(array).to(device)
            for array in (self._words.tokens, self._words.starts, self._words.ring)
        )

    def begin(self, added: list[NewSlot], prompts: Sequence[bytes] = ()) -> None:
        """Send what new slots ask for beyond numbers; comes before their first step. prompts: the
        plan's."""
        for new in added:
            asked = self._table.adjustments[new.slot]
            self.history.forget(new.slot)
            if asked is not None:
                self._begin(new.slot, history(new, prompts), asked)

    def _begin(self, slot: int, known: History, asked: SlotAdjustments) -> None:
        slots = self.slots
        if asked.stages:
            self.stages.begin(slot, asked)
        if asked.repeats:
            self.history.begin(slot, known, asked)
        if asked.penalised:
            occurring, counts = packed_counts(known.prompt, known.output)
            row = slots.counts[slot].zero_()
            row[self._sent(occurring)] = self._sent(counts)
        if asked.allowed is not None:
            allowed = np.frombuffer(asked.allowed, "<i4")
            slots.allowed[slot] = self._sent(allowed_mask(allowed, self._vocab))
        unbound = asked.ends if asked.grammar is None else b""
        kinds = [np.frombuffer(ids, "<i4") for ids in (asked.biased, unbound, asked.banned)]
        tokens = np.concatenate(kinds)
        if len(tokens):
            bans = np.full(len(tokens) - len(kinds[0]), -np.inf, np.float32)
            untils = [ALWAYS, asked.min_tokens, asked.banned_until]
            until = np.repeat(untils, [len(kind) for kind in kinds])
            values = np.concatenate((np.frombuffer(asked.biases, "<f4"), bans))
            end = len(until)
            slots.entry_token[slot, :end] = self._sent(tokens)
            slots.entry_value[slot, :end] = self._sent(values)
            slots.entry_until[slot, :end] = self._sent(until.astype(np.int32))
        if asked.bad_words:
            words = [np.frombuffer(word, "<i4").tolist() for word in asked.bad_words]
            host = self._words
            host.begin(slot, words, known.output.tolist())
            for array, source in zip(
                self._word_arrays, (host.tokens, host.starts, host.ring), strict=True
            ):
                array[slot] = self._sent(source[slot])

    def _sent(self, values: np.ndarray[Any, Any]) -> Tensor:
        return sent(values, self._device)

    def allow(self, slots: IntArray, masks: Tensor) -> None:
        """What alone may come next in these slots. masks: [n, ceil(V / 32)] int32, on the host,
        pinned where there is a GPU, and not changed before the step is over."""
        sent = masks.to(self._device, non_blocking=True)
        self.slots.allowed.index_copy_(0, self._sent(slots), sent)

    def open(self, slot: int, token: int, logits: Tensor) -> None:
        """Allow this token alone where it is the likeliest of a row; the host does not wait to
        know. logits: [V], the row's."""
        allowed = self.slots.allowed[slot]
        alone = self._sent(only(token, len(allowed)))
        allowed.copy_(torch.where(logits.argmax() == token, alone, allowed))

    def needed(self, at: IntArray) -> bool:
        """Whether any of these slots asks for more than a temperature."""
        return bool(self.asking(at).any())

    def plan(self, at: IntArray) -> None:
        """The slots of the rows that the next ``draw`` and ``note`` are of, one after the other.
        Who asks what came before has seen their latest tokens."""
        self.stages.plan(at)
        self.history.fill(at, self.history.asking(at))

    def asking(self, at: IntArray) -> npt.NDArray[np.bool_]:
        """Which of these slots ask for more than a temperature."""
        table = self._table
        top_k = table.top_k[at]
        limited = ((top_k > 0) & (top_k < self._vocab)) | (table.top_p[at] < 1.0)
        limited |= table.min_p[at] > 0.0
        drawn = table.temperature[at] >= GREEDY_TEMPERATURE
        asking: npt.NDArray[np.bool_] = (limited & drawn) | (table.asks[at] != 0)
        return asking

    def draw(self, logits: Tensor, rows: Tensor, best: Tensor, token: Tensor) -> int:
        """The best token of every split of every row. rows: int32, the slot of each row, which
        ``stages`` and ``history`` were told of before. Returns the number of splits."""
        state, slots = self._state, self.slots
        ban_words(rows, len(logits), slots, *self._word_arrays)
        adjust_logits(logits, rows, slots, self.space, self.history.entries, GREEDY_TEMPERATURE)
        self.stages.run(rows, len(logits))
        keep_floor(
            logits, rows, state.seed_low, state.seed_high, slots, self.space, GREEDY_TEMPERATURE
        )
        return draw(
            logits, rows, state.temperature, state.seed_low, state.seed_high, state.num_output,
            best, token, GREEDY_TEMPERATURE, slots, self.space,
        )  # fmt: skip

    def note(self, logits: Tensor, rows: Tensor) -> None:
        """The rows' tokens are committed: count them where it matters. logits: [R, V]; rows: the
        slot of each."""
        ring = self._word_arrays[2]
        add_tokens(rows, len(logits), self.slots, self._state.last_token, ring)
        self.stages.note(logits)
