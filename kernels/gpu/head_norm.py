"""Device functions that several kernels share: norm and rotation of heads, the right dot, scores,
a step of the online softmax."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


class Scores(NamedTuple):
    """How a layer's scores are made: see ``specification.Attention``."""

    scale: float
    window: int = 0
    softcap: float = 0.0

    @property
    def in_binary(self) -> tuple[float, float]:
        """Scale and soft cap times log2(e)."""
        return self.scale * LOG2_E, self.softcap * LOG2_E


LOG2_E = 1.4426950408889634
LOWEST = tl.constexpr(-1e30)
"""The highest of no scores where a row may see nothing of a tile: finite, so that the weight of a
hidden key is 0."""
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""The interpreter multiplies bf16 operands wrongly; there they are widened first."""


@triton.jit
def dot(a, b):
    """a @ b, accumulated in fp32; fp32 operands are not rounded to tf32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        return tl.dot(a, b, input_precision="ieee")


@triton.jit
def weighted(score, value, top, total, mixed, scale):
    """One step of the online softmax (Milakov and Gimelshein, 2018).

    score: [Q, K] fp32, not scaled; value: [K, D]; top (binary logarithm), total: [Q] and mixed:
    [Q, D] fp32, what came before. Returns the three with these keys.
    """
    # The scale in the exponent: one fused operation for each score.
    highest = tl.maximum(top, tl.max(score, 1) * scale)
    weight = tl.exp2(score * scale - highest[:, None])
    decay = tl.exp2(top - highest)
    total = total * decay + tl.sum(weight, 1)
    mixed = mixed * decay[:, None] + dot(weight.to(value.dtype), value)
    return highest, total, mixed


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
def turned_head(source, cos, sin, weight, position, eps, HALF: tl.constexpr, NORM: tl.constexpr):
    """One head of ``2 * HALF`` values: normed if asked, rotated; its halves in fp32."""
    half = tl.arange(0, HALF)
    first = tl.load(source + half).to(tl.float32)
    second = tl.load(source + HALF + half).to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / (2 * HALF) + eps)
        first *= scale * tl.load(weight + half).to(tl.float32)
        second *= scale * tl.load(weight + HALF + half).to(tl.float32)
    angle = position.to(tl.int64) * HALF + half
    c = tl.load(cos + angle)
    s = tl.load(sin + angle)
    return first * c - second * s, second * c + first * s


@triton.jit
def turned_heads(
    source, count, cos, sin, weight, position, eps,
    ROWS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """``count`` heads that follow each other, as [ROWS, HALF] twice; rows past them are 0."""
    half = tl.arange(0, HALF)[None, :]
    row = tl.arange(0, ROWS)[:, None]
    inside = row < count
    first = tl.load(source + row * 2 * HALF + half, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + row * 2 * HALF + HALF + half, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        total = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = tl.rsqrt(total / (2 * HALF) + eps)[:, None]
        first *= scale * tl.load(weight + half).to(tl.float32)
        second *= scale * tl.load(weight + HALF + half).to(tl.float32)
    angle = position.to(tl.int64) * HALF + half
    c = tl.load(cos + angle)
    s = tl.load(sin + angle)
    return first * c - second * s, second * c + first * s
