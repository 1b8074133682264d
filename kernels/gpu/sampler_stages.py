"""Samplers of rows that ask for more than a temperature and limits: one program a row.

The rules and their order are those of ``penstock.kernels.sampling.samplers`` and ``stages``. A
row's logits lie in ``SamplerSpace.adjusted`` after bans, biases and penalties; each stage reads
them in a few passes and writes what it changes, so that ``draw`` finds the row as if the model had
given it.

- A *floor*, the lowest logit that is kept, follows from sums over the row: top-a, min-p, eta,
  epsilon, n-sigma, Mirostat.
- A *threshold* is found by halving: the highest key such that those from it on are enough, by
  number (top-k) or by weight (top-p, typical). Eight keys are tried in a pass, so 11 passes find it
  exactly, whatever ties.
- Tail-free sampling needs the row in order: ``stages_until`` stops ahead of it, torch sorts, and
  ``stages_after`` goes on.

Sums are fp32, by a tree whose order depends on the vocabulary alone; those of skew are fp64.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.early_launch import EARLY, begin_early
from penstock.kernels.gpu.gumbel import coin_of, draw_key
from penstock.kernels.gpu.keep_floor import key_of, number_of
from penstock.kernels.gpu.sampler_memory import (
    ASKS_STAGES,
    MOST_STAGES,
    STAGE_NUMBERS,
    SamplerSlots,
    SamplerSpace,
)
from penstock.kernels.sampling.samplers import SAMPLERS

_BLOCK = 4096
"""Logits that a pass reads at once."""
_STEP_BLOCK = 512
"""Logits that are compared with eight keys at once."""
_STAGES = tl.constexpr(ASKS_STAGES)
_LN2 = tl.constexpr(0.6931471805599453)
_BY_NUMBER = tl.constexpr(0)
_BY_WEIGHT = tl.constexpr(1)
_BY_DISTANCE = tl.constexpr(2)
"""What a threshold is sought by: logits, each counting one; logits, by weight; or how close -ln p
is to the entropy, by weight."""
_TEMPERATURE = tl.constexpr(SAMPLERS["temperature"].number)
_DYNAMIC = tl.constexpr(SAMPLERS["dynamic_temperature"].number)
_NSIGMA = tl.constexpr(SAMPLERS["nsigma"].number)
_TOP_A = tl.constexpr(SAMPLERS["top_a"].number)
_MIN_P = tl.constexpr(SAMPLERS["min_p"].number)
_TFS = tl.constexpr(SAMPLERS["tfs"].number)
_ETA = tl.constexpr(SAMPLERS["eta_cutoff"].number)
_EPSILON = tl.constexpr(SAMPLERS["epsilon_cutoff"].number)
_TYPICAL = tl.constexpr(SAMPLERS["typical_p"].number)
_SMOOTHING = tl.constexpr(SAMPLERS["smoothing"].number)
_XTC = tl.constexpr(SAMPLERS["xtc"].number)
_SKEW = tl.constexpr(SAMPLERS["skew"].number)
_TOP_K = tl.constexpr(SAMPLERS["top_k"].number)
_TOP_P = tl.constexpr(SAMPLERS["top_p"].number)
_MIROSTAT = tl.constexpr(SAMPLERS["mirostat"].number)


@triton.jit
def _load(row, ids, vocab):
    return tl.load(row + ids, mask=ids < vocab, other=float("-inf"))


@triton.jit
def _top_of(row, vocab, BLOCK: tl.constexpr):
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        best = tl.maximum(best, _load(row, start + tl.arange(0, BLOCK), vocab))
    return tl.max(best, 0)


@triton.jit
def _sums_of(row, vocab, top, BLOCK: tl.constexpr):
    """The number of tokens that are left, ln of the sum of exp(z - top), and the entropy."""
    total = tl.zeros([BLOCK], tl.float32)
    moment = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        z = _load(row, start + tl.arange(0, BLOCK), vocab)
        left = z > float("-inf")
        d = tl.where(left, z - top, 0.0)
        weight = tl.where(left, tl.exp(d), 0.0)
        total += weight
        moment += weight * d
        count += left.to(tl.float32)
    whole = tl.sum(total, 0)
    log_total = tl.log(whole)
    return tl.sum(count, 0), log_total, tl.maximum(log_total - tl.sum(moment, 0) / whole, 0.0)


@triton.jit
def _deviation_of(row, vocab, top, BLOCK: tl.constexpr):
    """The sample's standard deviation of the logits that are left; 0 of one."""
    total = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        z = _load(row, start + tl.arange(0, BLOCK), vocab)
        left = z > float("-inf")
        total += tl.where(left, z - top, 0.0)
        count += left.to(tl.float32)
    number = tl.sum(count, 0)
    mean = tl.sum(total, 0) / number
    square = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        z = _load(row, start + tl.arange(0, BLOCK), vocab)
        off = tl.where(z > float("-inf"), z - top - mean, 0.0)
        square += off * off
    return tl.sqrt(tl.sum(square, 0) / tl.maximum(number - 1.0, 1.0))


@triton.jit
def _keep_from(row, vocab, floor, BLOCK: tl.constexpr):
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        z = _load(row, ids, vocab)
        gone = tl.full([BLOCK], float("-inf"), tl.float32)
        tl.store(row + ids, gone, mask=(ids < vocab) & (z < floor))


@triton.jit
def _scaled(row, vocab, top, temperature, BLOCK: tl.constexpr):
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        z = _load(row, ids, vocab)
        tl.store(row + ids, (z - top) / temperature, mask=ids < vocab)


@triton.jit
def _smoothed(row, vocab, top, factor, curve, BLOCK: tl.constexpr):
    k = factor * (3.0 - curve) * 0.5
    s = factor * (curve - 1.0) * 0.5
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        z = _load(row, ids, vocab)
        left = z > float("-inf")
        d = tl.where(left, z - top, 0.0)
        bent = tl.where(left, d * d * (s * d - k), float("-inf"))
        tl.store(row + ids, bent, mask=ids < vocab)


@triton.jit
def _without_top_choices(row, vocab, top, floor, BLOCK: tl.constexpr):
    """Of at least two logits from ``floor`` on, only the lowest stay, and what is below."""
    count = tl.zeros([BLOCK], tl.float32)
    lowest = tl.full([BLOCK], float("inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        z = _load(row, start + tl.arange(0, BLOCK), vocab)
        likely = (z >= floor) & (z > float("-inf"))
        count += likely.to(tl.float32)
        lowest = tl.minimum(lowest, tl.where(likely, z, float("inf")))
    if tl.sum(count, 0) > 1.5:
        least = tl.min(lowest, 0)
        for start in range(0, vocab, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            z = _load(row, ids, vocab)
            gone = tl.full([BLOCK], float("-inf"), tl.float32)
            tl.store(row + ids, gone, mask=(ids < vocab) & (z > least))


@triton.jit
def _power(share, exponent):
    """share ** exponent, fp64; of 0: 0."""
    positive = tl.where(share > 0.0, share, 1.0)
    return tl.where(share > 0.0, tl.exp(exponent * tl.log(positive)), 0.0)


@triton.jit
def _skewed(row, vocab, top, w, BLOCK: tl.constexpr):
    zeros = tl.zeros([BLOCK], tl.float64)
    total = tl.sum(zeros, 0)
    for start in range(0, vocab, BLOCK):
        z = _load(row, start + tl.arange(0, BLOCK), vocab)
        total += tl.sum(tl.exp(z - top).to(tl.float64), 0)
    exponent = tl.exp(w.to(tl.float64))
    before = tl.sum(zeros, 0)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        z = _load(row, ids, vocab)
        weight = tl.exp(z - top).to(tl.float64)
        reached = before + tl.cumsum(weight, 0)
        after = tl.minimum(reached / total, 1.0)
        ahead = tl.minimum((reached - weight) / total, 1.0)
        moved = _power(after, exponent) - _power(ahead, exponent)
        left = (moved > 0.0) & (z > float("-inf"))
        value = tl.log(tl.where(left, moved, 1.0)).to(tl.float32)
        tl.store(row + ids, tl.where(left, value, float("-inf")), mask=ids < vocab)
        before += tl.sum(weight, 0)


@triton.jit
def _keyed(z, top, log_total, entropy, MODE: tl.constexpr):
    """Keys in the order in which tokens are kept, and what each weighs."""
    left = z > float("-inf")
    d = tl.where(left, z - top, 0.0)
    if MODE == _BY_DISTANCE:
        distance = tl.abs(d - log_total + entropy)
        key = -distance.to(tl.int32, bitcast=True)
    else:
        key = key_of(z)
    if MODE == _BY_NUMBER:
        weight = left.to(tl.float32)
    else:
        weight = tl.where(left, tl.exp(d), 0.0)
    return key, weight


@triton.jit
def _highest_enough(
    row, vocab, top, log_total, entropy, need, low, high, MODE: tl.constexpr, BLOCK: tl.constexpr
):
    """The highest key in low … high, int64, such that keys from it on weigh at least ``need``;
    ``low`` if none does."""
    eighth = tl.arange(0, 8)
    while low < high:
        width = high - low
        steps = low + (width * (eighth + 1).to(tl.int64) + 7) // 8
        sums = tl.zeros([8, BLOCK], tl.float32)
        bounds = steps.to(tl.int32)
        for start in range(0, vocab, BLOCK):
            z = _load(row, start + tl.arange(0, BLOCK), vocab)
            key, weight = _keyed(z, top, log_total, entropy, MODE)
            sums += tl.where(key[None, :] >= bounds[:, None], weight[None, :], 0.0)
        reached = tl.sum((tl.sum(sums, 1) >= need).to(tl.int32), 0)
        # Of what did not reach it the lowest ends the interval, of what did the highest begins it.
        upper = tl.min(tl.where(eighth >= reached, steps, high + 1), 0) - 1
        low = tl.max(tl.where(eighth < reached, steps, low), 0)
        high = upper
    return low


@triton.jit
def _keep_close(row, vocab, top, log_total, entropy, key, BLOCK: tl.constexpr):
    """Keep tokens whose key by distance is ``key`` or more."""
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        z = _load(row, ids, vocab)
        found, _ = _keyed(z, top, log_total, entropy, _BY_DISTANCE)
        gone = tl.full([BLOCK], float("-inf"), tl.float32)
        tl.store(row + ids, gone, mask=(ids < vocab) & (found < key))


@triton.jit
def _by_threshold(row, vocab, top, kind, a, BLOCK: tl.constexpr, STEP_BLOCK: tl.constexpr):
    """Top-k, top-p and typical."""
    lowest = key_of(tl.full([1], -3.4028234e38, tl.float32))
    low = tl.sum(lowest, 0).to(tl.int64)
    high = tl.sum(key_of(tl.full([1], 0.0, tl.float32) + top), 0).to(tl.int64)
    if kind == _TOP_K:
        if a < vocab:
            key = _highest_enough(row, vocab, top, 0.0, 0.0, a, low, high, _BY_NUMBER, STEP_BLOCK)
            _keep_from(row, vocab, tl.minimum(number_of(key.to(tl.int32)), top), BLOCK)
    else:
        _, log_total, entropy = _sums_of(row, vocab, top, BLOCK)
        need = a * tl.exp(log_total)
        if kind == _TOP_P:
            key = _highest_enough(
                row, vocab, top, 0.0, 0.0, need, low, high, _BY_WEIGHT, STEP_BLOCK
            )
            _keep_from(row, vocab, tl.minimum(number_of(key.to(tl.int32)), top), BLOCK)
        else:
            far = low * 0 - 0x7F7FFFFF
            key = _highest_enough(
                row, vocab, top, log_total, entropy, need, far, low * 0, _BY_DISTANCE, STEP_BLOCK
            )
            _keep_close(row, vocab, top, log_total, entropy, key.to(tl.int32), BLOCK)


@triton.jit
def _by_floor(row, vocab, top, kind, a, bound, BLOCK: tl.constexpr):
    """Those of which one number says what is kept."""
    floor = top
    if kind == _MIN_P:
        floor = top + tl.log(a)
    elif kind == _NSIGMA:
        floor = top - a * _deviation_of(row, vocab, top, BLOCK)
    else:
        _, log_total, entropy = _sums_of(row, vocab, top, BLOCK)
        if kind == _TOP_A:
            floor = top + tl.log(a) - log_total
        elif kind == _MIROSTAT:
            floor = top + log_total - bound * _LN2
        else:
            least = tl.log(a)
            if kind == _ETA:
                least = tl.minimum(least, 0.5 * least - entropy)
            floor = top + log_total + least
    _keep_from(row, vocab, tl.minimum(floor, top), BLOCK)


@triton.jit
def _stage(
    row, vocab, kind, a, b, c, bound, key_add, key_factor,
    BLOCK: tl.constexpr, STEP_BLOCK: tl.constexpr,
):  # fmt: skip
    top = _top_of(row, vocab, BLOCK)
    if tl.abs(top) < float("inf"):
        if kind == _TEMPERATURE:
            _scaled(row, vocab, top, a, BLOCK)
        elif kind == _DYNAMIC:
            count, _, entropy = _sums_of(row, vocab, top, BLOCK)
            share = tl.minimum(entropy / tl.log(tl.maximum(count, 2.0)), 1.0)
            power = tl.where(share > 0.0, tl.exp(c * tl.log(tl.maximum(share, 1e-37))), 0.0)
            _scaled(row, vocab, top, tl.maximum(a + (b - a) * power, 1e-5), BLOCK)
        elif kind == _SMOOTHING:
            _smoothed(row, vocab, top, a, b, BLOCK)
        elif kind == _SKEW:
            _skewed(row, vocab, top, a, BLOCK)
        elif kind == _XTC:
            coin = coin_of(key_add, key_factor)
            if (coin < b) | (b >= 1.0):
                floor = float("-inf")
                if a > 0.0:
                    _, log_total, _ = _sums_of(row, vocab, top, BLOCK)
                    floor = top + log_total + tl.log(a)
                _without_top_choices(row, vocab, top, floor, BLOCK)
        elif (kind == _TOP_K) | (kind == _TOP_P) | (kind == _TYPICAL):
            _by_threshold(row, vocab, top, kind, a, BLOCK, STEP_BLOCK)
        else:
            _by_floor(row, vocab, top, kind, a, bound, BLOCK)
    tl.debug_barrier()


@triton.jit
def _stages_kernel(
    adjusted, rows, asks, stage_count, stage_kind, stage_value, bound, seed_low, seed_high,
    num_output, vocab, MOST: tl.constexpr, NUMBERS: tl.constexpr, AFTER: tl.constexpr,
    BLOCK: tl.constexpr, STEP_BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin_early(EARLY)
    number = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows + number).to(tl.int64)
    if slot < 0:
        return
    if (tl.load(asks + slot) & _STAGES) == 0:
        return
    count = tl.load(stage_count + slot)
    place = tl.arange(0, MOST)
    kinds = tl.load(stage_kind + slot * MOST + place, mask=place < count, other=-1)
    sorts = tl.min(tl.where(kinds == _TFS, place, count), 0)
    begin = 0
    end = sorts
    if AFTER:
        begin = sorts + 1
        end = count
    key_add, key_factor = draw_key(seed_low, seed_high, num_output, slot)
    mu = tl.load(bound + slot)
    row = adjusted + number * vocab
    for index in range(begin, end):
        at = slot * MOST + index
        kind = tl.load(stage_kind + at)
        a = tl.load(stage_value + at * NUMBERS)
        b = tl.load(stage_value + at * NUMBERS + 1)
        c = tl.load(stage_value + at * NUMBERS + 2)
        _stage(row, vocab, kind, a, b, c, mu, key_add, key_factor, BLOCK, STEP_BLOCK)


def sampler_stages(
    rows: Tensor,
    count: int,
    seed_low: Tensor,
    seed_high: Tensor,
    slots: SamplerSlots,
    space: SamplerSpace,
    after_sort: bool = False,
) -> None:
    """What stages make of the rows that have any, in ``space.adjusted``: those ahead of tail-free
    sampling, or all where a row has none of it; or, ``after_sort``, those behind it.

    Comes after ``adjust_logits``. rows: [N] int32, the slot of each row, -1: none; count: rows of
    the step; seed_low, seed_high: as ``draw`` takes them.
    """
    vocab = space.adjusted.shape[1]
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    _stages_kernel[(count,)](
        space.adjusted, rows, slots.asks, slots.stage_count, slots.stage_kind, slots.stage_value,
        slots.bound, seed_low, seed_high, slots.num_output, vocab, MOST_STAGES, STAGE_NUMBERS,
        after_sort, block, min(_STEP_BLOCK, block), EARLY, num_warps=8, launch_pdl=EARLY,
    )  # fmt: skip
