"""The prompts of a step, one behind the other without padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Prompt(NamedTuple):
    """One prompt of a step."""

    tokens: np.ndarray[tuple[int, ...], np.dtype[np.int32]]
    second: int = 0
    """Where its second segment begins; 0: it has one."""


class PackedRows(NamedTuple):
    """N rows: the tokens of all prompts, shorter ones first."""

    tokens: Tensor
    """[N] int64."""
    positions: Tensor
    """[N] int64, from 0 on in each prompt."""
    segments: Tensor
    """[N] int64: 0 or 1."""
    lengths: list[int]
    """Tokens of each prompt, ascending."""
    order: list[int]
    """The place of each packed prompt among those that were given."""
    tiles: Tensor | None = None
    """On a GPU that has our kernels, in place of lengths and order: what ``packed_attention``
    takes, of prompts in the order in which they were given."""


def pack(prompts: Sequence[Prompt], device: torch.device) -> PackedRows:
    """prompts: one or more, none of them empty."""
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number].tokens))
    lengths = [len(prompts[number].tokens) for number in order]
    rows = np.zeros((3, sum(lengths)), np.int64)
    row = 0
    for number, length in zip(order, lengths, strict=True):
        tokens, second = prompts[number]
        rows[0, row : row + length] = tokens
        rows[1, row : row + length] = np.arange(length)
        if second:
            rows[2, row + second : row + length] = 1
        row += length
    tokens, positions, segments = torch.from_numpy(rows).to(device)  # in one copy
    return PackedRows(tokens, positions, segments, lengths, order)
