"""Bans, biases and penalties, and a survey of each row's logits, in one pass.

The rules are those of ``penstock.kernels.sampling``. Rows that are drawn with min_p, top_k or top_p
get the highest logit of every group and a few numbers of every split, from which ``keep_floor``
works. Rows that ask for adjustments of single tokens get their logits written anew in fp32; other
adjustments are computed at each reading, see ``adjusted_row``. Rows that need neither are not read.

A program reads a few splits of a row, each while it surveys the one before.

A dense pass cannot scatter, so a slot's entries (biases, bans) are written over the split after
it, and the split is read again, by the same program.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.adjusted_row import (
    ALLOWED,
    PENALTIES,
    adjusted_row,
    is_finite,
    is_written,
    penalised,
    reason_of,
)
from penstock.kernels.gpu.device_facts import multiprocessors
from penstock.kernels.gpu.early_launch import EARLY, begin_early
from penstock.kernels.gpu.sampler_memory import (
    ASKS_BAD_WORDS,
    ASKS_BIASES,
    ASKS_HISTORY,
    GROUP,
    SPLIT,
    HistoryEntries,
    SamplerSlots,
    SamplerSpace,
    groups_of,
    vocab_splits,
)
from penstock.kernels.sampling.bad_words import WORDS

_BIASES = tl.constexpr(ASKS_BIASES)
_BAD_WORDS = tl.constexpr(ASKS_BAD_WORDS)
_HISTORY = tl.constexpr(ASKS_HISTORY)
_LOG2_E = tl.constexpr(1.4426950408889634)
_CHUNK = 128
"""Entries that are applied at once."""
_PROGRAMS_EACH = 16
"""Rows are cut into no more programs than this needs for each multiprocessor, and one for each
split at most."""


@triton.jit
def is_limited(warmth, k, p, m, vocab, greedy_below):
    """Whether a row is drawn from less than the whole vocabulary."""
    return (warmth >= greedy_below) & (((k > 0) & (k < vocab)) | (p < 1.0) | (m > 0.0))


@triton.jit
def _load_split(asked, ids, mask):
    """Logits and counts of a split, 0 where masked."""
    source, _, counts, _, ask, _, _, _, _ = asked
    raw = tl.load(source + ids, mask=mask, other=0.0)
    count = tl.load(counts + ids, mask=mask & ((ask & PENALTIES) != 0), other=0)
    return raw, count


@triton.jit
def _add_biases(asked, token, value, mine):
    """Write tokens' logits with these biases, penalised and masked as all others."""
    source, target, counts, allowed, ask, repetition, inverse, frequency, presence = asked
    new = tl.load(source + token, mask=mine, other=0.0).to(tl.float32) + value
    asks_penalties = (ask & PENALTIES) != 0
    count = tl.load(counts + token, mask=mine & asks_penalties, other=0).to(tl.int32)
    new = penalised(new, count, repetition, inverse, frequency, presence)
    asks_allowed = (ask & ALLOWED) != 0
    word = tl.load(allowed + token // 32, mask=mine & asks_allowed, other=-1)
    new = tl.where(((word >> (token % 32)) & 1) != 0, new, float("-inf"))
    tl.store(target + token, new, mask=mine)


@triton.jit
def _with_history(
    asked, first, vocab, begin, end, history_token, history_value,
    SPLIT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write a row's entries of history over a split: biases, then bans."""
    tl.debug_barrier()
    for start in range(begin, end, CHUNK):
        index = start + tl.arange(0, CHUNK)
        token = tl.load(history_token + index, mask=index < end, other=-1)
        value = tl.load(history_value + index, mask=index < end, other=0.0)
        mine = (token >= first) & (token < first + SPLIT) & (token < vocab)
        _add_biases(asked, token, value, mine & (value > float("-inf")))
    tl.debug_barrier()
    for start in range(begin, end, CHUNK):
        index = start + tl.arange(0, CHUNK)
        token = tl.load(history_token + index, mask=index < end, other=-1)
        value = tl.load(history_value + index, mask=index < end, other=0.0)
        mine = (token >= first) & (token < first + SPLIT) & (token < vocab)
        tl.store(asked[1] + token, value, mask=mine & (value == float("-inf")))
    tl.debug_barrier()


@triton.jit
def _with_entries(
    asked, first, vocab, slot, num_output, entry_count, entry_token, entry_value, entry_until,
    word_ban, entries, begin, end, history_token, history_value,
    SPLIT: tl.constexpr, WORDS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write a slot's entries and word bans over a split that is written already."""
    target, ask = asked[1], asked[4]
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
            mine = (token >= first) & (token < first + SPLIT) & (token < vocab)
            _add_biases(asked, token, value, mine & (output < until) & (value > float("-inf")))
    if (ask & _HISTORY) != 0:
        _with_history(asked, first, vocab, begin, end, history_token, history_value, SPLIT, CHUNK)
    if (ask & _BIASES) != 0:
        output = tl.load(num_output + slot)
        number = tl.load(entry_count + slot)
        entry = slot * entries
        tl.debug_barrier()
        for start in range(0, number, CHUNK):
            index = start + tl.arange(0, CHUNK)
            token = tl.load(entry_token + entry + index, mask=index < number, other=-1)
            until = tl.load(entry_until + entry + index, mask=index < number, other=0)
            value = tl.load(entry_value + entry + index, mask=index < number, other=0.0)
            mine = (token >= first) & (token < first + SPLIT) & (token < vocab)
            mine = mine & (output < until) & (value == float("-inf"))
            tl.store(target + token, value, mask=mine)
    if (ask & _BAD_WORDS) != 0:
        tl.debug_barrier()
        token = tl.load(word_ban + slot * WORDS + tl.arange(0, WORDS))
        mine = (token >= first) & (token < first + SPLIT) & (token < vocab)
        banned = tl.full([WORDS], float("-inf"), tl.float32)
        tl.store(target + token, banned, mask=mine)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["each"])
def _adjust_kernel(
    logits, rows, asks, temperature, top_k, top_p, min_p, repetition, frequency, presence,
    num_output, counts, allowed, entry_count, entry_token, entry_value, entry_until, word_ban,
    history_start, history_token, history_value,
    adjusted, group_max, split_max, split_min, split_mass, bad,
    vocab, splits, groups, mask_words, entries, each, greedy_below,
    SPLIT: tl.constexpr, GROUP: tl.constexpr, WORDS: tl.constexpr, CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    begin_early(EARLY)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows + row).to(tl.int64)
    if slot < 0:
        return
    ask = tl.load(asks + slot)
    warmth = tl.load(temperature + slot)
    p = tl.load(top_p + slot)
    limited = is_limited(
        warmth, tl.load(top_k + slot), p, tl.load(min_p + slot), vocab, greedy_below
    )
    asked = adjusted_row(
        logits, adjusted, counts, allowed, repetition, frequency, presence, ask, row, slot, vocab,
        mask_words,
    )  # fmt: skip
    written = is_written(ask)
    if (written == 0) & (limited == 0):
        return
    _, target, _, mask_row, _, factor, inverse, per_count, once = asked
    scale = 1.0 / tl.maximum(warmth, greedy_below)
    first_entry = 0
    end_entry = 0
    if (ask & _HISTORY) != 0:
        first_entry = tl.load(history_start + row)
        end_entry = tl.load(history_start + row + 1)
    begin = tl.program_id(1) * each
    lane = tl.arange(0, SPLIT)
    raw, count = _load_split(asked, begin * SPLIT + lane, begin * SPLIT + lane < vocab)
    for split in range(begin, tl.minimum(begin + each, splits)):
        first = split * SPLIT
        ids = first + lane
        inside = ids < vocab
        after = ids + SPLIT
        more = (after < vocab) & (split + 1 < begin + each)
        raw_ahead, count_ahead = _load_split(asked, after, more)
        z = raw.to(tl.float32)
        given = z
        if ask != 0:
            z = penalised(z, count.to(tl.int32), factor, inverse, per_count, once)
            if (ask & ALLOWED) != 0:
                word = tl.load(mask_row + ids // 32, mask=inside, other=0)
                z = tl.where(((word >> (ids % 32)) & 1) != 0, z, float("-inf"))
            if written:
                tl.store(target + ids, z, mask=inside)
                _with_entries(
                    asked, first, vocab, slot, num_output, entry_count, entry_token, entry_value,
                    entry_until, word_ban, entries, first_entry, end_entry, history_token,
                    history_value, SPLIT, WORDS, CHUNK,
                )  # fmt: skip
                z = tl.load(target + ids, mask=inside, other=0.0)
            # One sum says whether anything was not finite or has become +inf.
            given = tl.where(z < float("inf"), given, float("inf"))
        total = tl.sum(given, 0)
        why = 0
        if is_finite(total) == 0:
            why = reason_of(asked[0], first, tl.minimum(first + SPLIT, vocab), SPLIT)
        at = row * splits + split
        tl.store(bad + at, why)
        if limited:
            if first + SPLIT > vocab:
                z = tl.where(inside, z, float("-inf"))
            highest = tl.max(tl.reshape(z, [SPLIT // GROUP, GROUP]), 1)
            group = split * (SPLIT // GROUP) + tl.arange(0, SPLIT // GROUP)
            tl.store(group_max + row * groups + group, highest, mask=group < groups)
            top = tl.max(highest, 0)
            tl.store(split_max + at, top)
            low = tl.min(tl.where(z > float("-inf"), z, float("inf")), 0)
            tl.store(split_min + at, low)
            if p < 1.0:
                mass = tl.sum(tl.exp2((z - top) * (scale * _LOG2_E)), 0)
                tl.store(split_mass + at, tl.where(top > float("-inf"), mass, 0.0))
        raw = raw_ahead
        count = count_ahead


def adjust_logits(
    logits: Tensor,
    rows: Tensor,
    slots: SamplerSlots,
    space: SamplerSpace,
    history: HistoryEntries,
    greedy_below: float,
) -> None:
    """Survey the rows with a limit, and write anew those that need it.

    logits: [N, V] contiguous, fp32, bf16 or fp16, not changed; rows: [N] int32, the slot of each
    row, -1: none; history: ``no_history`` where no slot asks for any. Writes ``space`` but for its
    floors.
    """
    count, vocab = logits.shape
    splits = vocab_splits(vocab)
    each = triton.cdiv(splits, max(1, _PROGRAMS_EACH * multiprocessors() // count))
    _adjust_kernel[(count, triton.cdiv(splits, each))](
        logits, rows, slots.asks, slots.temperature, slots.top_k, slots.top_p, slots.min_p,
        slots.repetition, slots.frequency, slots.presence, slots.num_output, slots.counts,
        slots.allowed, slots.entry_count, slots.entry_token, slots.entry_value, slots.entry_until,
        slots.word_ban, *history, space.adjusted, space.group_max, space.split_max, space.split_min,
        space.split_mass, space.bad, vocab, splits, groups_of(vocab), slots.allowed.shape[1],
        slots.entry_token.shape[1], each, greedy_below, SPLIT, GROUP, WORDS, _CHUNK, EARLY,
        num_warps=8, maxnreg=80, launch_pdl=EARLY,
    )  # fmt: skip
