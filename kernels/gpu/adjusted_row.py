"""A row's logits after bans, biases and penalties, wherever a kernel reads them.

Penalties and the mask of allowed tokens are cheap functions of what lies at the same place, so they
are computed at each reading, always by the same instructions. Only rows that ask for adjustments of
single tokens are read from where ``adjust_logits`` wrote them. Reference:
``penstock.kernels.sampling``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.gpu.sampler_memory import ASKS_ALLOWED, ASKS_PENALTIES, ASKS_WRITTEN
from penstock.kernels.sampling.choose import NOT_FINITE, NOTHING_LEFT

PENALTIES = tl.constexpr(ASKS_PENALTIES)
ALLOWED = tl.constexpr(ASKS_ALLOWED)
_WRITTEN = tl.constexpr(ASKS_WRITTEN)
_NOTHING_LEFT = tl.constexpr(NOTHING_LEFT)
_NOT_FINITE = tl.constexpr(NOT_FINITE)


@triton.jit
def is_written(ask):
    """Whether a row's logits are written anew."""
    return (ask & _WRITTEN) != 0


@triton.jit
def is_finite(total):
    """Whether a sum of logits is finite, which it is exactly if they are."""
    return (total == total) & (tl.abs(total) != float("inf"))


@triton.jit
def reason_of(source, first, end, SIZE: tl.constexpr):
    """Why logits ``first`` … ``end`` - 1 of a row are not finite once they are adjusted: as the
    model made them, or by the adjustments. They are read once more, which is seldom."""
    total = 0.0
    for start in range(first, end, SIZE):
        ids = start + tl.arange(0, SIZE)
        total += tl.sum(tl.load(source + ids, mask=ids < end, other=0.0).to(tl.float32), 0)
    return tl.where(is_finite(total), _NOTHING_LEFT, _NOT_FINITE)


@triton.jit
def penalised(z, count, repetition, inverse, frequency, presence):
    """count: of ``counts``, sign extended; inverse: 1 / repetition."""
    # The bits of 2^23 + count, which converts at a quarter of what a conversion costs.
    times = ((count & 0x7FFF) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    z = tl.where(count != 0, z * tl.where(z > 0.0, inverse, repetition), z)
    return tl.fma(-presence, tl.minimum(times, 1.0), tl.fma(-frequency, times, z))


@triton.jit
def adjusted_row(
    logits, adjusted, counts, allowed, repetition, frequency, presence, ask, row, slot, vocab,
    mask_words,
):  # fmt: skip
    """What ``load_adjusted`` reads a row from. row, slot: int64."""
    r = tl.load(repetition + slot)
    return (
        logits + row * vocab, adjusted + row * vocab, counts + slot * vocab,
        allowed + slot * mask_words, ask, r, 1.0 / r, tl.load(frequency + slot),
        tl.load(presence + slot),
    )  # fmt: skip


@triton.jit
def load_adjusted(asked, ids, mask):
    """fp32, -inf where masked. Without a branch: all that a row needs is under way at once."""
    source, adjusted, counts, allowed, ask, repetition, inverse, frequency, presence = asked
    written = is_written(ask)
    read = mask & (written == 0)
    raw = tl.load(source + ids, mask=read, other=float("-inf"))
    new = tl.load(adjusted + ids, mask=mask & written, other=float("-inf"))
    count = tl.load(counts + ids, mask=read & ((ask & PENALTIES) != 0), other=0)
    word = tl.load(allowed + ids // 32, mask=read & ((ask & ALLOWED) != 0), other=-1)
    z = penalised(raw.to(tl.float32), count.to(tl.int32), repetition, inverse, frequency, presence)
    z = tl.where(((word >> (ids % 32)) & 1) != 0, z, float("-inf"))
    return tl.where(written, new, z)
