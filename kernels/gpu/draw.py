"""Choosing the next token of greedy and of plainly drawn rows, and advancing the slots.

The rule is that of ``penstock.kernels.sampling``: the highest logit, or Gumbel-max over logits /
temperature with noise that is a hash of (seed, choice, output position, token). The vocabulary is
cut into stretches, so that few rows fill the GPU too; each logit is read once. The second kernel
takes the best of the stretches, writes the token for the host, and makes it the slot's last token.
Rows with top-k or top-p are decided by the reference, and ``commit`` advances their slots.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.early_launch import EARLY, begin_early

_BLOCK = 1024
_STRETCH = 4096


@triton.jit
def _lowbias32(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def _splitmix64(z):
    """As ``penstock.kernels.draw_keys`` mixes; uint64."""
    z += 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _minus_log1p_of_minus(v):
    """-log1p(-v), exact for small v too (Kahan's correction of the rounding of 1 - v)."""
    u = 1.0 - v
    return tl.where(u == 1.0, v, tl.log(u) * v / (u - 1.0))


@triton.jit
def _best_kernel(
    logits, rows, temperature, seed_low, seed_high, num_output, best, token, vocab, stretches,
    greedy_below,
    BLOCK: tl.constexpr, STRETCH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin_early(EARLY)
    row = tl.program_id(0)
    stretch = tl.program_id(1)
    slot = tl.load(rows + row)
    if slot < 0:
        return
    warmth = tl.load(temperature + slot)
    drawn = warmth >= greedy_below
    low = tl.load(seed_low + slot).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(seed_high + slot).to(tl.uint32, bitcast=True).to(tl.uint64)
    count = tl.load(num_output + slot).to(tl.uint64)
    key = _splitmix64(((high << 32) | low) ^ count)
    key_low = (key & 0xFFFFFFFF).to(tl.uint32)
    key_high = (key >> 32).to(tl.uint32)
    scale = tl.where(drawn, 1.0 / tl.maximum(warmth, greedy_below), 1.0)
    source = logits + row.to(tl.int64) * vocab
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.full([BLOCK], 0, tl.int32) + stretch * STRETCH
    finite_sum = tl.zeros([BLOCK], tl.float32)
    for start in range(stretch * STRETCH, tl.minimum(stretch * STRETCH + STRETCH, vocab), BLOCK):
        ids = start + tl.arange(0, BLOCK)
        inside = ids < vocab
        value = tl.load(source + ids, mask=inside, other=float("-inf")).to(tl.float32)
        finite_sum += tl.where(inside, value, 0.0)
        value *= scale
        if drawn:
            h = _lowbias32(ids.to(tl.uint32) ^ key_low)
            h = _lowbias32(h + key_high)
            v = (h.to(tl.float32) + 0.5) * 2.3283064365386963e-10
            value -= tl.log(_minus_log1p_of_minus(v))
        better = inside & (value > highest)
        highest = tl.where(better, value, highest)
        where = tl.where(better, ids, where)
    top = tl.max(highest, 0)
    first = tl.min(tl.where(highest == top, where, 0x7FFFFFFF), 0)
    total = tl.sum(finite_sum, 0)
    finite = (total == total) & (tl.abs(total) != float("inf"))
    at = row * stretches + stretch
    tl.store(best + at, top)
    tl.store(token + at, tl.where(finite, first, first | 0x40000000))


@triton.jit
def _commit_kernel(
    best, token, rows, last_token, position, num_output, result, stretches, max_rows,
    PADDED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin_early(EARLY)
    row = tl.program_id(0)
    slot = tl.load(rows + row)
    if slot < 0:
        return
    stretch = tl.arange(0, PADDED)
    inside = stretch < stretches
    value = tl.load(best + row * stretches + stretch, mask=inside, other=float("-inf"))
    found = tl.load(token + row * stretches + stretch, mask=inside, other=0)
    bad = tl.max(tl.where(inside, found >> 30, 0), 0)
    ids = found & 0x3FFFFFFF
    top = tl.max(value, 0)
    chosen = tl.min(tl.where(inside & (value == top), ids, 0x3FFFFFFF), 0)
    chosen = tl.where(chosen == 0x3FFFFFFF, 0, chosen)
    tl.store(result + row, chosen)
    tl.store(result + max_rows + row, bad)
    tl.store(last_token + slot, chosen)
    tl.store(num_output + slot, tl.load(num_output + slot) + 1)
    tl.store(position + slot, tl.load(position + slot) + 1)


def stretches_of(vocab: int) -> int:
    """Stretches that a vocabulary is cut into."""
    return triton.cdiv(vocab, _STRETCH)


def draw(
    logits: Tensor,
    rows: Tensor,
    temperature: Tensor,
    seed_low: Tensor,
    seed_high: Tensor,
    num_output: Tensor,
    best: Tensor,
    token: Tensor,
    greedy_below: float,
) -> None:
    """The best token of each stretch of each row.

    logits: [N, V] contiguous; rows: [N] int32, the slot of each row, -1: none. By slot:
    temperature fp32; seed_low and seed_high, the words of splitmix64 over (seed, choice), and
    num_output, int32. best: fp32, token: int32, each at least N * ``stretches_of(V)``; bit 30 of
    a token says that its stretch held a number that is not finite.
    """
    count, vocab = logits.shape
    stretches = stretches_of(vocab)
    _best_kernel[(count, stretches)](
        logits, rows, temperature, seed_low, seed_high, num_output, best, token, vocab, stretches,
        greedy_below, _BLOCK, _STRETCH, EARLY, num_warps=4, launch_pdl=EARLY,
    )  # fmt: skip


def commit(
    best: Tensor,
    token: Tensor,
    rows: Tensor,
    last_token: Tensor,
    position: Tensor,
    num_output: Tensor,
    result: Tensor,
    count: int,
    stretches: int,
) -> None:
    """Take the best of a row's stretches and advance its slot by one position and one output.

    best, token: [count * stretches], from ``draw``; result: [2, R] int32: tokens, and whether
    the row was not finite. Rows with slot -1 are left alone.
    """
    _commit_kernel[(count,)](
        best, token, rows, last_token, position, num_output, result, stretches, result.shape[1],
        triton.next_power_of_2(stretches), EARLY, num_warps=1, launch_pdl=EARLY,
    )  # fmt: skip
