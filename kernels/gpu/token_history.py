"""What follows from the tokens that were chosen: counts for penalties, and bans by bad words.

The rules are those of ``penstock.kernels.sampling.penalties`` and ``bad_words``, the arrays those
of ``WordTable``. ``ban_words`` runs before ``adjust_logits``, ``add_tokens`` after ``commit``, so
the next step can be on the stream before the host has seen a token.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.early_launch import EARLY, begin_early
from penstock.kernels.gpu.sampler_memory import ASKS_BAD_WORDS, ASKS_PENALTIES, SamplerSlots
from penstock.kernels.sampling.bad_words import RING, WORD_TOKENS, WORDS

_PENALTIES = tl.constexpr(ASKS_PENALTIES)
_BAD_WORDS = tl.constexpr(ASKS_BAD_WORDS)


@triton.jit
def _ban_words_kernel(
    rows, asks, num_output, word_tokens, word_starts, ring, word_ban,
    WORDS: tl.constexpr, WORD_TOKENS: tl.constexpr, RING: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin_early(EARLY)
    slot = tl.load(rows + tl.program_id(0)).to(tl.int64)
    if slot < 0:
        return
    if (tl.load(asks + slot) & _BAD_WORDS) == 0:
        return
    output = tl.load(num_output + slot)
    word = tl.arange(0, WORDS)
    begin = tl.load(word_starts + slot * (WORDS + 1) + word)
    last = tl.load(word_starts + slot * (WORDS + 1) + word + 1) - 1
    before = last - begin
    matches = (before >= 0) & (before <= output)
    tokens = word_tokens + slot * WORD_TOKENS
    longest = tl.max(tl.where(matches, before, 0), 0)
    for back in range(1, longest + 1):
        compared = matches & (back <= before)
        wanted = tl.load(tokens + last - back, mask=compared, other=0)
        latest = tl.load(ring + slot * RING + (output - back) % RING)
        matches = matches & ((back > before) | (wanted == latest))
    banned = tl.load(tokens + last, mask=matches, other=-1)
    tl.store(word_ban + slot * WORDS + word, banned)


def ban_words(
    rows: Tensor,
    count: int,
    slots: SamplerSlots,
    word_tokens: Tensor,
    word_starts: Tensor,
    ring: Tensor,
) -> None:
    """Write ``slots.word_ban`` of the slots that have bad words.

    rows: [N] int32, the slot of each row, -1: none; count: rows of the step. By slot, int32:
    word_tokens [S, WORD_TOKENS], word_starts [S, WORDS + 1], ring [S, RING].
    """
    _ban_words_kernel[(count,)](
        rows, slots.asks, slots.num_output, word_tokens, word_starts, ring, slots.word_ban, WORDS,
        WORD_TOKENS, RING, EARLY, num_warps=4, launch_pdl=EARLY,
    )  # fmt: skip


@triton.jit
def _add_tokens_kernel(
    rows, asks, num_output, last_token, counts, ring, vocab,
    RING: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin_early(EARLY)
    slot = tl.load(rows + tl.program_id(0)).to(tl.int64)
    if slot < 0:
        return
    ask = tl.load(asks + slot)
    token = tl.load(last_token + slot)
    if (ask & _PENALTIES) != 0:
        at = counts + slot * vocab + token
        before = tl.load(at).to(tl.int32)
        more = ((before & 0x7FFF) < 0x7FFF).to(tl.int32)
        tl.store(at, (before + more).to(tl.int16))
    if (ask & _BAD_WORDS) != 0:
        index = tl.load(num_output + slot) - 1
        tl.store(ring + slot * RING + index % RING, token)


def add_tokens(
    rows: Tensor, count: int, slots: SamplerSlots, last_token: Tensor, ring: Tensor
) -> None:
    """Count each row's newest token, and put it into its slot's ring, where the slot asks for it.

    Comes after ``commit``, which wrote last_token [S] int32 and advanced ``slots.num_output``.
    rows: [N] int32, the slot of each row, -1: none; no slot twice. ring: [S, RING] int32.
    """
    _add_tokens_kernel[(count,)](
        rows, slots.asks, slots.num_output, last_token, slots.counts, ring,
        slots.counts.shape[1], RING, EARLY, num_warps=1, launch_pdl=EARLY,
    )  # fmt: skip
