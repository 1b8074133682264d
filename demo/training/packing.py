"""Conversations as rows of token ids: several in a row, each blind to the others."""

from __future__ import annotations

from typing import Any

import numpy as np
from tokenizers import Tokenizer
from torch.utils.data import Dataset

from penstock.demo.chat import render
from penstock.demo.exchange import Random
from penstock.demo.mixture import Conversation, conversation

IGNORED = -100
"""The label of a token that the model is not trained to say."""


def encode(tokenizer: Tokenizer, made: Conversation) -> tuple[list[int], list[int]]:
    """Token ids, and the labels: the same ids where the model speaks, else ``IGNORED``."""
    ids: list[int] = []
    labels: list[int] = []
    for text, trained in render(made):
        piece = tokenizer.encode(text, add_special_tokens=False).ids
        ids += piece
        labels += piece if trained else [IGNORED] * len(piece)
    return ids, labels


class Packed(Dataset[Any]):
    """Batches of the training text, made on the spot: batch *i* of a seed is always the same.

    A batch is int16 [3, rows, length]: ids, the labels of the next token, and each token's
    document number in its row (0: padding).
    """

    def __init__(self, tokenizer_file: str, seed: int, rows: int, length: int, count: int) -> None:
        self._file, self._seed, self._rows, self._length = tokenizer_file, seed, rows, length
        self._count = count
        self._tokenizer: Tokenizer | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> np.ndarray[Any, np.dtype[np.int16]]:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.from_file(self._file)
        source = Random(f"training {self._seed} {index}")
        batch = np.zeros((3, self._rows, self._length), dtype=np.int16)
        batch[1] = IGNORED
        fill = [0] * self._rows
        documents = [0] * self._rows
        row, misses = 0, 0
        while misses < self._rows // 4 + 2:
            ids, labels = encode(self._tokenizer, conversation(source))
            size = len(ids) - 1  # the last token predicts nothing
            if size > self._length:
                continue
            if fill[row] + size > self._length:
                fits = [place for place in range(self._rows) if fill[place] + size <= self._length]
                if not fits:
                    misses += 1
                    continue
                row = fits[0]
            start = fill[row]
            documents[row] += 1
            batch[0, row, start : start + size] = ids[:-1]
            batch[1, row, start : start + size] = labels[1:]
            batch[2, row, start : start + size] = documents[row]
            fill[row] = start + size
            row = (row + 1) % self._rows
        return batch
