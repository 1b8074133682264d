"""Runs kernels in Triton's interpreter as it comes, then in the lean one, and prints what both did:
as a script, since nothing makes an interpreter plain again."""

from __future__ import annotations

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl
from support.counted import calls
from support.lean_interpreter import make_lean
from triton.runtime import interpreter

ROWS, WIDTH = 3, 13


@triton.jit
def doubled(x):
    return x * 2.0


@triton.jit
def mixed(x_ptr, y_ptr, out_ptr, numbers_ptr, width, BLOCK: tl.constexpr):
    """Scalars and blocks of one and two dimensions, masks, reductions, integers that overflow."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(x_ptr + row * width + at, mask=inside, other=0.0)
    y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
    product = doubled(x)[:, None] * y[None, :] + row
    total = tl.sum(product, axis=1) / tl.max(y, axis=0)
    square = tl.dot(product, tl.trans(product))
    for step in range(2):
        total += tl.sum(square, axis=0) * step
    tl.store(out_ptr + row * width + at, tl.where(at % 2 == 0, total, tl.exp(x)), mask=inside)
    tl.store(numbers_ptr + row * width + at, (at + 2147483640) * (row + 3), mask=inside)


@triton.jit
def of_unequal_shapes(out_ptr):
    tl.store(out_ptr + tl.arange(0, 4), tl.arange(0, 4) + tl.arange(0, 8))


def results() -> list[list[list[float]]]:
    torch.manual_seed(1)
    x, y = torch.randn(ROWS, WIDTH), torch.randn(WIDTH).to(torch.float16)
    out = torch.zeros(ROWS, WIDTH)
    numbers = torch.zeros(ROWS, WIDTH, dtype=torch.int32)
    mixed[(ROWS,)](x, y, out, numbers, WIDTH, BLOCK=16)
    return [out.tolist(), numbers.tolist()]


def refusal() -> str:
    try:
        of_unequal_shapes[(1,)](torch.zeros(8, dtype=torch.int32))
    except Exception as error:
        return f"{type(error).__name__}: {error.__cause__ or error}"
    return ""


def seen() -> dict[str, object]:
    results()  # what is made at the first use counts for none
    return {"results": results(), "calls": calls(results), "refusal": refusal()}


if __name__ == "__main__":
    plain = seen()
    make_lean(interpreter)
    print(json.dumps([plain, seen()]))
