"""Codes of quantized weights as pairs of bf16 numbers, exactly, in two to five instructions a pair.

Words of 32 bits hold four codes of 8 bits or eight of 4. No integer is converted: a code's bits are
put under an exponent, which makes 128 + code of them, and the 128 is taken off two numbers at a
time; an e4m3 number is shifted into the place of a bf16 one, 2^120 times smaller than it is. A pair
is one word, its first number in the low bits. What codes mean: ``word_weight``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.gpu.device_functions import INTERPRETED


@triton.jit
def _rounded_pairs(low, high):
    """Two fp32 tensors whose numbers bf16 has exactly, as pairs."""
    low_bits = (low.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
    return low_bits | (high.to(tl.int32, bitcast=True) & -65536)


@triton.jit
def _low(pairs):
    return (pairs << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(pairs):
    return (pairs & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _less(pairs, others):
    """pairs - others, of each number."""
    if INTERPRETED:
        return _rounded_pairs(_low(pairs) - _low(others), _high(pairs) - _high(others))
    else:
        return tl.inline_asm_elementwise(
            "{.reg .b32 m; mov.b32 m, 0xBF80BF80; fma.rn.bf16x2 $0, $2, m, $1;}", "=r,r,r",
            [pairs, others], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _grown(pairs):
    """pairs * 2^120, of each number."""
    if INTERPRETED:
        return _rounded_pairs(
            _low(pairs) * 1.329227995784916e36, _high(pairs) * 1.329227995784916e36
        )
    else:
        return tl.inline_asm_elementwise(
            "{.reg .b32 m, z; mov.b32 m, 0x7B807B80; mov.b32 z, 0x80008000; "
            "fma.rn.bf16x2 $0, $1, m, z;}", "=r,r",
            [pairs], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _bytes_apart(words, HIGH: tl.constexpr, UP: tl.constexpr):
    """Two bytes of each word, the first or (HIGH) the last ones, a half word each; UP: in its high
    bits."""
    if INTERPRETED:
        both = (words >> 16) if HIGH else words
        apart = (both & 0xFF) | ((both & 0xFF00) << 8)
        return (apart << 8) if UP else apart
    elif HIGH:
        if UP:
            return tl.inline_asm_elementwise(
                "prmt.b32 $0, $1, 0, 0x3424;", "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1
            )
        else:
            return tl.inline_asm_elementwise(
                "prmt.b32 $0, $1, 0, 0x4342;", "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1
            )
    elif UP:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, 0x1404;", "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, 0x4140;", "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _under(words, MASK: tl.constexpr):
    """(words & MASK) | 0x43004300 in one instruction, which the compiler does not find by itself;
    MASK: 0x000F000F, 0x007F007F or 0x00800080."""
    if INTERPRETED:
        return (words & MASK) | 0x43004300
    elif MASK == 0x000F000F:
        return tl.inline_asm_elementwise(
            "{.reg .b32 m; mov.b32 m, 0x43004300; lop3.b32 $0, $1, 0x000F000F, m, 0xEA;}", "=r,r",
            [words], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    elif MASK == 0x007F007F:
        return tl.inline_asm_elementwise(
            "{.reg .b32 m; mov.b32 m, 0x43004300; lop3.b32 $0, $1, 0x007F007F, m, 0xEA;}", "=r,r",
            [words], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "{.reg .b32 m; mov.b32 m, 0x43004300; lop3.b32 $0, $1, 0x00800080, m, 0xEA;}", "=r,r",
            [words], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def nibble_pairs(words, zeros, PLACE: tl.constexpr):
    """The pair of codes in the bits 4 PLACE and 4 PLACE + 16 and above; zeros: pairs of 128 + what
    is the zero, of a shape that broadcasts with ``words``."""
    codes = _under(words >> (4 * PLACE), 0x000F000F)
    return _less(codes, tl.broadcast_to(zeros, words.shape))


@triton.jit
def int8_pairs(words, HIGH: tl.constexpr):
    """Two signed bytes of each word, the first or the last ones."""
    apart = _bytes_apart(words, HIGH, False)
    # 128 and the low seven bits, less 128 and, of a negative one, 128 more.
    return _less(_under(apart, 0x007F007F), _under(apart, 0x00800080))


@triton.jit
def e4m3_pairs(words, HIGH: tl.constexpr):
    """Two numbers in the format e4m3 of each word, the first or the last ones; not NaN."""
    apart = _bytes_apart(words, HIGH, True)
    return _grown(((apart >> 4) & 0x07F007F0) | (apart & -2147450880))


@triton.jit
def numbers_of(pairs):
    """Pairs [...] as bf16 [..., 2]; fp32 in the interpreter, which multiplies bf16 wrongly."""
    if INTERPRETED:
        return tl.join(_low(pairs), _high(pairs))
    else:
        first = pairs.to(tl.int16).to(tl.bfloat16, bitcast=True)
        second = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        return tl.join(first, second)
