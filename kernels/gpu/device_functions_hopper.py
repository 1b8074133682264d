"""Device functions that the Gluon kernels share, as ``device_functions`` for those in Triton.

References: ``penstock.kernels.rms_norm``, ``rotary``, ``attention`` and ``activation``. None uses a
constant of this module, since kernels that are compiled side by side call them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def rms_scale(square_sum, eps, WIDTH: gl.constexpr):
    """What an RMSNorm multiplies by, from the sum of the squares of ``WIDTH`` values."""
    return gl.rsqrt(square_sum / WIDTH + eps)


@gluon.jit
def rotated_halves(
    first, second, weight, half, c, s, eps,
    HALF: gl.constexpr, NORM: gl.constexpr, AXIS: gl.constexpr,
):  # fmt: skip
    """Halves of heads along ``AXIS``, normed if asked and rotated."""
    if NORM:
        square_sum = gl.sum(first * first, AXIS) + gl.sum(second * second, AXIS)
        factor = rms_scale(square_sum, eps, 2 * HALF)
        first_weight = gl.load(weight + half).to(gl.float32)
        second_weight = gl.load(weight + HALF + half).to(gl.float32)
        if AXIS == 1:
            factor = factor[:, None]
            first_weight = first_weight[None, :]
            second_weight = second_weight[None, :]
        first = first * factor * first_weight
        second = second * factor * second_weight
    return first * c - second * s, second * c + first * s


@gluon.jit
def softmax_step(score, row_max, row_sum, scale, AXIS: gl.constexpr):
    """One step of the online softmax (Milakov and Gimelshein, 2018).

    score: fp32, keys along ``AXIS``; scaled in the exponent: one fused operation for each score.
    row_max (binary logarithm), row_sum: of what came before. Returns both with these keys, the
    factor of what was summed before, and the weights of the keys.
    """
    new_max = gl.maximum(row_max, gl.max(score, AXIS) * scale)
    weight = gl.exp2(score * scale - new_max.expand_dims(AXIS))
    decay = gl.exp2(row_max - new_max)
    row_sum = row_sum * decay + gl.sum(weight, AXIS)
    return new_max, row_sum, decay, weight


@gluon.jit
def activated(gate, up, GELU: gl.constexpr):
    """SiLU(gate) * up, or GELU(gate) * up with the tanh form of GELU; fp32."""
    if GELU:
        # 2 sqrt(2 / pi) (x + 0.044715 x³)
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    else:
        slope = gate
    return gate / (1.0 + gl.exp(-slope)) * up
