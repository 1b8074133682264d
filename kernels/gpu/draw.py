"""Choosing the next token of every row, and advancing the slots.

The rule is that of ``penstock.kernels.sampling``: the highest logit, or Gumbel-max over logits /
temperature with noise that is a hash of (seed, choice, output position, token). The vocabulary is
cut into stretches, so that few rows fill the GPU too; each logit is read once. The second kernel
takes the best of the stretches, writes the token for the host, and makes it the slot's last token.

Behind ``adjust_logits`` and ``keep_floor`` the adjusted logits of a row are read instead, and of a
row with a floor only the blocks that reach it. Other rows are drawn by the same instructions as
without, so from the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.early_launch import EARLY, begin_early
from penstock.kernels.gpu.keep_floor import load_logits
from penstock.kernels.gpu.sampler_memory import (
    GROUP,
    STRETCH,
    SamplerSlots,
    SamplerSpace,
    groups_of,
    stretches_of,
)

_BLOCK = 1024
_WIDE_BLOCK = 4096
_LEAST_PADDED = 64
"""One kernel commits whatever the number of stretches."""
_PROGRAMS = 264
"""Two for each multiprocessor of an H200: a plain draw cuts rows into no more stretches than that
needs. Within a stretch most tokens are passed by: the longer it is, the more."""
_LEAST = tl.constexpr(-3.0e38)
"""A token that is kept is better than one that is not, whatever its noise."""


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
def _noise(ids, key_low, key_high):
    """log(e) of ``penstock.kernels.sampling.gumbel``."""
    return _log_exponential(_hash(ids, key_low, key_high))


@triton.jit
def _hash(ids, key_low, key_high):
    return _lowbias32(ids.to(tl.uint32) * (key_high | 1) + key_low)


@triton.jit
def _log_exponential(h):
    v = (h.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    return tl.log(_minus_log1p_of_minus(v))


@triton.jit
def _may_win(value, top, h):
    """Whether any token of a block may be drawn, where ``top`` is reached already.

    value - log(e) > top needs e < exp(value - top), and e = -log1p(-v) is never below v, nor v
    below its first 23 bits: an exponential in place of two logarithms and a division. The margin is
    far above the rounding errors of either.
    """
    low = ((h >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    reach = tl.exp2((value - top) * 1.4426950408889634 + 0.002)
    return tl.max((low <= reach).to(tl.int32), 0) > 0


@triton.jit
def _plain_stretch(
    source, first, end, scale, drawn, key_low, key_high, BLOCK: tl.constexpr
):  # fmt: skip
    """By lane, the best of a stretch, its token, and a sum that says whether all is finite."""
    top = float("-inf")
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.full([BLOCK], 0, tl.int32) + first
    finite_sum = tl.zeros([BLOCK], tl.float32)
    for start in range(first, end, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        inside = ids < end
        value = tl.load(source + ids, mask=inside, other=float("-inf")).to(tl.float32)
        finite_sum += tl.where(inside, value, 0.0)
        value *= scale
        if drawn:
            h = _hash(ids, key_low, key_high)
            if _may_win(value, top, h):
                value -= _log_exponential(h)
                better = value > highest
                highest = tl.where(better, value, highest)
                where = tl.where(better, ids, where)
                top = tl.max(highest, 0)
        else:
            better = value > highest
            highest = tl.where(better, value, highest)
            where = tl.where(better, ids, where)
    return highest, where, finite_sum


@triton.jit
def _limited_stretch(
    source, adjusted, is_adjusted, maxima, bad, floor, first, vocab, groups, scale, drawn,
    key_low, key_high, BLOCK: tl.constexpr, STRETCH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The same of a row that is adjusted or has a floor; bad: whether all is finite is known."""
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.full([BLOCK], 0, tl.int32) + first
    finite_sum = tl.zeros([BLOCK], tl.float32) + tl.where(bad != 0, float("inf"), 0.0)
    for start in range(first, tl.minimum(first + STRETCH, vocab), BLOCK):
        near = floor == float("-inf")
        if near == 0:
            group = start // GROUP + tl.arange(0, BLOCK // GROUP)
            tops = tl.load(maxima + group, mask=group < groups, other=float("-inf"))
            near = tl.max(tops, 0) >= floor
        if near:
            ids = start + tl.arange(0, BLOCK)
            value = load_logits(source, adjusted, is_adjusted, ids, ids < vocab)
            kept = (value >= floor) & (value > float("-inf"))
            value *= scale
            if drawn:
                value -= _noise(ids, key_low, key_high)
            value = tl.maximum(value, _LEAST)
            better = kept & (value > highest)
            highest = tl.where(better, value, highest)
            where = tl.where(better, ids, where)
    return highest, where, finite_sum


@triton.jit(do_not_specialize=["stretches"])
def _best_kernel(
    logits, rows, temperature, seed_low, seed_high, num_output, best, token, asks, adjusted,
    group_max, bad, floors, vocab, stretches, stretch_length, groups, greedy_below,
    BLOCK: tl.constexpr, STRETCH: tl.constexpr, GROUP: tl.constexpr, LIMITS: tl.constexpr,
    EARLY: tl.constexpr,
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
    first = stretch * stretch_length
    end = tl.minimum(first + stretch_length, vocab)
    at = row * stretches + stretch
    if LIMITS:
        is_adjusted = tl.load(asks + slot) != 0
        floor = tl.load(floors + row)
        if is_adjusted | (floor > float("-inf")):
            highest, where, finite_sum = _limited_stretch(
                source, adjusted + row.to(tl.int64) * vocab, is_adjusted,
                group_max + row.to(tl.int64) * groups, tl.load(bad + at), floor, first, vocab,
                groups, scale, drawn, key_low, key_high, BLOCK, STRETCH, GROUP,
            )  # fmt: skip
        else:
            highest, where, finite_sum = _plain_stretch(
                source, first, end, scale, drawn, key_low, key_high, BLOCK
            )
    else:
        highest, where, finite_sum = _plain_stretch(
            source, first, end, scale, drawn, key_low, key_high, BLOCK
        )
    top = tl.max(highest, 0)
    found = tl.min(tl.where(highest == top, where, 0x7FFFFFFF), 0)
    total = tl.sum(finite_sum, 0)
    finite = (total == total) & (tl.abs(total) != float("inf"))
    tl.store(best + at, top)
    tl.store(token + at, tl.where(finite, found, found | 0x40000000))


@triton.jit(do_not_specialize=["stretches"])
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
    # Where every token is banned, nothing is the best.
    bad = tl.where(tl.max(value, 0) == float("-inf"), 1, bad)
    ids = found & 0x3FFFFFFF
    top = tl.max(value, 0)
    chosen = tl.min(tl.where(inside & (value == top), ids, 0x3FFFFFFF), 0)
    chosen = tl.where(chosen == 0x3FFFFFFF, 0, chosen)
    tl.store(result + row, chosen)
    tl.store(result + max_rows + row, bad)
    tl.store(last_token + slot, chosen)
    tl.store(num_output + slot, tl.load(num_output + slot) + 1)
    tl.store(position + slot, tl.load(position + slot) + 1)


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
    slots: SamplerSlots | None = None,
    space: SamplerSpace | None = None,
) -> int:
    """The best token of each stretch of each row. Returns the number of stretches of a row.

    logits: [N, V] contiguous; rows: [N] int32, the slot of each row, -1: none. By slot:
    temperature fp32; seed_low and seed_high, the words of splitmix64 over (seed, choice), and
    num_output, int32. best: fp32, token: int32, each at least N * ``stretches_of(V)``; bit 30 of
    a token says that its stretch held a number that is not finite. slots, space: as they were
    given to ``adjust_logits`` and ``keep_floor`` before; ``None`` if no row asks for either.
    """
    count, vocab = logits.shape
    most = stretches_of(vocab)
    wanted = most if space is not None else max(1, min(most, _PROGRAMS // count))
    length = triton.cdiv(most, wanted) * STRETCH
    stretches = triton.cdiv(vocab, length)
    block, warps = (_BLOCK, 4) if wanted == most else (_WIDE_BLOCK, 8)
    _best_kernel[(count, stretches)](
        logits, rows, temperature, seed_low, seed_high, num_output, best, token,
        None if slots is None else slots.asks, None if space is None else space.adjusted,
        None if space is None else space.group_max, None if space is None else space.bad,
        None if space is None else space.floor, vocab, stretches, length, groups_of(vocab),
        greedy_below, block, STRETCH, GROUP, space is not None, EARLY, num_warps=warps,
        launch_pdl=EARLY,
    )  # fmt: skip
    return stretches


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
    the row was not finite or has no token left. Rows with slot -1 are left alone.
    """
    _commit_kernel[(count,)](
        best, token, rows, last_token, position, num_output, result, stretches, result.shape[1],
        max(_LEAST_PADDED, triton.next_power_of_2(stretches)), EARLY, num_warps=1, launch_pdl=EARLY,
    )  # fmt: skip
