"""How the attention of a decode step is cut evenly over the programs that compute it.

The work is a list of items, one a (row, KV head, tile of ``KEYS`` cached positions), in that order;
a row has one tile at least, padding none. Positions of a prefix that rows share (``shared_prefix``)
are left out where a step asks for that: tiles begin behind them. Each program gets a split of the
list, none longer than another by more than one item: stream-K (Osama et al. 2023), for attention
first in "Lean attention" (Sanovar et al. 2024). So rows of any lengths keep all multiprocessors
busy to the end, and a row may begin in one program and end in another. Reference: the list itself,
as the kernel's test makes it.
"""

from __future__ import annotations

import triton
import triton.language as tl

FIELDS = 8
"""int32 numbers of each program: its first item's row, KV head and tile; how many items it has; how
many each program has at least, and how many programs have one more; slot and cached positions of
the first item's row."""
PROGRAMS_EACH = 4
"""Programs that one program of the plan's kernel plans for."""


# One compiled kernel serves every step: nothing depends on these integers' values.
@triton.jit(do_not_specialize=["count", "prefixed", "programs"])
def plan_kernel(
    rows, last_position, shared_lengths, plan, count, prefixed, programs,
    KV_HEADS: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Plan for ``programs`` programs and the first ``count`` of ``rows``, 1 to ``ROWS``: slots,
    and behind them -1 for padding. shared_lengths: [slots], positions of each slot that are not the
    its suffix's, or ``None``; left out if ``prefixed`` is not 0. plan: [programs, FIELDS]. Grid:
    ceil(programs / EACH)."""
    row = tl.arange(0, ROWS)
    slot = tl.load(rows + row, mask=row < count, other=-1)
    cached = tl.load(last_position + slot, mask=slot >= 0, other=0)
    length = cached
    if shared_lengths is not None:
        counts = (slot >= 0) & (prefixed != 0)
        length -= tl.load(shared_lengths + slot, mask=counts, other=0)
    tiles = tl.where(slot >= 0, tl.maximum(tl.cdiv(length, KEYS), 1), 0)
    ends = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0) * KV_HEADS
    each = total // programs
    longer = total % programs
    for part in range(EACH):
        program = tl.program_id(0) * EACH + part
        begin = program * each + tl.minimum(program, longer)
        before = ends * KV_HEADS <= begin
        at = tl.sum(before.to(tl.int32), 0)
        base = tl.sum(tl.where(before, tiles, 0), 0) * KV_HEADS
        its_tiles = tl.maximum(tl.sum(tl.where(row == at, tiles, 0), 0), 1)
        record = plan + program * 8
        valid = program < programs
        tl.store(record, at, mask=valid)
        tl.store(record + 1, (begin - base) // its_tiles, mask=valid)
        tl.store(record + 2, (begin - base) % its_tiles, mask=valid)
        tl.store(record + 3, each + (program < longer).to(tl.int32), mask=valid)
        tl.store(record + 4, each, mask=valid)
        tl.store(record + 5, longer, mask=valid)
        tl.store(record + 6, tl.sum(tl.where(row == at, slot, 0), 0), mask=valid)
        tl.store(record + 7, tl.sum(tl.where(row == at, cached, 0), 0), mask=valid)
