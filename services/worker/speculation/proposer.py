"""What proposes drafts: the tokens that a sequence may go on with, cheap to guess and checked by
the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

OWN, FINISHED, GRAMMAR = "own", "finished", "grammar"
EAGLE3, DRAFT_MODEL = "eagle3", "draft-model"
SOURCES = (OWN, FINISHED, GRAMMAR, EAGLE3, DRAFT_MODEL)
"""Where drafts come from: the sequence's own text, finished outputs, what a grammar forces, a head,
a draft model."""


class Draft(NamedTuple):
    """Tokens that may come next, in their order."""

    tokens: list[int]
    source: str
    """One of ``SOURCES``."""
    match: int
    """Tokens that it was found by: the more, the likelier."""


class SpeculativeProposer(Protocol):
    """Proposes drafts for the slots of an executor. Used from one thread; no call waits."""

    def begin(self, slot: int, text: npt.NDArray[np.int32], prompt_len: int, corpus: bytes) -> None:
        """A sequence takes a slot. text: its prompt and output so far; corpus: what may be known of
        other sequences to this one: those with the same."""

    def next_step(self) -> None:
        """A step begins. What a proposer has to prepare it does in pieces, a bounded one a step:
        the device waits for the thread that it is called from."""

    def took(self, slot: int, tokens: Sequence[int]) -> None:
        """The sequence in a slot has these tokens more."""

    def propose(self, slot: int, most: int) -> Draft | None:
        """Up to ``most`` tokens that may follow the text of a slot; ``None``: nothing is known."""

    def forget(self, slot: int) -> None:
        """The sequence has left its slot."""

    def clear(self) -> None:
        """All sequences have left their slots."""
