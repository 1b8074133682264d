"""``WordWeight``: quantized weights in the order in which kernels for a GPU read them.

    W[n, k] = factor[n] * scale[k // group, n // rows] * (code[n, k] - zero[k // group, n])

A row is words of 32 bits. Codes of 8 bits lie as they are stored, four in a word. Of codes of 4
bits a block of 128 columns is 16 words: word 4 t + q holds the eight columns from 32 q + 8 t on,
column 2 i + b of these in the bits from 4 i + 16 b. So four threads that read 16 bytes each,
which is a block, have in their word q what one product of the matrix unit takes, and pairs of
neighbours come off a word with one shift (``code_pairs``). Reference:
``penstock.kernels.quantized_weight.QuantizedWeight``, of which this is another form, and
``codes_of``.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from penstock.kernels.quantized_weight import QuantizedWeight

WordKind = Literal["int4", "int8", "fp8"]
KINDS: dict[WordKind, int] = {"int4": 0, "int8": 1, "fp8": 2}
"""What kernels are told."""
BLOCK = 128
"""Columns of a block; the width is a multiple of it."""
_SMALL_GROUPS = (32, 64)
"""Groups of int4 within a block; others are whole blocks."""
_ROWS_AT_ONCE = 4096


class WordWeight(NamedTuple):
    """[N, K]; all tensors are contiguous and on one device."""

    kind: WordKind
    words: Tensor
    """int32 [N, K / 8] of int4, else [N, K / 4]."""
    group: int
    """Columns that share a scale and a zero; K if there are none."""
    scales: Tensor | None
    """[K / group, ceil(N / rows)], of any float type; ``None``: 1."""
    rows: int
    """Rows that share a scale."""
    zeros: Tensor | None
    """int16 [K / group, N], of int4 alone; ``None``: 8 of int4, else 0."""
    factor: Tensor | None
    """fp32 [N]; ``None``: 1."""

    @property
    def shape(self) -> tuple[int, int]:
        """[outputs, inputs]."""
        outputs, count = self.words.shape
        return outputs, count * (8 if self.kind == "int4" else 4)

    @property
    def num_bytes(self) -> int:
        tensors = (self.words, self.scales, self.zeros, self.factor)
        return sum(each.nbytes for each in tensors if each is not None)


def why_not(weight: QuantizedWeight) -> str:
    """Why a weight has no such form; empty if it has."""
    outputs, inputs = weight.shape
    if weight.kind not in KINDS:
        return f"codes are {weight.kind}"
    if weight.order is not None or weight.offsets is not None:
        return "inputs have an order, or groups have offsets"
    if weight.zeros is not None and weight.kind != "int4":
        return f"zeros of {weight.kind}"
    if inputs % BLOCK or outputs % 16:
        return f"{outputs} x {inputs} numbers; multiples of 16 x {BLOCK} are taken"
    small = weight.kind == "int4" and weight.group in _SMALL_GROUPS
    if weight.group % BLOCK and not small:
        return f"groups of {weight.group} columns"
    if weight.scales is not None and weight.scales.dtype.itemsize == 1:
        return "scales of 8 bits"
    return ""


def word_weight(weight: QuantizedWeight) -> WordWeight:
    """The weight in words, of a form that ``why_not`` has nothing against; codes of 8 bits are
    shared with it."""
    kind, width = weight.kind, weight.shape[1]
    if kind == "fp4":
        raise ValueError("fp4 has no words")
    words = in_words(weight.codes) if kind == "int4" else weight.codes.view(torch.int32)
    scales, factor, rows = weight.scales, weight.factor, weight.rows
    if scales is not None and weight.zeros is None and weight.group == width and rows == 1:
        one = scales[0].float()
        scales, factor = None, one if factor is None else factor * one
    return WordWeight(kind, words, weight.group, scales, rows, weight.zeros, factor)


def in_words(halves: Tensor) -> Tensor:
    """Codes of four bits, two in a byte as ``QuantizedWeight`` has them, uint8 [N, K / 2], as words
    [N, K / 8]."""
    rows, half = halves.shape
    found = torch.empty(rows, half // 4, dtype=torch.int32, device=halves.device)
    for first in range(0, rows, _ROWS_AT_ONCE):
        some = halves[first : first + _ROWS_AT_ONCE]
        codes = torch.cat((some & 15, some >> 4), 1)
        # q, t, i, b → t, q and the bytes of a word: b, i / 2, i % 2
        parts = codes.view(len(some), -1, 4, 4, 2, 2, 2).permute(0, 1, 3, 2, 6, 4, 5)
        low, high = parts.unbind(-1)
        words = (low | (high << 4)).flatten(-2).view(torch.int32)
        found[first : first + len(some)] = words.view(len(some), -1)
    return found


def codes_of(weight: WordWeight) -> Tensor:
    """Codes [N, K] as fp32, zeros not taken off."""
    outputs, inputs = weight.shape
    if weight.kind != "int4":
        dtype = torch.int8 if weight.kind == "int8" else torch.float8_e4m3fn
        return weight.words.view(dtype).float()
    data = weight.words.view(torch.uint8)
    parts = torch.stack((data & 15, data >> 4), -1).view(outputs, -1, 4, 4, 2, 2, 2)
    return parts.permute(0, 1, 3, 2, 5, 6, 4).reshape(outputs, inputs).float()
