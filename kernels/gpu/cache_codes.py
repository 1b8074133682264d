"""Device functions for quantized KV caches; where what lies, and what it stands for, is said in
``penstock.kernels.quantized_cache``, the reference.

Codes are exact in bfloat16, and so products are of codes: scores are multiplied by the scales of
their keys, and weights by those of their values, which are numbers of a row of scores rather than
of a tile of keys. In float16 values are multiplied themselves: weights times a small scale would
have no bits left.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.kernels.cache_kinds import SCALE_BYTES
from penstock.kernels.quantized_cache import LARGEST, LEAST_SCALE

_SCALE_BYTES = tl.constexpr(SCALE_BYTES)
_MOST_INT8 = tl.constexpr(LARGEST[torch.int8])
_MOST_E4M3 = tl.constexpr(LARGEST[torch.float8_e4m3fn])
_LEAST = tl.constexpr(LEAST_SCALE)
_NO_FRACTION = tl.constexpr(12582912.0)
"""A number this large has no bits for fractions: adding it rounds to nearest even."""


@triton.jit
def codes_place(page, offset, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Where the codes of a position begin; page: number of block and KV head, int64."""
    return page * (BLOCK_SIZE * (DIM + _SCALE_BYTES)) + offset * DIM


@triton.jit
def scale_place(page, offset, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Where the scale of a position is, in the cache as fp32."""
    behind_codes: tl.constexpr = BLOCK_SIZE * DIM // _SCALE_BYTES
    return page * (behind_codes + BLOCK_SIZE) + behind_codes + offset


@triton.jit
def largest(value, AXIS: tl.constexpr):
    """The largest of fp32 numbers, absolute; infinite where one is a NaN, which tl.max passes."""
    return tl.max(tl.where(value != value, float("inf"), tl.abs(value)), AXIS)


@triton.jit
def scale_of(most, cache):
    """The scale of numbers of which ``most`` is the largest; NaN where it is infinite."""
    if cache.dtype.element_ty == tl.int8:
        scale = tl.maximum(most / _MOST_INT8, _LEAST)
    else:
        scale = tl.maximum(most / _MOST_E4M3, _LEAST)
    return tl.where(most == float("inf"), float("nan"), scale)


@triton.jit
def codes_of(value, scale, cache):
    """fp32 numbers as codes of the cache's type; scale: broadcasts with ``value``."""
    ratio = tl.where(scale == scale, value / scale, 0.0)
    if cache.dtype.element_ty == tl.int8:
        ratio = (ratio + _NO_FRACTION) - _NO_FRACTION
    return ratio.to(cache.dtype.element_ty)


@triton.jit
def numbers(codes, scale):
    """What codes stand for, fp32; scale: broadcasts with ``codes``."""
    return codes.to(tl.float32) * scale


@triton.jit
def values_for(codes, scale, like):
    """Codes of values [K, D] as an operand of ``like``'s type, and the scales [K] that weights are
    multiplied by."""
    if like.dtype == tl.float16:
        return numbers(codes, scale[:, None]).to(tl.float16), scale * 0.0 + 1.0
    else:
        return codes.to(like.dtype), scale
