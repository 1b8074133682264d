"""Codes of quantized weights as pairs of bf16 or (HALF) fp16 numbers, exactly, in two to five
instructions a pair.

Words of 32 bits hold four codes of 8 bits or eight of 4. No integer is converted: a code's bits are
put under an exponent, which makes 128 + code of them, of fp16 1024 + code, and that is taken off
two numbers at a time; an e4m3 number is shifted into the place of another one, which is 2^120 times
smaller than it, of fp16 2^8 times. A pair is one word, its first number in the low bits. What codes
mean: ``word_weight``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.gpu.device_functions import INTERPRETED


@triton.jit
def _rounded_pairs(low, high, HALF: tl.constexpr):
    """Two fp32 tensors of numbers that the type has exactly, as pairs."""
    if HALF:
        low = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return low | (high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        low = (low.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
        return low | (high.to(tl.int32, bitcast=True) & -65536)


@triton.jit
def _low(pairs, HALF: tl.constexpr):
    if HALF:
        return pairs.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return (pairs << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(pairs, HALF: tl.constexpr):
    if HALF:
        return (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return (pairs & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _less(pairs, others, HALF: tl.constexpr):
    """pairs - others, of each number."""
    if INTERPRETED:
        low = _low(pairs, HALF) - _low(others, HALF)
        return _rounded_pairs(low, _high(pairs, HALF) - _high(others, HALF), HALF)
    elif HALF:
        return tl.inline_asm_elementwise(
            "{.reg .b32 m; mov.b32 m, 0xBC00BC00; fma.rn.f16x2 $0, $2, m, $1;}", "=r,r,r",
            [pairs, others], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "{.reg .b32 m; mov.b32 m, 0xBF80BF80; fma.rn.bf16x2 $0, $2, m, $1;}", "=r,r,r",
            [pairs, others], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _grown(pairs, HALF: tl.constexpr):
    """pairs * 2^120, or 2^8, of each number."""
    if INTERPRETED:
        TIMES: tl.constexpr = 256.0 if HALF else 1.329227995784916e36
        return _rounded_pairs(_low(pairs, HALF) * TIMES, _high(pairs, HALF) * TIMES, HALF)
    elif HALF:
        return tl.inline_asm_elementwise(
            "{.reg .b32 m, z; mov.b32 m, 0x5C005C00; mov.b32 z, 0x80008000; "
            "fma.rn.f16x2 $0, $1, m, z;}", "=r,r",
            [pairs], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
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
def _under(words, MASK: tl.constexpr, HALF: tl.constexpr):
    """(words & MASK) | 0x43004300, or 0x64006400, in one instruction, which the compiler does not
    find by itself; MASK: 0x000F000F, 0x007F007F or 0x00800080."""
    if INTERPRETED:
        return (words & MASK) | (0x64006400 if HALF else 0x43004300)
    elif HALF:
        return _under_half(words, MASK)
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
def _under_half(words, MASK: tl.constexpr):
    if MASK == 0x000F000F:
        return tl.inline_asm_elementwise(
            "{.reg .b32 m; mov.b32 m, 0x64006400; lop3.b32 $0, $1, 0x000F000F, m, 0xEA;}", "=r,r",
            [words], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    elif MASK == 0x007F007F:
        return tl.inline_asm_elementwise(
            "{.reg .b32 m; mov.b32 m, 0x64006400; lop3.b32 $0, $1, 0x007F007F, m, 0xEA;}", "=r,r",
            [words], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "{.reg .b32 m; mov.b32 m, 0x64006400; lop3.b32 $0, $1, 0x00800080, m, 0xEA;}", "=r,r",
            [words], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def zero_pairs(zeros, HALF: tl.constexpr):
    """int32 zeros as ``nibble_pairs`` takes them."""
    return (zeros | (zeros << 16)) + (0x64006400 if HALF else 0x43004300)


@triton.jit
def nibble_pairs(words, zeros, PLACE: tl.constexpr, HALF: tl.constexpr):
    """The pair of codes in the bits 4 PLACE and 4 PLACE + 16 and above; zeros: ``zero_pairs``, of a
    shape that broadcasts with ``words``."""
    codes = _under(words >> (4 * PLACE), 0x000F000F, HALF)
    return _less(codes, tl.broadcast_to(zeros, words.shape), HALF)


@triton.jit
def int8_pairs(words, HIGH: tl.constexpr, HALF: tl.constexpr):
    """Two signed bytes of each word, the first or the last ones."""
    apart = _bytes_apart(words, HIGH, False)
    # What is under the exponent and the low seven bits, less it and, of a negative one, 128 more.
    return _less(_under(apart, 0x007F007F, HALF), _under(apart, 0x00800080, HALF), HALF)


@triton.jit
def e4m3_pairs(words, HIGH: tl.constexpr, HALF: tl.constexpr):
    """Two numbers in the format e4m3 of each word, the first or the last ones; not NaN."""
    apart = _bytes_apart(words, HIGH, True)
    if HALF:
        placed = (apart >> 1) & 0x3F803F80
    else:
        placed = (apart >> 4) & 0x07F007F0
    return _grown(placed | (apart & -2147450880), HALF)


@triton.jit
def numbers_of(pairs, HALF: tl.constexpr):
    """Pairs [...] as numbers [..., 2]; fp32 in the interpreter, which multiplies bf16 wrongly."""
    if INTERPRETED:
        return tl.join(_low(pairs, HALF), _high(pairs, HALF))
    else:
        TYPE: tl.constexpr = tl.float16 if HALF else tl.bfloat16
        first = pairs.to(tl.int16).to(TYPE, bitcast=True)
        second = (pairs >> 16).to(tl.int16).to(TYPE, bitcast=True)
        return tl.join(first, second)
