"""The rows of a step that follow a grammar: their masks, and the tokens that they got."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.protocol.grammar.compiler import make_tokenizer
from penstock.protocol.model_info import ModelInfo
from penstock.protocol.wire.messages.steps import NewSlot, RowFailure, SlotAdjustments
from penstock.services.worker.grammar_slots import (
    PATIENCE_SECONDS,
    Failure,
    GrammarSlots,
    Mask,
)
from penstock.services.worker.slot_history import output_of
from penstock.services.worker.slots import IntArray

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MOST_THREADS = 16
OTHERS_CORES = 2
"""Left to the step loop and the other processes."""
SUBJECT = "structured output"
"""What a client is told first of a row that fails for its grammar."""


class Masks(NamedTuple):
    """What the rows of a step may take."""

    rows: IntArray
    """Rows of the step that follow a grammar, ascending."""
    masks: Mask
    """[n, ceil(V / 32)]: theirs."""
    openings: dict[int, int]
    """Row → a token that comes alone if it is the likeliest of all, whatever the grammar says."""
    failures: list[RowFailure]
    """Rows whose grammar has failed or is not compiled yet."""


class GrammarRows:
    """The grammars of one executor's slots. ``start`` and ``wait`` go around the forward pass."""

    def __init__(self, slots: int, vocab_size: int) -> None:
        self._count, self._vocab_size = slots, vocab_size
        self._words = -(-vocab_size // 32)
        self._follows = np.zeros(slots, np.bool_)
        self._slots: GrammarSlots | None = None
        self._started: tuple[IntArray, Mask, dict[int, int]] | None = None

    def serve(
        self, load_tokenizer: Callable[[], LLTokenizer], patience: float = PATIENCE_SECONDS
    ) -> None:
        """From here on slots may have grammars. ``load_tokenizer`` is called at the first one, or
        by ``prepare``, in a thread. ``patience``: see ``GrammarSlots``."""
        cores = len(os.sched_getaffinity(0))
        threads = min(MOST_THREADS, max(1, cores - OTHERS_CORES))
        self._slots = GrammarSlots(self._count, self._vocab_size, load_tokenizer, threads, patience)

    def prepare(self) -> None:
        """Read the vocabulary now: the interpreter stands still meanwhile."""
        if self._slots is not None:
            self._slots.prepare()

    def begin(self, added: list[NewSlot], adjustments: Sequence[SlotAdjustments | None]) -> None:
        """These slots are taken; what sat in them before is forgotten. Where a grammar's beginning
        raises, its row fails, and no other. adjustments: of every slot."""
        for new in added:
            asked = adjustments[new.slot]
            grammar = None if asked is None else asked.grammar
            if self._follows[new.slot] and self._slots is not None:
                self._slots.forget(new.slot)
            self._follows[new.slot] = grammar is not None
            if asked is None or grammar is None or self._slots is None:
                continue
            try:
                ends = np.frombuffer(asked.ends, "<i4").tolist()
                output = output_of(new).tolist()
                self._slots.begin(new.slot, grammar, output, asked.min_tokens, ends)
            except Exception as error:
                reason = f"the grammar cannot be followed: {type(error).__name__}: {error}"
                self._slots.fail(new.slot, reason)

    def following(self, at: IntArray) -> IntArray:
        """Which rows, whose slots are ``at``, follow a grammar."""
        return np.flatnonzero(self._follows[at])

    def start(self, at: IntArray, rows: IntArray) -> None:
        """Fill the masks of these rows, in threads. at: the slot of every row of the step."""
        out = np.empty((len(rows), self._words), np.int32)
        slots = at[rows]
        self._started = rows, out, self._openings(rows, slots)
        if self._slots is not None:
            self._slots.start(slots.tolist(), out)

    def wait(self) -> Masks | None:
        """What ``start`` began; ``None``: nothing."""
        started, self._started = self._started, None
        if started is None:
            return None
        rows, out, openings = started
        if self._slots is None:
            return self._unserved(rows, out)
        return Masks(rows, out, openings, _failures(rows, self._slots.wait()))

    def drop(self) -> None:
        """The step has failed: wait for the masks that were begun for it, and forget them."""
        started, self._started = self._started, None
        if started is not None and self._slots is not None:
            self._slots.wait()

    def fill(
        self, at: IntArray, rows: IntArray, out: Mask, drafts: Sequence[Sequence[int]] = ()
    ) -> Masks:
        """``start`` and ``wait`` in one. out: memory for the masks, [len(rows), ceil(V / 32)], and
        as many more as there are drafts: the masks of what follows them stand behind the row's."""
        if self._slots is None:
            return self._unserved(rows, out)
        slots = at[rows]
        openings = self._openings(rows, slots)
        failed = self._slots.fill(slots.tolist(), out, drafts)
        return Masks(rows, out, openings, _failures(rows, failed))

    def _openings(self, rows: IntArray, slots: IntArray) -> dict[int, int]:
        if self._slots is None:
            return {}
        opening = self._slots.opening
        found = zip(rows.tolist(), map(opening, slots.tolist()), strict=True)
        return {row: token for row, token in found if token >= 0}

    @staticmethod
    def _unserved(rows: IntArray, out: Mask) -> Masks:
        out.fill(-1)
        reason = f"{SUBJECT}: this worker was started without a tokenizer, and follows no grammar"
        return Masks(rows, out, {}, [RowFailure(row, reason, 503) for row in rows.tolist()])

    def guides(self, slot: int) -> bool:
        """Whether it is known what may come next in a slot: its grammar is compiled and its answer
        has come to it, or there is none."""
        if not self._follows[slot]:
            return True
        return self._slots is not None and self._slots.guides(slot)

    def forced(self, slot: int, most: int) -> list[int]:
        """Tokens that a slot's grammar leaves no choice of, up to ``most``; not between ``start``
        and ``wait``."""
        if self._slots is None or not self._follows[slot]:
            return []
        return self._slots.forced(slot, most)

    def fitting(self, slot: int, tokens: list[int]) -> list[int]:
        """The first of these tokens, as many as a slot's grammar allows, if it has one."""
        if self._slots is None or not self._follows[slot]:
            return tokens
        return self._slots.fitting(slot, tokens)

    def took(self, slots: IntArray, tokens: npt.NDArray[np.int32] | IntArray) -> None:
        """These slots, which follow a grammar, got a token each."""
        if self._slots is not None:
            self._slots.took(slots.tolist(), tokens.tolist())


class NoGrammars(GrammarRows):
    """Of a rank that draws nothing."""

    def serve(
        self, load_tokenizer: Callable[[], LLTokenizer], patience: float = PATIENCE_SECONDS
    ) -> None:
        return

    def begin(self, added: list[NewSlot], adjustments: Sequence[SlotAdjustments | None]) -> None:
        return

    def following(self, at: IntArray) -> IntArray:
        return np.zeros(0, np.int64)


FromFirst = Callable[[Tensor], Tensor]
"""``RankGroup.from_first``."""


class TellingGrammars(GrammarRows):
    """Of the first of the ranks that draw together: the others are told its masks."""

    def __init__(self, slots: int, vocab_size: int, from_first: FromFirst) -> None:
        super().__init__(slots, vocab_size)
        self._from_first = from_first

    def wait(self) -> Masks | None:
        masks = super().wait()
        if masks is not None:
            told = np.full((len(masks.rows), self._words + 1), -1, np.int32)
            told[:, :-1] = masks.masks
            for row, token in masks.openings.items():
                told[np.searchsorted(masks.rows, row), -1] = token
            self._from_first(torch.from_numpy(told))
        return masks


class ToldGrammars(NoGrammars):
    """Of the others: they know which rows follow a grammar, and are told what it allows."""

    def __init__(self, slots: int, vocab_size: int, from_first: FromFirst) -> None:
        super().__init__(slots, vocab_size)
        self._from_first = from_first
        self._asked: IntArray | None = None

    def begin(self, added: list[NewSlot], adjustments: Sequence[SlotAdjustments | None]) -> None:
        for new in added:
            asked = adjustments[new.slot]
            self._follows[new.slot] = asked is not None and asked.grammar is not None

    def following(self, at: IntArray) -> IntArray:
        return np.flatnonzero(self._follows[at])

    def took(self, slots: IntArray, tokens: npt.NDArray[np.int32] | IntArray) -> None:
        return

    def start(self, at: IntArray, rows: IntArray) -> None:
        self._asked = rows

    def wait(self) -> Masks | None:
        rows, self._asked = self._asked, None
        if rows is None:
            return None
        told = torch.empty(len(rows), self._words + 1, dtype=torch.int32)
        words = self._from_first(told).numpy()
        tokens = zip(rows.tolist(), words[:, -1].tolist(), strict=True)
        openings = {row: token for row, token in tokens if token >= 0}
        return Masks(rows, words[:, :-1].copy(), openings, [])

    def drop(self) -> None:
        self._asked = None


def _failures(rows: IntArray, failed: dict[int, Failure]) -> list[RowFailure]:
    return [
        RowFailure(int(rows[at]), f"{SUBJECT}: {failure.reason}", failure.status)
        for at, failure in sorted(failed.items())
    ]


def only(token: int, words: int) -> Mask:
    """The bitmask of one token, [words]."""
    mask = np.zeros(words, np.uint32)
    mask[token // 32] = 1 << token % 32
    return mask.view(np.int32)


def tokenizer_loader(info: ModelInfo) -> Callable[[], LLTokenizer]:
    """Reads a model's vocabulary as grammars need it; raises where it has none to be read."""

    def load() -> LLTokenizer:
        text = (Path(info.folder) / "tokenizer.json").read_text(encoding="utf-8")
        return make_tokenizer(text, info.vocab_size, info.eos_token_ids)

    return load
