"""The lowest logit that min_p, top_k and top_p keep, without sorting: one program a row.

The rules are those of ``penstock.kernels.sampling.keep_floor``. The floor is a logit before the
temperature: what is kept is an order of the logits, and two of them cannot be made to tie by
dividing. min_p's floor is max + ln(m) * temperature.

1. *A bound from the groups.* The k-th highest of the groups' maxima is at most the k-th highest
   logit, and where the maxima above a bound hold the wanted mass, the logits above it do. So the
   bound is looked for among V / ``GROUP`` numbers.
2. *Candidates.* Only groups whose maximum reaches the bound are read, and what reaches it is put
   together. Up to ``CANDIDATES`` logits lie in registers; the floor among them is found by halving
   an interval of the numbers' order-preserving bits, so it is exact.
3. *Passes.* Where the candidates do not suffice (flat rows with top_p near 1, top_k in the
   thousands), passes over the row count and weigh what is above eight values at once, until no
   more than ``CANDIDATES`` logits lie in the interval that holds the floor; each pass cuts it to an
   eighth.

Counts are exact. Weights exp((z - max) / temperature) and their sums are fp32, the sums by a tree,
in an order that depends on nothing but the row: a set may differ from the exact one where its
probability is within about 1e-6 of top_p.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.adjust_logits import is_limited
from penstock.kernels.gpu.early_launch import EARLY, begin_early
from penstock.kernels.gpu.sampler_memory import (
    GROUP,
    SamplerSlots,
    SamplerSpace,
    groups_of,
    stretches_of,
)

_TILE = 2048
"""Logits of groups that are read at once."""
_BLOCK = 512
"""A pass reads four times so many logits at once."""
_MOST_GROUPS = 1024
"""For top_p alone, no more groups than these and their ties are read before there are passes."""
_COARSE = tl.constexpr(1024)
"""The bound from the groups may be lower than it could be by so many steps of fp32."""
_MOST_PASSES = tl.constexpr(200)
_NOTHING = tl.constexpr(110.0)
"""exp(-this) is 0 in fp32."""


@triton.jit
def _key(z):
    """int32 in the order of the fp32 numbers; -0 and 0 are one number."""
    bits = tl.where(z == 0.0, 0.0, z).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _number(key):
    """The fp32 number of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def load_logits(logits, adjusted, is_adjusted, place, mask):
    """fp32, -inf where masked; logits, adjusted: of the row."""
    if is_adjusted:
        z = tl.load(adjusted + place, mask=mask, other=float("-inf"))
    else:
        z = tl.load(logits + place, mask=mask, other=float("-inf")).to(tl.float32)
    return z


@triton.jit
def _highest_reaching(keys, weights, low, high, base, need):
    """The highest key in low … high such that the weights of keys from it on, and ``base``, reach
    ``need``; ``low`` if there is none."""
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        found = base + tl.sum(tl.where(keys >= middle.to(tl.int32), weights, 0.0), 0)
        reached = found >= need
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    return low.to(tl.int32)


@triton.jit
def _gather(
    logits, adjusted, is_adjusted, maxima, group_list, candidates, vocab, low, high,
    GROUP: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Put a row's logits from ``low`` to below ``high`` into ``candidates``, in the order of ids.
    Returns how many; more than ``MOST``: too many, and it was not read on."""
    tl.debug_barrier()
    near = maxima >= low
    position = tl.cumsum(near.to(tl.int32), 0) - 1
    tl.store(group_list + position, tl.arange(0, PADDED), mask=near)
    total = tl.sum(near.to(tl.int32), 0) * GROUP
    tl.debug_barrier()
    count = 0
    start = 0
    while (start < total) & (count <= MOST):
        index = start + tl.arange(0, TILE)
        group = tl.load(group_list + index // GROUP, mask=index < total, other=0)
        ids = group * GROUP + index % GROUP
        z = load_logits(logits, adjusted, is_adjusted, ids, (index < total) & (ids < vocab))
        taken = (z >= low) & (z < high) & (z > float("-inf"))
        place = count + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(candidates + place, z, mask=taken & (place < MOST))
        count += tl.sum(taken.to(tl.int32), 0)
        start += TILE
    tl.debug_barrier()
    return count


@triton.jit
def _load_block(logits, adjusted, is_adjusted, ids, vocab):
    """As ``load_logits``, without a branch: four of these are under way at once."""
    inside = ids < vocab
    raw = tl.load(logits + ids, mask=inside & (is_adjusted == 0), other=float("-inf"))
    new = tl.load(adjusted + ids, mask=inside & is_adjusted, other=float("-inf"))
    return tl.where(is_adjusted, new, raw.to(tl.float32))


@triton.jit
def _weigh(z, steps, top, scale, numbers, sums):
    """Count and weigh what is at or above each step. z: [B]; steps: [8]; numbers, sums: [8, B]."""
    weights = tl.exp((z - top) * scale)
    above = z[None, :] >= steps[:, None]
    numbers += tl.where(above, 1.0, 0.0)
    sums += tl.where(above, weights[None, :], 0.0)
    return numbers, sums


@triton.jit
def _find_by_passes(
    logits, adjusted, is_adjusted, maxima, group_list, candidates, vocab, low, top, scale, weighs,
    k, p, GROUP: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    MOST: tl.constexpr,
):  # fmt: skip
    """The highest logit z such that those from z on are at least k, or, if ``weighs``, weigh at
    least p times those from ``low`` on; ``low`` if there is none.

    It lies from ``low`` to below ``high``: what is from high on, ``base``, is not enough.
    """
    eighth = tl.arange(0, 8)
    share = eighth.to(tl.float32) * 0.125
    high = _number(_key(top) + 1)
    base = 0.0
    over = 0.0
    inside = 0.0
    need = k.to(tl.float32)
    passes = 0
    going = 1
    while going != 0:
        steps = tl.where(eighth == 0, low, low * (1.0 - share) + high * share)
        numbers = tl.zeros([8, BLOCK], tl.float32)
        sums = tl.zeros([8, BLOCK], tl.float32)
        for start in range(0, vocab, 4 * BLOCK):
            ids = start + tl.arange(0, BLOCK)
            z0 = _load_block(logits, adjusted, is_adjusted, ids, vocab)
            ids += BLOCK
            z1 = _load_block(logits, adjusted, is_adjusted, ids, vocab)
            ids += BLOCK
            z2 = _load_block(logits, adjusted, is_adjusted, ids, vocab)
            ids += BLOCK
            z3 = _load_block(logits, adjusted, is_adjusted, ids, vocab)
            numbers, sums = _weigh(z0, steps, top, scale, numbers, sums)
            numbers, sums = _weigh(z1, steps, top, scale, numbers, sums)
            numbers, sums = _weigh(z2, steps, top, scale, numbers, sums)
            numbers, sums = _weigh(z3, steps, top, scale, numbers, sums)
        number = tl.sum(numbers, 1)
        measure = tl.sum(sums, 1)
        if weighs == 0:
            measure = number
        if weighs & (passes == 0):
            need = p * tl.sum(tl.where(eighth == 0, measure, 0.0), 0)
        reached = tl.maximum(tl.sum((measure >= need).to(tl.int32), 0), 1)
        is_low = eighth == reached - 1
        is_high = eighth == reached
        low = tl.sum(tl.where(is_low, steps, 0.0), 0)
        if reached < 8:
            high = tl.sum(tl.where(is_high, steps, 0.0), 0)
            base = tl.sum(tl.where(is_high, measure, 0.0), 0)
            over = tl.sum(tl.where(is_high, number, 0.0), 0)
        inside = tl.sum(tl.where(is_low, number, 0.0), 0) - over
        middle = low * 0.5 + high * 0.5
        passes += 1
        more = (inside > MOST) & (middle > low) & (middle < high)
        going = (more & (passes < _MOST_PASSES)).to(tl.int32)
    if inside <= MOST:
        count = _gather(
            logits, adjusted, is_adjusted, maxima, group_list, candidates, vocab, low, high,
            GROUP, PADDED, TILE, MOST,
        )  # fmt: skip
        index = tl.arange(0, MOST)
        z = tl.load(candidates + index, mask=index < count, other=float("-inf"))
        weights = tl.exp((z - top) * scale)
        if weighs == 0:
            weights = tl.full([MOST], 1.0, tl.float32)
        weights = tl.where(index < count, weights, 0.0)
        low = _number(_highest_reaching(_key(z), weights, _key(low), _key(high) - 1, base, need))
    return low


@triton.jit
def _floor_kernel(
    logits, rows, asks, temperature, top_k, top_p, min_p, adjusted, group_max, stretch_max,
    stretch_min, stretch_mass, bad, group_list, candidates, floors, vocab, stretches, groups,
    greedy_below,
    GROUP: tl.constexpr, PADDED: tl.constexpr, PADDED_STRETCHES: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, MOST: tl.constexpr, MOST_GROUPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin_early(EARLY)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows + row)
    if slot < 0:
        return
    warmth = tl.load(temperature + slot)
    k = tl.load(top_k + slot)
    p = tl.load(top_p + slot)
    m = tl.load(min_p + slot)
    floor = float("-inf")
    if is_limited(warmth, k, p, m, vocab, greedy_below):
        scale = 1.0 / tl.maximum(warmth, greedy_below)
        part = tl.arange(0, PADDED_STRETCHES)
        at = row * stretches + part
        sick = tl.max(tl.load(bad + at, mask=part < stretches, other=0), 0)
        tops = tl.load(stretch_max + at, mask=part < stretches, other=float("-inf"))
        top = tl.max(tops, 0)
        if (sick == 0) & (top > float("-inf")):
            least = float("-inf")
            if m > 0.0:
                least = top + tl.log(m) * warmth
            floor = least
            by_count = (k > 0) & (k < vocab)
            by_mass = p < 1.0
            if by_count | by_mass:
                is_adjusted = tl.load(asks + slot) != 0
                source = logits + row * vocab
                changed = adjusted + row * vocab
                listed = group_list + row * PADDED
                chosen = candidates + row * MOST
                group = tl.arange(0, PADDED)
                maxima = tl.load(
                    group_max + row * groups + group, mask=group < groups, other=float("-inf")
                )
                mass = 0.0
                if by_mass:
                    masses = tl.load(stretch_mass + at, mask=part < stretches, other=0.0)
                    mass = tl.sum(masses * tl.exp((tops - top) * scale), 0)
                bound = least
                if by_count | (m <= 0.0):
                    keys = _key(maxima)
                    weights = tl.exp((maxima - top) * scale)
                    enough = tl.minimum(MOST_GROUPS, (groups + 1) // 2)
                    if by_count:
                        enough = k
                    wanted = float("inf")
                    if by_mass & (by_count == 0):
                        # Of all that is left; what top_k leaves is not known yet.
                        wanted = p * mass * 1.00001
                    low_key = _key(tl.min(tl.where(group < groups, maxima, float("inf")), 0))
                    low = low_key.to(tl.int64)
                    high = _key(top).to(tl.int64)
                    if (groups >= enough) | (tl.sum(weights, 0) >= wanted):
                        while high - low > _COARSE:
                            middle = low + (high - low + 1) // 2
                            above = (keys >= middle.to(tl.int32)) & (group < groups)
                            number = tl.sum(above.to(tl.int32), 0)
                            found = tl.sum(tl.where(above, weights, 0.0), 0)
                            reached = (number >= enough) | (found >= wanted)
                            low = tl.where(reached, middle, low)
                            high = tl.where(reached, high, middle - 1)
                        bound = tl.maximum(bound, _number(low.to(tl.int32)))
                count = _gather(
                    source, changed, is_adjusted, maxima, listed, chosen, vocab, bound,
                    float("inf"), GROUP, PADDED, TILE, MOST,
                )  # fmt: skip
                settled = count <= MOST
                if settled:
                    index = tl.arange(0, MOST)
                    z = tl.load(chosen + index, mask=index < count, other=float("-inf"))
                    keys = _key(z)
                    if by_count:
                        one = tl.where(index < count, 1.0, 0.0)
                        found = _highest_reaching(
                            keys, one, _key(bound), _key(top), 0.0, k.to(tl.float32)
                        )
                        floor = tl.maximum(least, _number(found))
                    if by_mass:
                        weights = tl.where(z >= floor, tl.exp((z - top) * scale), 0.0)
                        weights = tl.where(index < count, weights, 0.0)
                        kept = tl.sum(weights, 0)
                        if by_count | (m > 0.0):
                            mass = kept
                        settled = kept >= p * mass
                        if settled:
                            low_key = tl.maximum(_key(floor), _key(bound))
                            found = _highest_reaching(
                                keys, weights, low_key, _key(top), 0.0, p * mass
                            )
                            floor = tl.maximum(floor, _number(found))
                if settled == 0:
                    lows = tl.load(stretch_min + at, mask=part < stretches, other=float("inf"))
                    lowest = tl.min(lows, 0)
                    floor = least
                    for stage in range(2):
                        weighs = stage == 1
                        if (by_count & (weighs == 0)) | (by_mass & weighs):
                            low = tl.maximum(lowest, floor)
                            if weighs:
                                low = tl.maximum(low, top - _NOTHING * warmth)
                            found = _find_by_passes(
                                source, changed, is_adjusted, maxima, listed, chosen, vocab, low,
                                top, scale, weighs, k, p, GROUP, PADDED, TILE, BLOCK, MOST,
                            )  # fmt: skip
                            floor = tl.maximum(floor, found)
                floor = tl.minimum(floor, top)
    tl.store(floors + row, floor)


def keep_floor(
    logits: Tensor, rows: Tensor, slots: SamplerSlots, space: SamplerSpace, greedy_below: float
) -> None:
    """Write ``space.floor`` of every row with a slot. Comes after ``adjust_logits``, with the same
    arguments."""
    count, vocab = logits.shape
    stretches = stretches_of(vocab)
    _floor_kernel[(count,)](
        logits, rows, slots.asks, slots.temperature, slots.top_k, slots.top_p, slots.min_p,
        space.adjusted, space.group_max, space.stretch_max, space.stretch_min, space.stretch_mass,
        space.bad, space.group_list, space.candidates, space.floor, vocab, stretches,
        groups_of(vocab), greedy_below, GROUP, space.group_list.shape[1],
        triton.next_power_of_2(stretches), _TILE, _BLOCK, space.candidates.shape[1], _MOST_GROUPS,
        EARLY, num_warps=8, maxnreg=128, launch_pdl=EARLY,
    )  # fmt: skip
