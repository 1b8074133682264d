"""Bans, biases and penalties, and a survey of each row's logits, in one pass.

The rules are those of ``penstock.kernels.sampling``. Rows that ask for an adjustment get their
logits written anew in fp32; rows that are drawn with min_p, top_k or top_p get the highest logit of
every group and a few numbers of every stretch, from which ``keep_floor`` works. Rows that ask for
neither are not read.

A dense pass cannot scatter, so a slot's entries (biases, bans) are written over the stretch after
it, and the stretch is read again, by the same program.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.early_launch import EARLY, begin_early
from penstock.kernels.gpu.sampler_memory import (
    ASKS_ALLOWED,
    ASKS_BAD_WORDS,
    ASKS_BIASES,
    ASKS_PENALTIES,
    GROUP,
    STRETCH,
    SamplerSlots,
    SamplerSpace,
    groups_of,
    stretches_of,
)
from penstock.kernels.sampling.bad_words import WORDS

_PENALTIES = tl.constexpr(ASKS_PENALTIES)
_BIASES = tl.constexpr(ASKS_BIASES)
_ALLOWED = tl.constexpr(ASKS_ALLOWED)
_BAD_WORDS = tl.constexpr(ASKS_BAD_WORDS)
_CHUNK = 128
"""Entries that are applied at once."""


@triton.jit
def is_limited(warmth, k, p, m, vocab, greedy_below):
    """Whether a row is drawn from less than the whole vocabulary."""
    return (warmth >= greedy_below) & (((k > 0) & (k < vocab)) | (p < 1.0) | (m > 0.0))


@triton.jit
def _penalised(z, count, repetition, inverse, frequency, presence):
    """count: of ``counts``, sign extended; inverse: 1 / repetition."""
    times = (count & 0x7FFF).to(tl.float32)
    z = tl.where(count != 0, z * tl.where(z > 0.0, inverse, repetition), z)
    return z - frequency * times - tl.where(times > 0.0, presence, 0.0)


@triton.jit
def _adjust_kernel(
    logits, rows, asks, temperature, top_k, top_p, min_p, repetition, frequency, presence,
    num_output, counts, allowed, entry_count, entry_token, entry_value, entry_until, word_ban,
    adjusted, group_max, stretch_max, stretch_min, stretch_mass, bad,
    vocab, stretches, groups, mask_words, entries, greedy_below,
    STRETCH: tl.constexpr, GROUP: tl.constexpr, WORDS: tl.constexpr, CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    begin_early(EARLY)
    row = tl.program_id(0).to(tl.int64)
    stretch = tl.program_id(1)
    slot = tl.load(rows + row).to(tl.int64)
    if slot < 0:
        return
    ask = tl.load(asks + slot)
    warmth = tl.load(temperature + slot)
    p = tl.load(top_p + slot)
    limited = is_limited(
        warmth, tl.load(top_k + slot), p, tl.load(min_p + slot), vocab, greedy_below
    )
    if (ask == 0) & (limited == 0):
        return
    first = stretch * STRETCH
    ids = first + tl.arange(0, STRETCH)
    inside = ids < vocab
    source = logits + row * vocab
    z = tl.load(source + ids, mask=inside, other=0.0).to(tl.float32)
    total = tl.sum(z, 0)
    sick = (total != total) | (tl.abs(total) == float("inf"))
    if ask != 0:
        r = tl.load(repetition + slot)
        f = tl.load(frequency + slot)
        o = tl.load(presence + slot)
        count_row = counts + slot * vocab
        mask_row = allowed + slot * mask_words
        if (ask & _PENALTIES) != 0:
            count = tl.load(count_row + ids, mask=inside, other=0).to(tl.int32)
            z = _penalised(z, count, r, 1.0 / r, f, o)
        if (ask & _ALLOWED) != 0:
            word = tl.load(mask_row + ids // 32, mask=inside, other=0)
            z = tl.where(((word >> (ids % 32)) & 1) != 0, z, float("-inf"))
        target = adjusted + row * vocab
        tl.store(target + ids, z, mask=inside)
        if (ask & (_BIASES | _BAD_WORDS)) != 0:
            tl.debug_barrier()
            if (ask & _BIASES) != 0:
                output = tl.load(num_output + slot)
                number = tl.load(entry_count + slot)
                entry = slot * entries
                for start in range(0, number, CHUNK):
                    index = start + tl.arange(0, CHUNK)
                    token = tl.load(entry_token + entry + index, mask=index < number, other=-1)
                    until = tl.load(entry_until + entry + index, mask=index < number, other=0)
                    value = tl.load(entry_value + entry + index, mask=index < number, other=0.0)
                    mine = (token >= first) & (token < first + STRETCH) & (token < vocab)
                    mine = mine & (output < until) & (value > float("-inf"))
                    new = tl.load(source + token, mask=mine, other=0.0).to(tl.float32) + value
                    if (ask & _PENALTIES) != 0:
                        count = tl.load(count_row + token, mask=mine, other=0).to(tl.int32)
                        new = _penalised(new, count, r, 1.0 / r, f, o)
                    if (ask & _ALLOWED) != 0:
                        word = tl.load(mask_row + token // 32, mask=mine, other=0)
                        new = tl.where(((word >> (token % 32)) & 1) != 0, new, float("-inf"))
                    tl.store(target + token, new, mask=mine)
                tl.debug_barrier()
                for start in range(0, number, CHUNK):
                    index = start + tl.arange(0, CHUNK)
                    token = tl.load(entry_token + entry + index, mask=index < number, other=-1)
                    until = tl.load(entry_until + entry + index, mask=index < number, other=0)
                    value = tl.load(entry_value + entry + index, mask=index < number, other=0.0)
                    mine = (token >= first) & (token < first + STRETCH) & (token < vocab)
                    mine = mine & (output < until) & (value == float("-inf"))
                    tl.store(target + token, value, mask=mine)
            if (ask & _BAD_WORDS) != 0:
                tl.debug_barrier()
                token = tl.load(word_ban + slot * WORDS + tl.arange(0, WORDS))
                mine = (token >= first) & (token < first + STRETCH) & (token < vocab)
                banned = tl.full([WORDS], float("-inf"), tl.float32)
                tl.store(target + token, banned, mask=mine)
            tl.debug_barrier()
            z = tl.load(target + ids, mask=inside, other=0.0)
        wrong = inside & ((z != z) | (z == float("inf")))
        sick = sick | (tl.max(wrong.to(tl.int32), 0) != 0)
    at = row * stretches + stretch
    tl.store(bad + at, sick.to(tl.int32))
    if limited:
        z = tl.where(inside, z, float("-inf"))
        highest = tl.max(tl.reshape(z, [STRETCH // GROUP, GROUP]), 1)
        group = stretch * (STRETCH // GROUP) + tl.arange(0, STRETCH // GROUP)
        tl.store(group_max + row * groups + group, highest, mask=group < groups)
        top = tl.max(highest, 0)
        tl.store(stretch_max + at, top)
        low = tl.min(tl.where(z > float("-inf"), z, float("inf")), 0)
        tl.store(stretch_min + at, low)
        if p < 1.0:
            scale = 1.0 / tl.maximum(warmth, greedy_below)
            weight = tl.where(z > float("-inf"), tl.exp((z - top) * scale), 0.0)
            tl.store(stretch_mass + at, tl.sum(weight, 0))


def adjust_logits(
    logits: Tensor, rows: Tensor, slots: SamplerSlots, space: SamplerSpace, greedy_below: float
) -> None:
    """Adjust and survey the rows that ask for it.

    logits: [N, V] contiguous, fp32, bf16 or fp16, not changed; rows: [N] int32, the slot of each
    row, -1: none. Writes ``space`` but for its floors.
    """
    count, vocab = logits.shape
    stretches = stretches_of(vocab)
    _adjust_kernel[(count, stretches)](
        logits, rows, slots.asks, slots.temperature, slots.top_k, slots.top_p, slots.min_p,
        slots.repetition, slots.frequency, slots.presence, slots.num_output, slots.counts,
        slots.allowed, slots.entry_count, slots.entry_token, slots.entry_value, slots.entry_until,
        slots.word_ban, space.adjusted, space.group_max, space.stretch_max, space.stretch_min,
        space.stretch_mass, space.bad, vocab, stretches, groups_of(vocab), slots.allowed.shape[1],
        slots.entry_token.shape[1], greedy_below, STRETCH, GROUP, WORDS, _CHUNK, EARLY,
        num_warps=8, launch_pdl=EARLY,
    )  # fmt: skip
