"""Slots that ask what sequences have come before: DRY and no-repeat-ngram.

Both executors keep the tokens of such slots on the host, since a step adds little to what is known
of the step before. The executor tells what happens to slots (``begin``, ``took``) and asks for the
entries of a step's rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.kernels.sampling import dry, no_repeat_ngram
from penstock.kernels.sampling.rows import FloatArray, IntArray
from penstock.kernels.sampling.suffix_matches import SuffixMatches, TokenMarks
from penstock.protocol.wire.messages.steps import SlotAdjustments
from penstock.services.worker.slot_history import History


class _Repeats(NamedTuple):
    rule: dry.DryRule | None
    """``None``: no DRY."""
    unbroken: SuffixMatches | None
    """For DRY: no match goes over a breaker."""
    ngram: int
    """0: sequences may come again."""
    matches: SuffixMatches | None
    """For n-grams."""


class RepeatSlots:
    """What is known of the slots of one executor."""

    def __init__(self, slots: int) -> None:
        self.asks = np.zeros(slots, np.bool_)
        self._slots: dict[int, _Repeats] = {}
        self._marks = TokenMarks()

    def begin(self, slot: int, known: History, asked: SlotAdjustments) -> None:
        """A slot that repeats nothing, with the tokens that its sequence has."""
        self.asks[slot] = True
        tokens = np.concatenate((known.prompt, known.output)).astype(np.int32)
        rule = unbroken = matches = None
        if asked.dry is not None:
            given = asked.dry
            rule = dry.DryRule(given.multiplier, given.base, given.allowed_length, given.range)
            breakers = np.frombuffer(given.breakers, "<i4")
            unbroken = SuffixMatches(tokens, breakers, dry.longest_that_matters(rule))
        if asked.no_repeat_ngram:
            matches = SuffixMatches(tokens, None, asked.no_repeat_ngram)
        self._slots[slot] = _Repeats(rule, unbroken, asked.no_repeat_ngram, matches)

    def forget(self, slot: int) -> None:
        self.asks[slot] = False
        self._slots.pop(slot, None)

    def took(self, slots: IntArray, tokens: IntArray) -> None:
        """A new token of each of these slots, which all ask."""
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            known = self._slots[slot]
            for matches in (known.unbroken, known.matches):
                if matches is not None:
                    matches.add(token)

    def penalties(self, slot: int) -> tuple[IntArray, FloatArray]:
        """The tokens that DRY lowers, each once, and what it adds to their logits."""
        known = self._slots[slot]
        if known.rule is None or known.unbroken is None:
            return np.zeros(0, np.int64), np.zeros(0, np.float32)
        return dry.penalties(known.unbroken, known.rule, self._marks)

    def bans(self, slot: int) -> IntArray:
        """The tokens that would repeat an n-gram, each once."""
        known = self._slots[slot]
        if known.matches is None:
            return np.zeros(0, np.int64)
        return no_repeat_ngram.bans(known.matches, known.ngram, self._marks)
