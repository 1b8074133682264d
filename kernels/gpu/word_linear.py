"""Linear layers with weights in words, for any number of rows, by what ``code_shapes`` names.

    out = x Wᵀ + b
    parts, fp32, whose sum is x Wᵀ + b                    ``divided``

Which kernel that is depends on the weight and on the number of rows alone, so that a CUDA graph
holds what its size needs. Where what made a weight of 8 bits expects activations in codes, too, and
the device multiplies these, rows are quantized ahead of the product, if they are not too few.

References: ``word_weight``, ``penstock.kernels.linear``, ``fp8_linear.quantize_rows_reference`` and
``int8_linear.quantize_rows_int8_reference``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.gpu.code_shapes import in_rows, product_shape, takes_coded_rows
from penstock.kernels.gpu.few_rows_codes import Shape, few_rows_codes
from penstock.kernels.gpu.fp8_linear import (
    BLOCK,
    CODES,
    fp8_block_linear,
    fp8_linear,
    quantize_rows,
)
from penstock.kernels.gpu.int8_linear import int8_linear, quantize_rows_int8
from penstock.kernels.gpu.many_rows_codes import many_rows_codes, widened_linear
from penstock.kernels.gpu.word_weight import WordWeight

FP8_ROWS, BLOCK_ROWS, INT8_ROWS = 17, 65, 65
"""Fewer rows, of FP8 with scales of rows or of blocks, or of int8, are multiplied as they are:
reading W is what takes the time."""
_BLOCK_TILE, _BLOCK_WARPS = (128, 128), 8


def word_linear(
    x: Tensor,
    weight: WordWeight,
    bias: Tensor | None,
    out: Tensor,
    space: Tensor,
    *,
    quantizes: bool = False,
    divided: bool = False,
) -> Tensor:
    """x: [R, K]; bias: [N]; out: [R, N], any distance between rows of both; space: uint8
    [``SPACE_BYTES``], overwritten; quantizes: whether x may be quantized. Returns out,
    or, if ``divided``, parts [P, R, N] in ``space``, which the next call overwrites."""
    rows, outputs = len(x), weight.shape[0]
    if not rows:
        return out
    coded = quantizes and rows >= _least_rows(weight) and takes_coded_rows(weight, x.dtype)
    if coded and (weight.kind == "int8" or out.is_contiguous()):
        _product_of_codes(x, weight, bias, out, space)
        return out
    shape = product_shape(weight, rows, divided=divided and _fit(space, rows, outputs))
    if shape is None:
        widened_linear(x, weight, bias, out, space.view(x.dtype))
        return out
    if shape.splits > 1:
        count = shape.splits * rows * outputs
        out = space.view(torch.float32)[:count].view(shape.splits, rows, outputs)
    if isinstance(shape, Shape):
        few_rows_codes(x, weight, bias, out, shape)
    else:
        many_rows_codes(x, weight, bias, out, shape)
    return out


def _least_rows(weight: WordWeight) -> int:
    """So many rows are quantized, fewer are not."""
    if weight.kind == "int8":
        return INT8_ROWS
    return FP8_ROWS if in_rows(weight) else BLOCK_ROWS


def _fit(space: Tensor, rows: int, outputs: int) -> bool:
    """Whether as many parts as there may be have room."""
    return 4 * rows * outputs * 4 <= len(space)


def _product_of_codes(
    x: Tensor, weight: WordWeight, bias: Tensor | None, out: Tensor, space: Tensor
) -> None:
    """As many rows at once as have room in ``space``."""
    width = weight.shape[1]
    parts = 1 if in_rows(weight) else width // BLOCK
    step = len(space) // (width + 4 * parts) // BLOCK * BLOCK
    for first in range(0, len(x), step):
        some, target = x[first : first + step], out[first : first + step]
        size = len(some) * width
        codes = space[:size].view(len(some), width)
        scales = space[size : size + 4 * len(some) * parts].view(torch.float32)
        scales = scales.view(len(some), parts)
        if weight.kind == "int8" and weight.factor is not None:
            whole = codes.view(torch.int8)
            quantize_rows_int8(some, whole, scales)
            int8_linear(
                whole, scales, weight.words.view(torch.int8), weight.factor, bias, target
            )  # fmt: skip
            continue
        quantize_rows(some, codes.view(CODES), scales)
        of_weight = weight.words.view(CODES)
        if weight.scales is None and weight.factor is not None:
            fp8_linear(codes.view(CODES), scales, of_weight, weight.factor, bias, target)
        elif weight.scales is not None:
            fp8_block_linear(
                codes.view(CODES), scales, of_weight, weight.scales, weight.rows, bias, target,
                tile=_BLOCK_TILE, warps=_BLOCK_WARPS,
            )  # fmt: skip
