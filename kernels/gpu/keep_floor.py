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

Where the candidates suffice, what the floor keeps is among them, so the row's token is drawn at
once: by the instructions of ``draw``, which passes such rows by.

Counts are exact. Weights exp((z - max) / temperature) and their sums are fp32, the sums by a tree,
in an order that depends on nothing but the row: a set may differ from the exact one where its
probability is within about 1e-6 of top_p.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.adjust_logits import is_limited
from penstock.kernels.gpu.adjusted_row import adjusted_row, is_written, load_adjusted
from penstock.kernels.gpu.early_launch import EARLY, begin_early
from penstock.kernels.gpu.gumbel import LEAST, draw_key, with_noise
from penstock.kernels.gpu.sampler_memory import (
    GROUP,
    SamplerSlots,
    SamplerSpace,
    groups_of,
    vocab_splits,
)

_TILE = 2048
"""Logits of groups that are read at once."""
_BLOCK = 512
"""A pass reads four times so many logits at once."""
_MOST_GROUPS = 1024
"""For top_p alone, no more groups than these and their ties are read before there are passes."""
_FEW = 512
"""Candidates that are looked at together where there are no more."""
_COARSE = tl.constexpr(1024)
"""The bound from the groups may be lower than it could be by so many steps of fp32."""
_MOST_PASSES = tl.constexpr(200)
_NOTHING = tl.constexpr(110.0)
"""exp(-this) is 0 in fp32."""


@triton.jit
def key_of(z):
    """int32 in the order of the fp32 numbers; -0 and 0 are one number."""
    bits = tl.where(z == 0.0, 0.0, z).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def number_of(key):
    """The fp32 number of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


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
    asked, maxima, group_list, candidates, candidate_ids, vocab, low, high,
    GROUP: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Put a row's logits from ``low`` to below ``high`` into ``candidates``, in the order of ids,
    and these beside them. Returns how many; more than ``MOST``: too many, and it was not read on.
    """
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
        z = load_adjusted(asked, ids, (index < total) & (ids < vocab))
        taken = (z >= low) & (z < high) & (z > float("-inf"))
        place = count + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(candidates + place, z, mask=taken & (place < MOST))
        tl.store(candidate_ids + place, ids, mask=taken & (place < MOST))
        count += tl.sum(taken.to(tl.int32), 0)
        start += TILE
    tl.debug_barrier()
    return count


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
    asked, maxima, group_list, candidates, candidate_ids, vocab, low, top, scale, weighs, k, p,
    GROUP: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
    MOST: tl.constexpr,
):  # fmt: skip
    """The highest logit z such that those from z on are at least k, or, if ``weighs``, weigh at
    least p times those from ``low`` on; ``low`` if there is none.

    It lies from ``low`` to below ``high``: what is from high on, ``base``, is not enough.
    """
    eighth = tl.arange(0, 8)
    share = eighth.to(tl.float32) * 0.125
    high = number_of(key_of(top) + 1)
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
            z0 = load_adjusted(asked, ids, ids < vocab)
            ids += BLOCK
            z1 = load_adjusted(asked, ids, ids < vocab)
            ids += BLOCK
            z2 = load_adjusted(asked, ids, ids < vocab)
            ids += BLOCK
            z3 = load_adjusted(asked, ids, ids < vocab)
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
            asked, maxima, group_list, candidates, candidate_ids, vocab, low, high, GROUP, PADDED,
            TILE, MOST,
        )  # fmt: skip
        index = tl.arange(0, MOST)
        z = tl.load(candidates + index, mask=index < count, other=float("-inf"))
        weights = tl.exp((z - top) * scale)
        if weighs == 0:
            weights = tl.full([MOST], 1.0, tl.float32)
        weights = tl.where(index < count, weights, 0.0)
        low = number_of(
            _highest_reaching(key_of(z), weights, key_of(low), key_of(high) - 1, base, need)
        )
    return low


@triton.jit
def _settle(
    chosen, chosen_ids, count, bound, least, top, mass, scale, by_count, by_mass, m, k, p, drawn_by,
    SIZE: tl.constexpr,
):  # fmt: skip
    """For up to ``SIZE`` candidates: whether they suffice, the floor, the token that is drawn from
    what it keeps, and the noisy logit of that token."""
    key_add, key_factor = drawn_by
    index = tl.arange(0, SIZE)
    z = tl.load(chosen + index, mask=index < count, other=float("-inf"))
    ids = tl.load(chosen_ids + index, mask=index < count, other=0)
    floor = least
    settled = True
    keys = key_of(z)
    if by_count:
        one = tl.where(index < count, 1.0, 0.0)
        found = _highest_reaching(keys, one, key_of(bound), key_of(top), 0.0, k.to(tl.float32))
        floor = tl.maximum(least, number_of(found))
    if by_mass:
        weights = tl.where(z >= floor, tl.exp((z - top) * scale), 0.0)
        weights = tl.where(index < count, weights, 0.0)
        kept = tl.sum(weights, 0)
        if by_count | (m > 0.0):
            mass = kept
        settled = kept >= p * mass
        low_key = tl.maximum(key_of(floor), key_of(bound))
        found = _highest_reaching(keys, weights, low_key, key_of(top), 0.0, p * mass)
        floor = tl.maximum(floor, number_of(found))
    floor = tl.minimum(floor, top)
    value = tl.maximum(with_noise(z, scale, ids, key_add, key_factor), LEAST)
    value = tl.where((index < count) & (z >= floor), value, float("-inf"))
    best = tl.max(value, 0)
    token = tl.min(tl.where(value == best, ids, 0x3FFFFFFF), 0)
    return settled, floor, token, best


@triton.jit
def _floor_kernel(
    logits, rows, asks, temperature, top_k, top_p, min_p, repetition, frequency, presence, counts,
    allowed, seed_low, seed_high, num_output, adjusted, group_max, split_max, split_min,
    split_mass, bad, group_list, candidates, candidate_ids, floors, chosen_token, reached, vocab,
    splits, groups, mask_words, greedy_below,
    GROUP: tl.constexpr, PADDED: tl.constexpr, PADDED_STRETCHES: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, MOST: tl.constexpr, FEW: tl.constexpr, MOST_GROUPS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    begin_early(EARLY)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows + row).to(tl.int64)
    # The survey is under way before it is known whether it is needed: rows with a limit wait less.
    part = tl.arange(0, PADDED_STRETCHES)
    at = row * splits + part
    sicks = tl.load(bad + at, mask=part < splits, other=0)
    tops = tl.load(split_max + at, mask=part < splits, other=float("-inf"))
    masses = tl.load(split_mass + at, mask=part < splits, other=0.0)
    group = tl.arange(0, PADDED)
    maxima = tl.load(group_max + row * groups + group, mask=group < groups, other=float("-inf"))
    if slot < 0:
        return
    ask = tl.load(asks + slot)
    warmth = tl.load(temperature + slot)
    k = tl.load(top_k + slot)
    p = tl.load(top_p + slot)
    m = tl.load(min_p + slot)
    drawn_by = draw_key(seed_low, seed_high, num_output, slot)
    asked = adjusted_row(
        logits, adjusted, counts, allowed, repetition, frequency, presence, ask, row, slot, vocab,
        mask_words,
    )  # fmt: skip
    limited = is_limited(warmth, k, p, m, vocab, greedy_below)
    floor = float("-inf")
    token = -1
    best = 0.0
    sick = 0
    if limited | is_written(ask):
        sick = tl.max(sicks, 0)
    if sick != 0:
        token = sick << 29
    top = tl.max(tops, 0)
    if limited & (sick == 0) & (top > float("-inf")):
        scale = 1.0 / tl.maximum(warmth, greedy_below)
        least = float("-inf")
        if m > 0.0:
            least = top + tl.log(m) * warmth
        by_count = (k > 0) & (k < vocab)
        by_mass = p < 1.0
        listed = group_list + row * PADDED
        chosen = candidates + row * MOST
        chosen_ids = candidate_ids + row * MOST
        mass = 0.0
        if by_mass:
            mass = tl.sum(masses * tl.exp((tops - top) * scale), 0)
        bound = least
        if by_count | (m <= 0.0):
            keys = key_of(maxima)
            weights = tl.exp((maxima - top) * scale)
            enough = tl.minimum(MOST_GROUPS, (groups + 1) // 2)
            if by_count:
                enough = k
            wanted = float("inf")
            if by_mass & (by_count == 0):
                # A share of all that is left; what top_k leaves is not known yet.
                wanted = p * mass * 1.00001
            low_key = key_of(tl.min(tl.where(group < groups, maxima, float("inf")), 0))
            low = low_key.to(tl.int64)
            high = key_of(top).to(tl.int64)
            if (groups >= enough) | (tl.sum(weights, 0) >= wanted):
                while high - low > _COARSE:
                    middle = low + (high - low + 1) // 2
                    above = (keys >= middle.to(tl.int32)) & (group < groups)
                    number = tl.sum(above.to(tl.int32), 0)
                    reached_it = number >= enough
                    if by_count == 0:
                        found = tl.sum(tl.where(above, weights, 0.0), 0)
                        reached_it = reached_it | (found >= wanted)
                    low = tl.where(reached_it, middle, low)
                    high = tl.where(reached_it, high, middle - 1)
                bound = tl.maximum(bound, number_of(low.to(tl.int32)))
        count = _gather(
            asked, maxima, listed, chosen, chosen_ids, vocab, bound, float("inf"), GROUP, PADDED,
            TILE, MOST,
        )  # fmt: skip
        settled = False
        if count <= FEW:
            settled, floor, token, best = _settle(
                chosen, chosen_ids, count, bound, least, top, mass, scale, by_count, by_mass, m, k,
                p, drawn_by, FEW,
            )  # fmt: skip
        elif count <= MOST:
            settled, floor, token, best = _settle(
                chosen, chosen_ids, count, bound, least, top, mass, scale, by_count, by_mass, m, k,
                p, drawn_by, MOST,
            )  # fmt: skip
        if settled == 0:
            token = -1
            lows = tl.load(split_min + at, mask=part < splits, other=float("inf"))
            lowest = tl.min(lows, 0)
            floor = least
            for stage in range(2):
                weighs = stage == 1
                if (by_count & (weighs == 0)) | (by_mass & weighs):
                    low = tl.maximum(lowest, floor)
                    if weighs:
                        low = tl.maximum(low, top - _NOTHING * warmth)
                    found = _find_by_passes(
                        asked, maxima, listed, chosen, chosen_ids, vocab, low, top, scale, weighs,
                        k, p, GROUP, PADDED, TILE, BLOCK, MOST,
                    )  # fmt: skip
                    floor = tl.maximum(floor, found)
            floor = tl.minimum(floor, top)
    tl.store(floors + row, floor)
    tl.store(chosen_token + row, token)
    tl.store(reached + row, best)


def keep_floor(
    logits: Tensor,
    rows: Tensor,
    seed_low: Tensor,
    seed_high: Tensor,
    slots: SamplerSlots,
    space: SamplerSpace,
    greedy_below: float,
) -> None:
    """Write ``space.floor`` of every row with a slot, and ``space.chosen`` where that is known.

    Comes after ``adjust_logits``; seed_low, seed_high: as ``draw`` takes them.
    """
    count, vocab = logits.shape
    splits = vocab_splits(vocab)
    most = space.candidates.shape[1]
    _floor_kernel[(count,)](
        logits, rows, slots.asks, slots.temperature, slots.top_k, slots.top_p, slots.min_p,
        slots.repetition, slots.frequency, slots.presence, slots.counts, slots.allowed, seed_low,
        seed_high, slots.num_output, space.adjusted, space.group_max, space.split_max,
        space.split_min, space.split_mass, space.bad, space.group_list, space.candidates,
        space.candidate_ids, space.floor, space.chosen, space.reached, vocab, splits,
        groups_of(vocab), slots.allowed.shape[1], greedy_below, GROUP, space.group_list.shape[1],
        triton.next_power_of_2(splits), _TILE, _BLOCK, most, min(_FEW, most), _MOST_GROUPS,
        EARLY, num_warps=8, maxnreg=128, launch_pdl=EARLY,
    )  # fmt: skip
