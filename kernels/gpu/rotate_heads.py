"""Rotary embedding of queries and keys in one kernel, with cosines and sines of each row.

For code that is not ours: it makes these once a step, and has heads of any strides. A head's halves
are rotated as ``penstock.kernels.rotary`` says, in fp32, and rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.early_launch import EARLY, begin_early


@triton.jit
def _rotate_part(
    source, row_stride, head_stride, target, row, cos, sin,
    HEADS: tl.constexpr, PADDED: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The heads of one row: queries or keys."""
    head = tl.arange(0, PADDED)[:, None]
    column = tl.arange(0, WIDTH)
    half = column[None, :]
    angles = column < HALF
    there = (head < HEADS) & (half < HALF)
    at = row * 2 * HALF + column
    first_cos = tl.load(cos + at, mask=angles, other=0.0).to(tl.float32)[None, :]
    second_cos = tl.load(cos + at + HALF, mask=angles, other=0.0).to(tl.float32)[None, :]
    first_sin = tl.load(sin + at, mask=angles, other=0.0).to(tl.float32)[None, :]
    second_sin = tl.load(sin + at + HALF, mask=angles, other=0.0).to(tl.float32)[None, :]
    values = source + row * row_stride + head * head_stride + half
    first = tl.load(values, mask=there, other=0.0).to(tl.float32)
    second = tl.load(values + HALF, mask=there, other=0.0).to(tl.float32)
    out = target + (row * HEADS + head) * 2 * HALF + half
    dtype = target.dtype.element_ty
    tl.store(out, (first * first_cos - second * first_sin).to(dtype), mask=there)
    tl.store(out + HALF, (second * second_cos + first * second_sin).to(dtype), mask=there)


@triton.jit
def _rotate_heads_kernel(
    query, key, cos, sin, query_out, key_out, query_row, query_head, key_row, key_head,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PADDED: tl.constexpr, KV_PADDED: tl.constexpr,
    HALF: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin_early(EARLY)
    row = tl.program_id(0).to(tl.int64)
    _rotate_part(query, query_row, query_head, query_out, row, cos, sin, HEADS, PADDED, HALF, WIDTH)
    _rotate_part(key, key_row, key_head, key_out, row, cos, sin, KV_HEADS, KV_PADDED, HALF, WIDTH)


def rotate_heads(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """``x * cos + cat((-x[..., D / 2:], x[..., :D / 2]), -1) * sin`` of queries and keys.

    query: [N, Hq, D], key: [N, Hkv, D], of any strides; cos, sin: [N, D]. Returns both, contiguous.
    """
    rows, heads, dim = query.shape
    kv_heads, half = key.shape[1], dim // 2
    parts = [each if each.stride(2) == 1 else each.contiguous() for each in (query, key)]
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    key_out = torch.empty_like(key, memory_format=torch.contiguous_format)
    if rows:
        _rotate_heads_kernel[(rows,)](
            *parts, cos.contiguous(), sin.contiguous(), out, key_out,
            *(each.stride(at) for each in parts for at in (0, 1)), heads, kv_heads,
            triton.next_power_of_2(heads), triton.next_power_of_2(kv_heads), half,
            triton.next_power_of_2(half), EARLY,
            num_warps=8 if heads * dim > 4096 else 4, launch_pdl=EARLY,
        )  # fmt: skip
    return out, key_out
