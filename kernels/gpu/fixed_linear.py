"""Linear layers that give a row the same bits whatever other rows a step has.

    out = x W^T + b

Libraries choose a kernel by the number of rows, and with it the order in which a row's products
are added up. Here each number of ``out`` is one sum over the inputs from the first to the last, by
the same instruction of the tensor cores, however many rows there are. Only how many rows, outputs
and inputs a program holds at a time differs: ``Shape``. That these shapes agree on a device is
measured, not assumed: see ``shapes_agree``.

Reference: ``penstock.kernels.linear``. What makes inference differ from batch to batch: He et al.,
"Defeating Nondeterminism in LLM Inference" (Thinking Machines Lab, 2025).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.device_facts import shared_bytes
from penstock.kernels.gpu.device_functions import banded_tile, dot
from penstock.kernels.gpu.early_launch import EARLY, begin_early

_BAND = 8
_PROGRAMS, _LARGE_PROGRAMS = 120, 90
"""So many programs at least are to read a weight, where few rows leave them nothing else; the
latter where shared memory lets each have more under way."""
_WIDEST = 1 << 16
"""Outputs from which on, as of LM heads, programs of few rows have the most."""
_LARGE_BYTES = 200 * 1024
"""Shared memory of a program that the widest shape for few rows needs."""


class Shape(NamedTuple):
    """What a program computes."""

    rows: int
    outputs: int
    inputs: int
    """That it multiplies at a time."""
    warps: int
    stages: int


FEW_ROWS, MANY_ROWS = 64, 512
_MIDDLE = Shape(64, 64, 64, 4, 4)
_MANY = Shape(128, 128, 64, 8, 3)
_WIDE_NUMBERS = Shape(64, 32, 64, 4, 2)
"""Of fp32, which are multiplied without tensor cores."""


@triton.jit(do_not_specialize=["rows"])
def _fixed_linear_kernel(
    x, weight, bias, out, rows, columns,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INPUTS: tl.constexpr,
    BAND: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin_early(EARLY)
    row, column = banded_tile(rows, columns, ROWS, COLUMNS, BAND)
    inputs = tl.arange(0, INPUTS)
    of_rows = x + row.to(tl.int64)[:, None] * WIDTH + inputs[None, :]
    of_columns = weight + column.to(tl.int64)[:, None] * WIDTH + inputs[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, WIDTH, INPUTS):
        there = (row < rows)[:, None]
        asked = (column < columns)[:, None]
        if WIDTH % INPUTS != 0:
            there = there & (start + inputs < WIDTH)[None, :]
            asked = asked & (start + inputs < WIDTH)[None, :]
        part = tl.load(of_rows + start, mask=there, other=0.0)
        factor = tl.load(of_columns + start, mask=asked, other=0.0)
        total += dot(part, tl.trans(factor))
    if bias is not None:
        total += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    target = out + row.to(tl.int64)[:, None] * columns + column[None, :]
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=mask)


def shapes_for(columns: int, dtype: torch.dtype) -> tuple[Shape, Shape, Shape]:
    """For up to ``FEW_ROWS`` rows, up to ``MANY_ROWS``, and more, of an output of ``columns``."""
    if dtype.itemsize > 2:
        return _WIDE_NUMBERS, _WIDE_NUMBERS, _WIDE_NUMBERS
    large = shared_bytes() >= _LARGE_BYTES
    return _few_rows(columns, large=large), _MIDDLE, _MANY


def _few_rows(columns: int, *, large: bool) -> Shape:
    """The fastest of 13 on an H200 for the layers of Qwen3-0.6B and 8B, with 1 and with 64 rows;
    where shared memory is not ``large``, others that fit."""
    if not large:
        outputs = 128
        while outputs > 16 and columns < _PROGRAMS * outputs:
            outputs //= 2
        return Shape(FEW_ROWS, outputs, 64, 4, 4)
    if columns >= _WIDEST:
        return Shape(FEW_ROWS, 128, 128, 4, 4)
    if columns >= 64 * _LARGE_PROGRAMS:
        return Shape(FEW_ROWS, 64, 64, 4, 8)
    return Shape(FEW_ROWS, 32 if columns >= 32 * _LARGE_PROGRAMS else 16, 256, 4, 4)


def fixed_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, shape: Shape | None = None
) -> Tensor:
    """Writes ``out``, and returns it. x: [N, K]; weight: [M, K]; bias: [M]; out: [N, M]; all
    contiguous. shape: for a trial, instead of the one for so many rows."""
    rows, width = x.shape
    columns = len(weight)
    if not rows:
        return out
    if shape is None:
        few, middle, many = shapes_for(columns, x.dtype)
        shape = few if rows <= FEW_ROWS else middle if rows <= MANY_ROWS else many
    # Of inputs in one piece a compiler adds the products to the bias, not the bias to them.
    inputs = shape.inputs if shape.inputs < width else min(shape.inputs, _MIDDLE.inputs)
    programs = triton.cdiv(rows, shape.rows) * triton.cdiv(columns, shape.outputs)
    _fixed_linear_kernel[(programs,)](
        x, weight, bias, out, rows, columns, width, shape.rows, shape.outputs, inputs,
        _BAND, EARLY, num_warps=shape.warps, num_stages=shape.stages, launch_pdl=EARLY,
    )  # fmt: skip
    return out


def shapes_agree(weight: Tensor) -> bool:
    """Whether all shapes give the same bits for products with this weight on its device."""
    rows, columns = 3, len(weight)
    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.empty(rows, weight.shape[1], dtype=weight.dtype, device=weight.device)
    x.normal_(generator=generator)
    found = [
        fixed_linear(x, weight, None, x.new_empty(rows, columns), shape)
        for shape in dict.fromkeys(shapes_for(columns, x.dtype))
    ]
    return all(torch.equal(found[0], other) for other in found[1:])
