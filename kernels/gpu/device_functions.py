"""Device functions that the Triton kernels share: norm, rotary embedding, products, online softmax,
activations. Gluon kernels have theirs in ``device_functions_hopper``.

References: ``penstock.kernels.rms_norm``, ``rotary``, ``attention`` and ``activation``.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)
"""The highest of no scores where a row may see nothing of a tile: finite, so that the weight of a
hidden key is 0."""
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""The interpreter multiplies bf16 operands wrongly; there they are widened first."""
_IEEE = tl.constexpr("ieee")
"""Triton 3.6 takes no plain string for a constant that a caller leaves out."""


@triton.jit
def rms_scale(square_sum, eps, WIDTH: tl.constexpr):
    """What an RMSNorm multiplies by, from the sum of the squares of ``WIDTH`` values."""
    return tl.rsqrt(square_sum / WIDTH + eps)


@triton.jit
def rms_normed(value, weight, eps, WIDTH: tl.constexpr):
    """A row of ``WIDTH`` values in fp32, zeros behind them, normed; weight: likewise."""
    scale = rms_scale(tl.sum(value * value, 0), eps, WIDTH)
    return value * scale * weight


@triton.jit
def within(mask, index, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """The mask, of a shape that broadcasts with ``index``, where ``index`` is below ``SIZE``;
    unchanged if nothing is filled up: no load pays for it then."""
    if SIZE == PADDED:
        return mask
    else:
        return mask & (index < SIZE)


@triton.jit
def _normed_halves(
    first, second, weight, half, eps,
    HALF: tl.constexpr, PADDED: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """Halves of heads along ``AXIS``, zeros behind them, normed."""
    square_sum = tl.sum(first * first, AXIS) + tl.sum(second * second, AXIS)
    scale = rms_scale(square_sum, eps, 2 * HALF)
    if AXIS == 1:
        scale = scale[:, None]
    if HALF == PADDED:
        first_factor = tl.load(weight + half)
        second_factor = tl.load(weight + HALF + half)
    else:
        inside = half < HALF
        first_factor = tl.load(weight + half, mask=inside, other=0.0)
        second_factor = tl.load(weight + HALF + half, mask=inside, other=0.0)
    first *= scale * first_factor.to(tl.float32)
    second *= scale * second_factor.to(tl.float32)
    return first, second


@triton.jit
def _rotated(first, second, c, s):
    """Halves of heads, rotated by the angles of these cosines and sines."""
    return first * c - second * s, second * c + first * s


@triton.jit
def rotated_head(
    source, cos, sin, weight, position, eps,
    HALF: tl.constexpr, PADDED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """One head, as a row of ``rotated_heads``."""
    half = tl.arange(0, PADDED)
    angle = position.to(tl.int64) * HALF + half
    if HALF == PADDED:
        first = tl.load(source + half).to(tl.float32)
        second = tl.load(source + HALF + half).to(tl.float32)
        c = tl.load(cos + angle)
        s = tl.load(sin + angle)
    else:
        inside = half < HALF
        first = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source + HALF + half, mask=inside, other=0.0).to(tl.float32)
        c = tl.load(cos + angle, mask=inside, other=0.0)
        s = tl.load(sin + angle, mask=inside, other=0.0)
    if NORM:
        first, second = _normed_halves(first, second, weight, half, eps, HALF, PADDED, 0)
    return _rotated(first, second, c, s)


@triton.jit
def rotated_heads(
    source, count, cos, sin, weight, position, eps,
    ROWS: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """``count`` heads of ``2 * HALF`` values that follow each other, normed if asked and rotated,
    as [ROWS, PADDED] twice, fp32; rows past them and columns past ``HALF`` are 0."""
    half = tl.arange(0, PADDED)[None, :]
    row = tl.arange(0, ROWS)[:, None]
    inside = within(row < count, half, HALF, PADDED)
    source = source + row * 2 * HALF
    first = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + half, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        first, second = _normed_halves(first, second, weight, half, eps, HALF, PADDED, 1)
    angle = position.to(tl.int64) * HALF + half
    if HALF == PADDED:
        return _rotated(first, second, tl.load(cos + angle), tl.load(sin + angle))
    else:
        c = tl.load(cos + angle, mask=half < HALF, other=0.0)
        s = tl.load(sin + angle, mask=half < HALF, other=0.0)
        return _rotated(first, second, c, s)


@triton.jit
def rotated_queries(
    source, cos, sin, weight, position, inside, eps,
    HALF: tl.constexpr, PADDED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Heads at ``source`` [Q, 1], each at its position; halves [Q, PADDED], fp32; where not
    ``inside`` 0."""
    half = tl.arange(0, PADDED)[None, :]
    inside = within(inside, half, HALF, PADDED)
    first = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + half, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        first, second = _normed_halves(first, second, weight, half, eps, HALF, PADDED, 1)
    angle = position.to(tl.int64)[:, None] * HALF + half
    c = tl.load(cos + angle, mask=inside, other=0.0)
    s = tl.load(sin + angle, mask=inside, other=0.0)
    return _rotated(first, second, c, s)


@triton.jit
def dot(a, b, PRECISION: tl.constexpr = _IEEE):
    """a @ b, accumulated in fp32; fp32 operands are not rounded to tf32. PRECISION: of their
    products, ``ieee``, or ``tf32x3``: by tensor cores, to a few units in the last place."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def softmax_step(
    score, value, row_max, row_sum, accumulator, scale, value_scale=None,
    PRECISION: tl.constexpr = _IEEE,
):  # fmt: skip
    """One step of the online softmax (Milakov and Gimelshein, 2018).

    score: [Q, K] fp32, not scaled; value: [K, D]; row_max (binary logarithm), row_sum: [Q] and
    accumulator, the weighted sums of values: [Q, D] fp32, what came before; value_scale: [K] fp32
    that values are to be multiplied by; PRECISION: see ``dot``. Returns the three with these keys.
    """
    # The scale in the exponent: one fused operation for each score.
    new_max = tl.maximum(row_max, tl.max(score, 1) * scale)
    weight = tl.exp2(score * scale - new_max[:, None])
    decay = tl.exp2(row_max - new_max)
    row_sum = row_sum * decay + tl.sum(weight, 1)
    if value_scale is not None:
        weight = weight * value_scale[None, :]
    weight = weight.to(value.dtype)
    accumulator = accumulator * decay[:, None] + dot(weight, value, PRECISION)
    return new_max, row_sum, accumulator


@triton.jit
def first_seen(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first position that a row at ``position`` sees, with a window, chunks, or both."""
    if CHUNK == 0:
        return tl.maximum(position + 1 - WINDOW, 0)
    elif WINDOW == 0:
        return position // CHUNK * CHUNK
    else:
        return tl.maximum(position + 1 - WINDOW, position // CHUNK * CHUNK)


@triton.jit
def count_below(numbers, most, bound, BITS: tl.constexpr):
    """How many of ``most`` numbers, ascending, are below ``bound``; BITS: the bits of ``most``."""
    found = 0
    for bit in tl.static_range(BITS):
        step = 1 << (BITS - 1 - bit)
        inside = found + step <= most
        number = tl.load(numbers + found + step - 1, mask=inside, other=0)
        found = tl.where(inside & (number < bound), found + step, found)
    return found


@triton.jit
def with_sink(sink, row_max, row_sum, accumulator):
    """Rows of the online softmax with one more score, which stands for no value.

    sink: [Q] or one for all, not in units of the binary logarithm, as row_max is.
    """
    score = sink.to(tl.float32) * 1.4426950408889634
    new_max = tl.maximum(row_max, score)
    decay = tl.exp2(row_max - new_max)
    row_sum = row_sum * decay + tl.exp2(score - new_max)
    return new_max, row_sum, accumulator * decay[:, None]


@triton.jit
def capped(score, scale, CAP: tl.constexpr):
    """Scores times ``scale``; with a soft cap CAP * tanh(score * scale / CAP). Both in units of the
    binary logarithm: scale and CAP are multiplied by log2(e) already."""
    if CAP != 0.0:
        # tanh(x) = 1 - 2 / (1 + exp(2 x))
        return CAP - 2 * CAP / (1.0 + tl.exp(2.0 * score * (scale / CAP)))
    else:
        return score * scale


@triton.jit
def silu_and_mul(gate, up):
    """SiLU(gate) * up, fp32."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def gelu_tanh_and_mul(gate, up):
    """GELU(gate) * up with the tanh form of GELU, fp32."""
    # 2 sqrt(2 / pi) (x + 0.044715 x³)
    slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-slope)) * up


@triton.jit
def banded_tile(
    rows, columns, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BAND: tl.constexpr
):
    """Rows [BLOCK_ROWS] and columns [BLOCK_COLUMNS] of a product that this program computes:
    ``BAND`` tiles of rows with one tile of columns before the next one's turn."""
    row_tiles = tl.cdiv(rows, BLOCK_ROWS)
    column_tiles = tl.cdiv(columns, BLOCK_COLUMNS)
    at = tl.program_id(0)
    band = at // (BAND * column_tiles)
    height = tl.minimum(row_tiles - band * BAND, BAND)
    row_tile = band * BAND + at % (BAND * column_tiles) % height
    column_tile = at % (BAND * column_tiles) // height
    row = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = column_tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    return row, column
