"""Counts for penalties beside drafts: what a row of drafts counts ahead of its draw, and what its
slot counts once drafts are accepted.

The rules are those of ``penstock.kernels.sampling.penalties``, the counts those of
``SamplerSlots.counts``. A slot's first row is counted by ``add_tokens`` as in any step. So the row
behind ``n`` drafts counts the last ``n - 1`` of them besides: that it is read at all means that the
first of the drafts is what the slot's first row drew.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.guessed_drafts import DRAWN, ENTRY, FIRST, Outcome
from penstock.kernels.gpu.sampler_memory import ASKS_PENALTIES, SamplerSlots

_PENALTIES = tl.constexpr(ASKS_PENALTIES)
_FIRST, _DRAWN, _ENTRY = tl.constexpr(FIRST), tl.constexpr(DRAWN), tl.constexpr(ENTRY)
_MOST = tl.constexpr(0x7FFF)


@triton.jit
def _count(counts, token):
    """Count a token once more, up to the most that a count holds."""
    tl.debug_barrier()
    before = tl.load(counts + token).to(tl.int32)
    more = ((before & _MOST) < _MOST).to(tl.int32)
    tl.store(counts + token, (before + more).to(tl.int16))


@triton.jit
def _count_ahead_kernel(tokens, before, asks, counts, vocab):
    row = tl.program_id(0).to(tl.int64)
    if (tl.load(asks + row) & _PENALTIES) != 0:
        for back in range(tl.load(before + row).to(tl.int32)):
            _count(counts + row * vocab, tl.load(tokens + row - back))


@triton.jit
def _count_accepted_kernel(entries, brought, result, drawn, asks, counts, vocab):
    number = tl.program_id(0)
    entry = entries + number * _ENTRY
    slot = tl.load(entry).to(tl.int64)
    if slot < 0:
        return
    if (tl.load(asks + slot) & _PENALTIES) == 0:
        return
    row = counts + slot * vocab
    tokens = tl.load(brought + number)
    if tokens == 0:
        committed = row + tl.load(result + tl.load(entry + _FIRST))
        tl.store(committed, (tl.load(committed).to(tl.int32) - 1).to(tl.int16))
    draws = drawn + tl.load(entry + _DRAWN)
    for place in range(tokens - 1):
        _count(row, tl.load(draws + place))


def count_ahead(tokens: Tensor, before: Tensor, columns: SamplerSlots) -> None:
    """Add to ``columns.counts``, row by row, what each row of drafts reads of its text beyond its
    slot's counts.

    tokens: [N] int32, that rows read, slot by slot; before: [N] int64, drafts between each row and
    its slot's first draft; columns: by row.
    """
    _count_ahead_kernel[(len(tokens),)](
        tokens, before, columns.asks, columns.counts, columns.counts.shape[1], num_warps=1
    )


def count_accepted(
    entries: Tensor, outcome: Outcome, result: Tensor, drawn: Tensor, slots: SamplerSlots
) -> None:
    """Count what each slot got beside the token of its first row, which is counted already, and is
    taken back where it got none. Comes behind ``accept_drafts``; see there for what is given."""
    _count_accepted_kernel[(len(entries),)](
        entries, outcome.counts, result, drawn, slots.asks, slots.counts, slots.counts.shape[1],
        num_warps=1,
    )  # fmt: skip
