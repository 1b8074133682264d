"""Drafts for tests: of texts that are known before, some of them wrong on purpose."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from penstock.services.worker.drafting_executor import DraftingExecutor
from penstock.services.worker.gpu.drafting_executor import DraftingGpuExecutor
from penstock.services.worker.speculation.drafting import Drafting
from penstock.services.worker.speculation.proposer import OWN, Draft
from penstock.services.worker.speculation.step_costs import Candidate, DraftBudget

Token = npt.NDArray[np.int32]


class OracleProposer:
    """Knows how each prompt goes on, and says something else for a share of the tokens."""

    def __init__(self, texts: Sequence[tuple[list[int], list[int]]], wrong: float = 0.3) -> None:
        """texts: prompts and their outputs."""
        self._texts = [prompt + output for prompt, output in texts]
        self._wrong, self._random = wrong, random.Random(1)
        self.known: dict[int, list[int]] = {}

    def begin(self, slot: int, text: Token, prompt_len: int, corpus: bytes) -> None:
        self.known[slot] = text.tolist()

    def next_step(self) -> None:
        """Nothing is to be prepared."""

    def took(self, slot: int, tokens: Sequence[int]) -> None:
        self.known[slot] += tokens

    def propose(self, slot: int, most: int) -> Draft | None:
        known = self.known[slot]
        for text in self._texts:
            if len(text) > len(known) and text[: len(known)] == known:
                draft = text[len(known) : len(known) + self._random.randint(1, most)]
                wrong = [abs(token - (self._random.random() < self._wrong)) for token in draft]
                return Draft(wrong, OWN, 3)
        return None

    def forget(self, slot: int) -> None:
        del self.known[slot]

    def clear(self) -> None:
        self.known.clear()


class AllDrafts(DraftBudget):
    """Each draft whole while a step has room, whatever it costs."""

    def choose(
        self, rows: int, candidates: Sequence[Candidate], pause: float | None = None
    ) -> list[int]:
        room, chosen = self._most_rows - rows, []
        for one in candidates:
            chosen.append(max(0, min(room, one.most)))
            room -= chosen[-1]
        return chosen

    def may_look(self, rows: int) -> bool:
        return True


Executor = TypeVar("Executor", DraftingExecutor, DraftingGpuExecutor)


def speculating(
    executor: Executor, texts: Sequence[tuple[list[int], list[int]]], wrong: float = 0.3
) -> Executor:
    rows = executor.capacity.max_num_seqs if isinstance(executor, DraftingGpuExecutor) else 64
    executor.speculate(Drafting(OracleProposer(texts, wrong), 5, AllDrafts(rows)))
    return executor
