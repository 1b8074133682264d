"""Choosing the next token of every row, and advancing the slots.

The rule is that of ``penstock.kernels.sampling``: the highest logit, or Gumbel-max over logits /
temperature with noise that is a hash of (seed, choice, output position, token). The vocabulary is
cut into splits, so that few rows fill the GPU too; each logit is read once. The second kernel
takes the best of the splits, writes the token for the host, and makes it the slot's last token.

A split is read tile by tile, the next one while the present one is looked at. Tokens lie in lanes
of eight: a lane's highest logit and lowest hash bound what its tokens reach, and only tiles with a
lane that may beat the best so far get the noise itself. So the result is exact.

Behind ``adjust_logits`` and ``keep_floor`` the rows that are chosen already are passed by; of the
others, the logits are adjusted as they are read, or read as they were adjusted. Rows that ask for
nothing are drawn by the same instructions as without, so from the same bits.
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
    load_adjusted,
    penalised,
    reason_of,
)
from penstock.kernels.gpu.device_facts import multiprocessors
from penstock.kernels.gpu.early_launch import EARLY, begin_early
from penstock.kernels.gpu.gumbel import (
    LEAST,
    draw_key,
    least_noise,
    least_noise_of,
    may_win,
    with_noise,
)
from penstock.kernels.gpu.sampler_memory import (
    SPLIT,
    SamplerSlots,
    SamplerSpace,
    vocab_splits,
)
from penstock.kernels.sampling.choose import NOT_FINITE, NOTHING_LEFT

_LANES = 128
"""Tokens of a tile where rows are few, four warps wide: their programs have few tiles each."""
_MANY_LANES = 64
"""Tokens of a tile where rows are many: one warp, which waits for no other."""
_FEW_EACH = 8
"""Programs of four warps for each multiprocessor."""
_PROGRAMS_EACH = 32
"""Programs of one warp, likewise. Within a split most tokens are passed by: the longer it is,
the more."""
_LEAST_PADDED = 64
"""One kernel commits whatever the number of splits."""
_PLAIN = tl.constexpr(0)
_CHEAP = tl.constexpr(1)
_WRITTEN = tl.constexpr(2)
"""Kinds of rows: as the model gave them; adjusted while they are read; written anew."""
_NOTHING_LEFT = tl.constexpr(NOTHING_LEFT)
_NOT_FINITE = tl.constexpr(NOT_FINITE)


@triton.jit
def _load_tile(asked, start, end, LANES: tl.constexpr, KIND: tl.constexpr, CUT: tl.constexpr):
    """Logits, counts and mask words of the tile at ``start``. CUT: up to ``end``; else nothing
    where it does not end before."""
    source, written, counts, allowed, ask, _, _, _, _ = asked
    begin = start + tl.arange(0, LANES) * 8
    ids = begin[:, None] + tl.arange(0, 8)[None, :]
    if CUT:
        inside = ids < end
        begins = begin < end
    else:
        inside = start + LANES * 8 <= end
        begins = start + LANES * 8 <= end
    count = 0
    word = -1
    if KIND == _WRITTEN:
        raw = tl.load(written + ids, mask=inside, other=0.0)
    else:
        raw = tl.load(source + ids, mask=inside, other=0.0)
    if KIND == _CHEAP:
        count = tl.load(counts + ids, mask=inside & ((ask & PENALTIES) != 0), other=0)
        word = tl.load(allowed + begin // 32, mask=begins & ((ask & ALLOWED) != 0), other=-1)
    return raw, count, word


@triton.jit
def _best_of_near(
    asked, begin, end, floor, scale, drawn, key_add, key_factor, top, token, KIND: tl.constexpr
):  # fmt: skip
    """``top`` and ``token`` after a tile with a token that may win, read again by columns: few
    registers, and noise only for the columns that need it."""
    for column in range(8):
        ids = begin + column
        inside = ids < end
        if KIND == _CHEAP:
            z = load_adjusted(asked, ids, inside)
        elif KIND == _WRITTEN:
            z = tl.load(asked[1] + ids, mask=inside, other=float("-inf"))
        else:
            z = tl.load(asked[0] + ids, mask=inside, other=float("-inf")).to(tl.float32)
        if KIND != _PLAIN:
            z = tl.where(z >= floor, z, float("-inf"))
        value = z
        near = 1
        if drawn:
            value = z * scale
            if KIND != _PLAIN:
                value = tl.where(z > float("-inf"), tl.maximum(value, LEAST), value)
            least = least_noise_of(ids, key_add, key_factor)
            near = tl.max(may_win(value, least, top).to(tl.int32), 0)
        if near != 0:
            if drawn:
                value = with_noise(z, scale, ids, key_add, key_factor)
                if KIND != _PLAIN:
                    value = tl.where(z > float("-inf"), tl.maximum(value, LEAST), value)
            value = tl.where(value >= top, value, float("-inf"))
            best = tl.max(value, 0)
            found = tl.min(tl.where(value == best, ids, 0x7FFFFFFF), 0)
            # Among equals the lowest id wins, which may be in a later column.
            found = tl.where(best == top, tl.minimum(found, token), found)
            token = tl.where(best >= top, found, token)
            top = tl.maximum(top, best)
    return top, token


@triton.jit
def _best_of_tile(
    asked, raw, count, word, start, end, floor, scale, drawn, key_add, key_factor, top, token,
    sums, LANES: tl.constexpr, KIND: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """``top``, ``token`` and ``sums`` after one tile more."""
    _, _, _, _, _, repetition, inverse, frequency, presence = asked
    begin = start + tl.arange(0, LANES) * 8
    place = tl.arange(0, 8)
    ids = begin[:, None] + place[None, :]
    z = raw.to(tl.float32)
    if KIND == _PLAIN:
        sums += tl.sum(z, 1)
    if KIND == _CHEAP:
        given = z
        z = penalised(z, count.to(tl.int32), repetition, inverse, frequency, presence)
        bit = (word >> (begin % 32))[:, None] >> place[None, :]
        z = tl.where((bit & 1) != 0, z, float("-inf"))
        sums += tl.sum(tl.where(z < float("inf"), given, float("inf")), 1)
    if KIND != _PLAIN:
        z = tl.where(z >= floor, z, float("-inf"))
    if CUT:
        z = tl.where(ids < end, z, float("-inf"))
    highest = tl.max(z, 1)
    if drawn:
        value = highest * scale
        if KIND != _PLAIN:
            value = tl.where(highest > float("-inf"), tl.maximum(value, LEAST), value)
        steps = place.to(tl.uint32) * key_factor
        least = least_noise(begin.to(tl.uint32) * key_factor + key_add, steps)
        near = tl.max(may_win(value, least, top).to(tl.int32), 0)
    else:
        near = tl.max((highest > top).to(tl.int32), 0)
    if near != 0:
        top, token = _best_of_near(
            asked, begin, end, floor, scale, drawn, key_add, key_factor, top, token, KIND
        )
    return top, token, sums


@triton.jit
def _best_of_split(
    asked, first, end, floor, scale, drawn, key_add, key_factor,
    LANES: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """The best of a split, its token, and a sum that is finite where all logits are."""
    top = float("-inf")
    token = first
    sums = tl.zeros([LANES], tl.float32)
    whole = first + (end - first) // (LANES * 8) * (LANES * 8)
    raw, count, word = _load_tile(asked, first, whole, LANES, KIND, False)
    for start in range(first, whole, LANES * 8):
        raw_ahead, count_ahead, word_ahead = _load_tile(
            asked, start + LANES * 8, whole, LANES, KIND, False
        )
        top, token, sums = _best_of_tile(
            asked, raw, count, word, start, end, floor, scale, drawn, key_add, key_factor, top,
            token, sums, LANES, KIND, False,
        )  # fmt: skip
        raw = raw_ahead
        count = count_ahead
        word = word_ahead
    if whole < end:
        raw, count, word = _load_tile(asked, whole, end, LANES, KIND, True)
        top, token, sums = _best_of_tile(
            asked, raw, count, word, whole, end, floor, scale, drawn, key_add, key_factor, top,
            token, sums, LANES, KIND, True,
        )  # fmt: skip
    return top, token, tl.sum(sums, 0)


@triton.jit(do_not_specialize=["splits"])
def _best_kernel(
    logits, rows, temperature, seed_low, seed_high, num_output, best, token, asks, repetition,
    frequency, presence, counts, allowed, adjusted, floors, chosen, reached, vocab, mask_words,
    splits, split_length, greedy_below,
    LANES: tl.constexpr, LIMITS: tl.constexpr, FIRST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin_early(EARLY)
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    slot = tl.load(rows + row).to(tl.int64)
    at = row * splits + split
    ask = 0
    floor = float("-inf")
    if LIMITS:
        known = tl.load(chosen + row)
        known_top = tl.load(reached + row)
        floor = tl.load(floors + row)
    if slot < 0:
        return
    if LIMITS:
        if known >= 0:
            tl.store(best + at, tl.where(split == 0, known_top, float("-inf")))
            tl.store(token + at, tl.where(split == 0, known, 0))
            return
        ask = tl.load(asks + slot)
    warmth = tl.load(temperature + slot)
    drawn = warmth >= greedy_below
    key_add, key_factor = draw_key(seed_low, seed_high, num_output, slot)
    if FIRST:
        key_add += key_factor * FIRST
    scale = tl.where(drawn, 1.0 / tl.maximum(warmth, greedy_below), 1.0)
    first = split * split_length
    end = tl.minimum(first + split_length, vocab)
    source = logits + row * vocab
    if LIMITS:
        asked = adjusted_row(
            logits, adjusted, counts, allowed, repetition, frequency, presence, ask, row, slot,
            vocab, mask_words,
        )  # fmt: skip
        if is_written(ask):
            top, found, total = _best_of_split(
                asked, first, end, floor, scale, drawn, key_add, key_factor, LANES, _WRITTEN
            )
        elif (ask != 0) | (floor > float("-inf")):
            top, found, total = _best_of_split(
                asked, first, end, floor, scale, drawn, key_add, key_factor, LANES, _CHEAP
            )
        else:
            top, found, total = _best_of_split(
                asked, first, end, floor, scale, drawn, key_add, key_factor, LANES, _PLAIN
            )
    else:
        asked = (source, source, source, source, 0, 1.0, 1.0, 0.0, 0.0)
        top, found, total = _best_of_split(
            asked, first, end, floor, scale, drawn, key_add, key_factor, LANES, _PLAIN
        )
    if is_finite(total) == 0:
        why = _NOT_FINITE
        if LIMITS:
            why = reason_of(source, first, end, LANES * 8)
        found = found | (why << 29)  # a token is less than this
    tl.store(best + at, top)
    tl.store(token + at, found)


@triton.jit
def best_of(value, found, inside):
    """Of the bests of some pieces of a row: the highest, the lowest token that reaches it, and why
    a piece has none. found: tokens with reasons in bits 29 and 30."""
    bad = tl.max(tl.where(inside, found >> 29, 0), 0)
    ids = found & 0x1FFFFFFF
    top = tl.max(value, 0)
    chosen = tl.min(tl.where(inside & (value == top), ids, 0x3FFFFFFF), 0)
    return top, tl.where(chosen == 0x3FFFFFFF, 0, chosen), bad


@triton.jit
def advance(row, slot, chosen, bad, last_token, position, num_output, result, max_rows):
    """Give a slot its token, and the host what it must know of it."""
    tl.store(result + row, chosen)
    tl.store(result + max_rows + row, bad)
    tl.store(last_token + slot, chosen)
    tl.store(num_output + slot, tl.load(num_output + slot) + 1)
    tl.store(position + slot, tl.load(position + slot) + 1)


@triton.jit(do_not_specialize=["splits"])
def _commit_kernel(
    best, token, rows, last_token, position, num_output, result, splits, max_rows,
    PADDED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin_early(EARLY)
    row = tl.program_id(0)
    slot = tl.load(rows + row)
    if slot < 0:
        return
    split = tl.arange(0, PADDED)
    inside = split < splits
    value = tl.load(best + row * splits + split, mask=inside, other=float("-inf"))
    found = tl.load(token + row * splits + split, mask=inside, other=0)
    top, chosen, bad = best_of(value, found, inside)
    # Where every token is banned, nothing is the best.
    bad = tl.maximum(bad, tl.where(top == float("-inf"), _NOTHING_LEFT, 0))
    advance(row, slot, chosen, bad, last_token, position, num_output, result, max_rows)


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
    first: int = 0,
) -> int:
    """The best token of each split of each row. Returns the number of splits of a row.

    logits: [N, V] contiguous; rows: [N] int32, the slot of each row, -1: none. By slot:
    temperature fp32; seed_low and seed_high, the words of splitmix64 over (seed, choice), and
    num_output, int32. best: fp32, token: int32, each at least N * ``vocab_splits(V)``; bits 29
    and 30 of a token say why its split has none, see ``Choice.bad``. slots, space: as they were
    given to ``adjust_logits`` and ``keep_floor`` before; ``None`` if no row asks for either.
    first: the token of the first column, whose noise is that of this token; the columns that are
    written to ``token`` count from 0 all the same.
    """
    count, vocab = logits.shape
    splits, length, lanes, warps = vocab_splits(vocab), SPLIT, _LANES, 4
    if count * splits > _FEW_EACH * multiprocessors():
        lanes, warps = _MANY_LANES, 1
        wanted = max(1, min(splits, _PROGRAMS_EACH * multiprocessors() // count))
        length = triton.cdiv(triton.cdiv(vocab, wanted), 8 * lanes) * 8 * lanes
        splits = triton.cdiv(vocab, length)
    asked: tuple[Tensor | None, ...] = (None,) * 10
    if slots is not None and space is not None:
        asked = (
            slots.asks, slots.repetition, slots.frequency, slots.presence, slots.counts,
            slots.allowed, space.adjusted, space.floor, space.chosen, space.reached,
        )  # fmt: skip
    _best_kernel[(count, splits)](
        logits, rows, temperature, seed_low, seed_high, num_output, best, token, *asked, vocab,
        0 if slots is None else slots.allowed.shape[1], splits, length, greedy_below, lanes,
        space is not None, first, EARLY, num_warps=warps, maxnreg=64, launch_pdl=EARLY,
    )  # fmt: skip
    return splits


def commit(
    best: Tensor,
    token: Tensor,
    rows: Tensor,
    last_token: Tensor,
    position: Tensor,
    num_output: Tensor,
    result: Tensor,
    count: int,
    splits: int,
) -> None:
    """Take the best of a row's splits and advance its slot by one position and one output.

    best, token: [count * splits], from ``draw``; result: [2, R] int32: tokens, and why the
    row has none, see ``Choice.bad``. Rows with slot -1 are left alone.
    """
    _commit_kernel[(count,)](
        best, token, rows, last_token, position, num_output, result, splits, result.shape[1],
        max(_LEAST_PADDED, triton.next_power_of_2(splits)), EARLY, num_warps=1, launch_pdl=EARLY,
    )  # fmt: skip
