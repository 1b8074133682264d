"""What transformers makes of the same facts and text, in float32 on the CPU: run as a program.

    python -m penstock.loadtest.evaluation.eval_reference FOLDER [QUESTIONS_OF_EACH_TABLE] < TEXT

Prints a ``Reference`` in JSON. A process of its own, so that its model's memory is free again.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec

from penstock.loadtest.evaluation.eval_cloze import Scored
from penstock.loadtest.evaluation.eval_facts import facts

BATCH = 16
"""Questions."""
_MODULE = "penstock.loadtest.evaluation.eval_reference"


class ReferenceFailed(ValueError):
    """transformers gave no reference. The message is its last line."""


class Reference(msgspec.Struct):
    """The answer to each of the facts, in their order, and the text's perplexity."""

    answers: list[str]
    perplexity: float | None = None


def reference(folder: str, text: str, most: int | None = None) -> Reference:
    """Run the program. most: questions of each table; ``None``: all. Raises ``ReferenceFailed``."""
    command = [sys.executable, "-m", _MODULE, folder, *([] if most is None else [str(most)])]
    done = subprocess.run(command, input=text.encode(), capture_output=True, check=False)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise ReferenceFailed(lines[-1] if lines else f"exit code {done.returncode}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Reference)


class _Model:
    def __init__(self, folder: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._torch = torch
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def score(self, texts: list[str]) -> list[Scored]:
        """As a server scores them; together, with padding behind the shorter ones."""
        torch = self._torch
        found = [self._tokenizer(text, return_offsets_mapping=True) for text in texts]
        ids = torch.zeros(len(texts), max(len(each["input_ids"]) for each in found)).long()
        for row, each in zip(ids, found, strict=True):
            row[: len(each["input_ids"])] = torch.tensor(each["input_ids"])
        with torch.inference_mode():
            logits = self._model(ids).logits[:, :-1].float()
        picked = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        return [
            Scored(
                [begin for begin, _ in each["offset_mapping"]],
                [None, *row[: len(each["input_ids"]) - 1]],
            )
            for each, row in zip(found, picked.tolist(), strict=True)
        ]


def make(folder: str, text: str, most: int | None = None) -> Reference:
    """In this process."""
    model = _Model(folder)
    answers: list[str] = []
    asked = list(facts(most))
    for some in (asked[at : at + BATCH] for at in range(0, len(asked), BATCH)):
        scored = iter(model.score([each.stem + option for each in some for option in each.options]))
        for each in some:
            ends = [next(scored).behind(len(each.stem)) for _ in each.options]
            answers.append(each.options[ends.index(max(ends))].strip())
    return Reference(answers, model.score([text])[0].perplexity if text else None)


if __name__ == "__main__":
    made = make(sys.argv[1], sys.stdin.read(), *map(int, sys.argv[2:]))
    sys.stdout.write(msgspec.json.encode(made).decode() + "\n")
