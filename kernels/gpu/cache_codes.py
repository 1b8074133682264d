"""Device functions for quantized KV caches; where what lies, and what it stands for, is said in
``penstock.kernels.quantized_cache``, the reference.

Codes are exact in bfloat16, and so products are of codes: scores are multiplied by the scales of
their keys, and weights by those of their values, which are numbers of a row of scores rather than
of a tile of keys. Prefill in float16 multiplies values themselves: weights times a small scale
would have no bits left. Decode multiplies in float16, with lifted weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.kernels.cache_kinds import SCALE_BYTES
from penstock.kernels.gpu.device_functions import INTERPRETED
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
def operand(codes, like):
    """Codes as numbers of ``like``'s type, which are exact.

    e4m3 becomes bfloat16 four at a time: sign, exponent and mantissa are put where bfloat16 has
    them, and the biases' difference is a factor of 2 ** 120.
    """
    if INTERPRETED or like.dtype != tl.bfloat16 or codes.dtype != tl.float8e4nv:
        return codes.to(like.dtype)
    else:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, high, shifted, none;
            prmt.b32 low, $2, 0, 0x1404;
            prmt.b32 high, $2, 0, 0x3424;
            shr.u32 shifted, low, 4;
            and.b32 shifted, shifted, 0x07f007f0;
            and.b32 low, low, 0x80008000;
            or.b32 low, low, shifted;
            shr.u32 shifted, high, 4;
            and.b32 shifted, shifted, 0x07f007f0;
            and.b32 high, high, 0x80008000;
            or.b32 high, high, shifted;
            mov.b32 shifted, 0x7b807b80;
            mov.b32 none, 0x80008000;
            fma.rn.bf16x2 $0, low, shifted, none;
            fma.rn.bf16x2 $1, high, shifted, none;
            }
            """,
            "=r,=r,r", [codes.to(tl.int8, bitcast=True)], tl.bfloat16, True, 4,
        )  # fmt: skip


@triton.jit
def values_for(codes, scale, like):
    """Codes of values [K, D] as an operand of ``like``'s type, and the scales [K] that weights are
    multiplied by."""
    if like.dtype == tl.float16:
        return numbers(codes, scale[:, None]).to(tl.float16), scale * 0.0 + 1.0
    else:
        return operand(codes, like), scale


@triton.jit
def key_operand(codes, like):
    """Codes of keys as numbers of ``like``'s type, float16 or float32, which are exact."""
    if INTERPRETED or like.dtype != tl.float16:
        return codes.to(tl.float32).to(like.dtype)
    elif codes.dtype == tl.float8e4nv:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b16 low, high;
            mov.b32 {low, high}, $2;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }
            """,
            "=&r,=r,r", [codes.to(tl.int8, bitcast=True)], tl.float16, True, 4,
        )  # fmt: skip
    else:
        # 1,024 and the code, from -128 on, less 1,152.
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 code, above, least;
            xor.b32 code, $2, 0x80808080;
            mov.b32 above, 0x64646464;
            mov.b32 least, 0xe480e480;
            prmt.b32 $0, code, above, 0x4140;
            prmt.b32 $1, code, above, 0x4342;
            add.rn.f16x2 $0, $0, least;
            add.rn.f16x2 $1, $1, least;
            }
            """,
            "=&r,=&r,r", [codes], tl.float16, True, 4,
        )  # fmt: skip


@triton.jit
def value_pairs(pairs, cache, like):
    """Codes of values [K, D / 2], two in 16 bits, as numbers of ``like``'s type, float16 or
    float32: the even and the odd ones. Numbers of 16 bits are turned in shared memory for a
    product, where single bytes would be picked."""
    if INTERPRETED or like.dtype != tl.float16:
        even, odd = pairs.to(tl.int8), (pairs >> 8).to(tl.int8)
        if cache.dtype.element_ty == tl.float8e4nv:
            even, odd = even.to(tl.float8e4nv, bitcast=True), odd.to(tl.float8e4nv, bitcast=True)
        return even.to(tl.float32).to(like.dtype), odd.to(tl.float32).to(like.dtype)
    elif cache.dtype.element_ty == tl.float8e4nv:
        even, odd = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 sorted;
            .reg .b16 low, high;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {low, high}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }
            """,
            "=&r,=r,r", [pairs], (tl.float16, tl.float16), True, 2,
        )  # fmt: skip
        return even, odd
    else:
        even, odd = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 code, above, least;
            xor.b32 code, $2, 0x80808080;
            mov.b32 above, 0x64646464;
            mov.b32 least, 0xe480e480;
            prmt.b32 $0, code, above, 0x4240;
            prmt.b32 $1, code, above, 0x4341;
            add.rn.f16x2 $0, $0, least;
            add.rn.f16x2 $1, $1, least;
            }
            """,
            "=&r,=&r,r", [pairs], (tl.float16, tl.float16), True, 2,
        )  # fmt: skip
        return even, odd
