"""Codes that checkpoints keep packed in int32 words, one a byte: lowest bits first."""

from __future__ import annotations

import torch
from torch import Tensor

_INTERLEAVED = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word of AWQ column i of eight lies: the word has 0 2 4 6 1 3 5 7."""


def along_columns(words: Tensor, bits: int) -> Tensor:
    """[R, C] int32 → uint8 [R, C * 32 / bits]; bits: 4 or 8."""
    return _codes(words, bits).flatten(1)


def along_rows(words: Tensor, bits: int) -> Tensor:
    """[R, C] int32 → uint8 [R * 32 / bits, C]."""
    codes = _codes(words, bits)
    return codes.transpose(1, 2).reshape(-1, words.shape[1])


def interleaved_columns(words: Tensor) -> Tensor:
    """[R, C] int32 of AWQ, 4 bits → uint8 [R, 8 C]."""
    return _codes(words, 4)[..., _INTERLEAVED].flatten(1)


def _codes(words: Tensor, bits: int) -> Tensor:
    """uint8 [R, C, 32 / bits]."""
    data = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    if bits == 8:
        return data
    return torch.stack((data & 15, data >> 4), -1).flatten(2)


def order_of(groups: Tensor | None) -> Tensor | None:
    """The order in which inputs of a group are neighbours, int64 [K]; groups: int32 [K], of each
    input; ``None`` where they are neighbours as they are."""
    if groups is None or bool((groups[1:] >= groups[:-1]).all()):
        return None
    return groups.argsort(stable=True)
