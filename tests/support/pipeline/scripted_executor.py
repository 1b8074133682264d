"""A worker's executor whose model answers from a script.

The cache holds the tokens themselves, by block, as a real one holds keys and values: what the model
has before it is read from there, so that blocks of a cached prefix must hold what they should.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.steps import StepPlan, StepResult
from penstock.services.worker import loading
from penstock.services.worker.null_engine import NullExecutor
from penstock.services.worker.slots import IntArray, PlannedStep


class ScriptedExecutor(NullExecutor):
    """Says what the first rule of the script says whose pattern is found in the prompt."""

    folder: Path
    """With ``tokenizer.json``, and the script in ``script.json``: pairs of a pattern and an
    answer."""

    def __init__(
        self, capacity: EngineSizes, end_tokens: list[int], step_seconds: float = 0.0
    ) -> None:
        super().__init__(capacity, end_tokens, step_seconds)
        self._end = end_tokens[0]
        self._cache = np.full((capacity.num_blocks, capacity.block_size), -1, np.int64)
        self._tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        rules = json.loads((self.folder / "script.json").read_text())
        self._rules = [(re.compile(pattern, re.DOTALL), says) for pattern, says in rules]
        self._answers: dict[int, list[int]] = {}
        """By slot."""

    def execute(self, plan: StepPlan) -> StepResult:
        for slot in [*plan.gone, *(new.slot for new in plan.added)]:
            self._answers.pop(slot, None)
        return super().execute(plan)

    def draw(self, step: PlannedStep) -> IntArray:
        slots = self._slots
        for chunk in step.chunks:
            self._write(chunk.slot, chunk.start, chunk.tokens.astype(np.int64))
        for slot in step.decoding.tolist():
            self._write(slot, int(slots.position[slot]), slots.last_token[slot : slot + 1])
        return np.array([self._next(slot) for slot in step.sampled.tolist()], np.int64)

    def _places(self, slot: int, positions: IntArray) -> tuple[IntArray, IntArray]:
        size = self.capacity.block_size
        return self._slots.blocks.tables[0][slot, positions // size], positions % size

    def _write(self, slot: int, start: int, tokens: IntArray) -> None:
        self._cache[self._places(slot, np.arange(start, start + len(tokens)))] = tokens

    def _next(self, slot: int) -> int:
        if slot not in self._answers:
            length = int(self._slots.prompt_length[slot])
            prompt = self._cache[self._places(slot, np.arange(length))].tolist()
            self._answers[slot] = self._answer(
                self._tokenizer.decode(prompt, skip_special_tokens=False)
            )
        answer, said = self._answers[slot], int(self._slots.num_output[slot])
        return answer[said] if said < len(answer) else self._end

    def _answer(self, prompt: str) -> list[int]:
        says = next((says for pattern, says in self._rules if pattern.search(prompt)), "")
        return list(self._tokenizer.encode(says, add_special_tokens=False).ids)


def install(folder: str) -> None:
    """The null device of this process answers from the script in this folder."""
    ScriptedExecutor.folder = Path(folder)
    loading.NullExecutor = ScriptedExecutor  # type: ignore[misc]
