"""What slots ask for before the draw: which steps of the sampler change which rows' logits.

The executor tells what happens to slots (``begin``, ``took``) and asks for the adjustments of a
step's rows. Tables that need memory for each token of the vocabulary are taken when the first slot
needs them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.draw_keys import UInt64Array
from penstock.kernels.sampling import (
    Adjustment,
    AllowedTokens,
    Penalties,
    SamplerStages,
    Stage,
    TokenBiases,
    WordTable,
    add_outputs,
    allowed_mask,
    begin_counts,
)
from penstock.protocol.wire.messages.steps import NewSlot, SlotAdjustments
from penstock.services.worker.repeat_slots import RepeatSlots
from penstock.services.worker.slot_history import History, history
from penstock.services.worker.steered_slots import SteeredSlots

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


class _Entries:
    """(row, token, value) entries of a step, collected."""

    def __init__(self) -> None:
        self._rows: list[IntArray] = []
        self._tokens: list[IntArray] = []
        self._values: list[FloatArray] = []

    def add(self, row: int, tokens: IntArray, values: FloatArray) -> None:
        self._rows.append(np.full(len(tokens), row, np.int64))
        self._tokens.append(tokens)
        self._values.append(values)

    def extend(self, entries: TokenBiases) -> None:
        self._rows.append(entries.entry_rows)
        self._tokens.append(entries.tokens)
        self._values.append(entries.values)

    def biases(self) -> TokenBiases | None:
        if not sum(map(len, self._rows)):
            return None
        return TokenBiases(
            np.concatenate(self._rows), np.concatenate(self._tokens), np.concatenate(self._values)
        )


class SlotAdjuster:
    """The adjustments of every slot of one executor."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device, self._slots = vocab_size, device, slots
        self._asks = np.zeros(slots, np.bool_)
        self._penalised = np.zeros(slots, np.bool_)
        self._masked = np.zeros(slots, np.bool_)
        self._worded = np.zeros(slots, np.bool_)
        self._repetition = np.ones(slots, np.float32)
        self._frequency = np.zeros(slots, np.float32)
        self._presence = np.zeros(slots, np.float32)
        self._biases: dict[int, tuple[IntArray, FloatArray]] = {}
        self._early: dict[int, list[tuple[int, IntArray, FloatArray]]] = {}
        """Tokens that may not come before so many outputs."""
        self._counts: Tensor | None = None
        self._masks: Tensor | None = None
        self._words: WordTable | None = None
        self._stages: dict[int, list[Stage]] = {}
        self._repeats = RepeatSlots(slots)
        self.steered = SteeredSlots(slots)

    def begin(
        self,
        added: list[NewSlot],
        adjustments: Sequence[SlotAdjustments | None],
        prompts: Sequence[bytes] = (),
    ) -> None:
        """These slots are taken; what sat in them before is forgotten. adjustments: of every slot.
        prompts: the plan's."""
        for new in added:
            if self._asks[new.slot]:
                self._forget(new.slot)
            asked = adjustments[new.slot]
            if asked is not None:
                self._begin(new.slot, history(new, prompts), asked)

    def _forget(self, slot: int) -> None:
        for flags in (self._asks, self._penalised, self._masked, self._worded):
            flags[slot] = False
        for by_slot in (self._biases, self._early, self._stages):
            by_slot.pop(slot, None)
        self._repeats.forget(slot)
        self.steered.forget(slot)

    def _begin(self, slot: int, known: History, asked: SlotAdjustments) -> None:
        self._asks[slot] = True
        if asked.penalised:
            self._penalised[slot] = True
            self._repetition[slot] = asked.repetition
            self._frequency[slot], self._presence[slot] = asked.frequency, asked.presence
            begin_counts(self._taken_counts(), slot, known.prompt, known.output)
        if asked.allowed is not None:
            self._masked[slot] = True
            mask = allowed_mask(np.frombuffer(asked.allowed, "<i4"), self._vocab_size)
            self._taken_masks()[slot] = torch.from_numpy(mask)
        if asked.biased:
            self._biases[slot] = (
                np.frombuffer(asked.biased, "<i4").astype(np.int64),
                np.frombuffer(asked.biases, "<f4").astype(np.float32),
            )
        if asked.bad_words:
            self._worded[slot] = True
            words = [np.frombuffer(word, "<i4").tolist() for word in asked.bad_words]
            self._taken_words().begin(slot, words, known.output.tolist())
        ends = asked.ends if asked.grammar is None else b""
        for until, early in ((asked.min_tokens, ends), (asked.banned_until, asked.banned)):
            if until and early:
                tokens = np.frombuffer(early, "<i4").astype(np.int64)
                bans = np.full(len(tokens), -np.inf, np.float32)
                self._early.setdefault(slot, []).append((until, tokens, bans))
        if asked.repeats:
            self._repeats.begin(slot, known, asked)
        if asked.stages:
            self._stages[slot] = [Stage(one.sampler, one.values) for one in asked.stages]
        if asked.steers:
            self.steered.begin(slot, asked)

    def _taken_counts(self) -> Tensor:
        if self._counts is None:
            shape = (self._slots, self._vocab_size)
            self._counts = torch.zeros(shape, dtype=torch.int16, device=self._device)
        return self._counts

    def _taken_masks(self) -> Tensor:
        if self._masks is None:
            shape = (self._slots, -(-self._vocab_size // 32))
            self._masks = torch.zeros(shape, dtype=torch.int32, device=self._device)
        return self._masks

    def _taken_words(self) -> WordTable:
        if self._words is None:
            self._words = WordTable(self._slots)
        return self._words

    def adjustments(
        self, at: IntArray, num_output: IntArray, keys: UInt64Array
    ) -> list[Adjustment]:
        """What changes the logits of these slots' rows, in order. num_output: tokens that each
        has generated so far; keys: of each row's draw."""
        if not self._asks[at].any():
            return []
        found: list[Adjustment] = []
        rows = np.flatnonzero(self._masked[at])
        if len(rows):
            masks = self._taken_masks()
            found.append(AllowedTokens(rows, masks[torch.from_numpy(at[rows]).to(masks.device)]))
        entries = _Entries()
        for row in np.flatnonzero(self._asks[at]).tolist():
            slot = int(at[row])
            if slot in self._biases:
                entries.add(row, *self._biases[slot])
            for until, tokens, bans in self._early.get(slot, ()):
                if num_output[row] < until:
                    entries.add(row, tokens, bans)
            if self._repeats.asks[slot]:
                entries.add(row, *self._repeats.penalties(slot))
                repeated = self._repeats.bans(slot)
                entries.add(row, repeated, np.full(len(repeated), -np.inf, np.float32))
        rows = np.flatnonzero(self._worded[at])
        if len(rows):
            entries.extend(self._taken_words().bans(rows, at[rows], num_output[rows]))
        if (biases := entries.biases()) is not None:
            found.append(biases)
        rows = np.flatnonzero(self._penalised[at])
        if len(rows):
            slots = at[rows]
            found.append(
                Penalties(
                    rows, self._repetition[slots], self._frequency[slots], self._presence[slots],
                    slots, self._taken_counts(),
                )
            )  # fmt: skip
        staged = [row for row, slot in enumerate(at.tolist()) if slot in self._stages]
        if staged:
            rows = np.array(staged, np.int64)
            slots = at[rows]
            stages = [self._stages[slot] for slot in slots.tolist()]
            bounds = self.steered.bound[slots].tolist()
            found.append(SamplerStages(rows, stages, keys[rows], bounds))
        return found

    def took(self, at: IntArray, tokens: IntArray, num_output: IntArray) -> None:
        """These slots got a token each; ``num_output`` as for ``adjustments``."""
        if not self._asks[at].any():
            return
        rows = np.flatnonzero(self._penalised[at])
        if len(rows):
            add_outputs(self._taken_counts(), at[rows], tokens[rows])
        rows = np.flatnonzero(self._worded[at])
        if len(rows):
            self._taken_words().add_outputs(at[rows], tokens[rows], num_output[rows])
        rows = np.flatnonzero(self._repeats.asks[at])
        if len(rows):
            self._repeats.took(at[rows], tokens[rows])
