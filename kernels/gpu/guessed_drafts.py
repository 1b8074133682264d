"""Drafts of a step that is launched while the steps before it run.

The host guesses how a text goes on from the last token that it knows. When the step begins, the
device knows how far the text has come since: ``place_drafts`` takes the drafts from there on out
of the guess, or none where the text has gone on otherwise. Behind the draws ``accept_drafts``
counts how many drafts are what was drawn and advances the slot by as many. So the host need not
hear of either before it launches the next step. References: ``placed`` and ``accepted``, in plain
Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.sampling import NOT_FINITE

GUESSED = 64
"""Tokens of a guess, at most."""
SLOT, KNOWN, COUNT, DRAFTS, FIRST, ROW, DRAWN, TOKENS = range(8)
"""What an entry holds ahead of its tokens: its slot, or -1; the position of the last token that the
host knows; the number of tokens guessed; the drafts that its slot has; the step's row of the slot's
last token, and of the first draft; where the draws of drafts begin. All int32."""
ENTRY = TOKENS + GUESSED
MOST_DRAFTS = 31
DISAGREED = -1
"""In place of a number of drafts: the text has gone on otherwise than guessed."""
_ROWS = tl.constexpr(MOST_DRAFTS + 1)
_KNOWN, _COUNT, _DRAFTS = tl.constexpr(KNOWN), tl.constexpr(COUNT), tl.constexpr(DRAFTS)
_FIRST, _ROW, _DRAWN = tl.constexpr(FIRST), tl.constexpr(ROW), tl.constexpr(DRAWN)
_TOKENS, _ENTRY, _DISAGREED = tl.constexpr(TOKENS), tl.constexpr(ENTRY), tl.constexpr(DISAGREED)
_NOT_FINITE = tl.constexpr(NOT_FINITE)
_TABLE = tl.constexpr(256)
"""Entries of a block table that are copied at once."""


class PlannedRows(NamedTuple):
    """The rows of a step as the host knows them, int32; behind them there is padding."""

    slots: Tensor
    """[M]: -1: padding."""
    ahead: Tensor
    """[M]: drafts between the slot's last token and the row's."""
    entries: Tensor
    """[M]: which entry holds the slot's guess; -1: it has none."""


class PlacedRows(NamedTuple):
    """The same rows as they are computed, int32. Each is a sequence of its own to attention, with a
    block table of its own: it attends to the positions ahead of it, which the rows of the same slot
    have written before."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    """[M]: -1: padding, or a draft that is not there."""
    own: Tensor
    """[M]: a row's number, or -1 likewise."""
    tables: Tensor
    """[groups, M, W]: the slots' block tables, as far as rows read them."""


class Outcome(NamedTuple):
    """Of each entry, int32."""

    counts: Tensor
    """Tokens that the slot gets; 0: none, since its first row is not finite, perhaps because of
    drafts."""
    live: Tensor
    """Drafts that were placed; ``DISAGREED``."""


@triton.jit
def _place_drafts_kernel(
    slots, ahead, entry_of, entries, last_token, position, table, tokens_out, positions_out,
    slots_out, own_out, tables_out, live, width, state_slots, most,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    group = tl.program_id(1)
    slot = tl.load(slots + row)
    there = slot >= 0
    slot = tl.maximum(slot, 0)
    drafts_ahead = tl.load(ahead + row)
    number = tl.load(entry_of + row)
    here = tl.load(position + slot)
    last = tl.load(last_token + slot)
    token = last
    if number >= 0:
        entry = entries + number * _ENTRY
        guessed = tl.load(entry + _COUNT)
        since = here - tl.load(entry + _KNOWN)
        at = tl.minimum(tl.maximum(since - 1, 0), _ENTRY - _TOKENS - 1)
        agrees = (since == 0) | ((since <= guessed) & (tl.load(entry + _TOKENS + at) == last))
        most_placed = tl.minimum(tl.load(entry + _DRAFTS), guessed - since)
        placed = tl.where(agrees, tl.maximum(most_placed, 0), 0)
        if drafts_ahead > 0:
            there = there & (drafts_ahead <= placed)
            token = tl.load(entry + _TOKENS + since + drafts_ahead - 1, mask=there, other=0)
        elif group == 0:
            tl.store(live + number, tl.where(agrees, placed, _DISAGREED))
    if group == 0:
        tl.store(tokens_out + row, tl.where(there, token, 0))
        tl.store(positions_out + row, tl.where(there, here + drafts_ahead, 0))
        tl.store(slots_out + row, tl.where(there, slot, -1))
        tl.store(own_out + row, tl.where(there, row, -1))
    needed = tl.where(there, tl.minimum((here + drafts_ahead) // BLOCK_SIZE + 1, width), 0)
    source = table + (group * state_slots + slot).to(tl.int64) * width
    target = tables_out + (group * most + row).to(tl.int64) * width
    for begin in range(0, needed, _TABLE):
        index = begin + tl.arange(0, _TABLE)
        block = tl.load(source + index, mask=index < needed, other=0)
        tl.store(target + index, block, mask=index < needed)


@triton.jit(do_not_specialize=["max_rows", "max_drawn"])
def _accept_drafts_kernel(
    entries, last_token, position, num_output, tokens, result, drawn, counts, live, max_rows,
    max_drawn,
):  # fmt: skip
    number = tl.program_id(0)
    entry = entries + number * _ENTRY
    slot = tl.load(entry)
    if slot < 0:
        return
    placed = tl.maximum(tl.load(live + number), 0)
    draws = drawn + tl.load(entry + _DRAWN)
    first = tl.load(last_token + slot)
    bad = tl.load(result + max_rows + tl.load(entry + _FIRST))
    ahead = tl.arange(0, _ROWS)
    inside = ahead < placed
    draft = tl.load(tokens + tl.load(entry + _ROW) + ahead, mask=inside, other=-1)
    before_it = tl.load(draws + ahead - 1, mask=inside & (ahead > 0), other=0)
    before_it = tl.where(ahead == 0, first, before_it)
    why_none = tl.load(draws + max_drawn + ahead, mask=inside, other=0)
    agrees = inside & (draft == before_it) & (why_none == 0) & (bad == 0)
    accepted = tl.min(tl.where(agrees, _ROWS, ahead), 0)
    again = (bad == _NOT_FINITE) & (placed > 0)
    more = tl.where(again, -1, accepted)
    last = tl.load(draws + accepted - 1, mask=accepted > 0, other=0)
    last = tl.where(accepted > 0, last, first)
    last = tl.where(again, tl.load(tokens + tl.load(entry + _FIRST)), last)
    tl.store(last_token + slot, last)
    tl.store(position + slot, tl.load(position + slot) + more)
    tl.store(num_output + slot, tl.load(num_output + slot) + more)
    tl.store(counts + number, 1 + more)


def place_drafts(
    planned: PlannedRows,
    entries: Tensor,
    last_token: Tensor,
    position: Tensor,
    tables: Tensor,
    placed_rows: PlacedRows,
    outcome: Outcome,
    rows: int,
    block_size: int,
) -> None:
    """Write tokens, positions and block tables of the step's first ``rows`` rows, ahead of its
    layers; drafts that are not placed are padding.

    entries: [C, ENTRY] int32; last_token, position: by slot, int32; tables: [groups, S, W] int32,
    contiguous.
    """
    groups, slots, width = tables.shape
    _place_drafts_kernel[(rows, groups)](
        *planned, entries, last_token, position, tables, *placed_rows, outcome.live, width, slots,
        len(placed_rows.tokens), block_size, num_warps=4,
    )  # fmt: skip


def accept_drafts(
    entries: Tensor,
    last_token: Tensor,
    position: Tensor,
    num_output: Tensor,
    tokens: Tensor,
    result: Tensor,
    drawn: Tensor,
    outcome: Outcome,
) -> None:
    """Advance each entry's slot by the drafts that are what was drawn. Comes behind the commit of
    its first row and the draws of its drafts.

    tokens: ``PlacedRows.tokens``; result, drawn: [2, R] int32, tokens and why there are none, of
    slots' first rows and of drafts; last_token, position, num_output: by slot, int32.
    """
    _accept_drafts_kernel[(len(entries),)](
        entries, last_token, position, num_output, tokens, result, drawn, *outcome,
        result.shape[1], drawn.shape[1], num_warps=1,
    )  # fmt: skip


def placed(guess: Sequence[int], since: int, last: int, most: int) -> list[int] | None:
    """The drafts behind ``last``, which stands ``since`` tokens behind the last one that the guess
    knew of; ``None``: the text has gone on otherwise."""
    if since and (since > len(guess) or guess[since - 1] != last):
        return None
    return list(guess[since : since + most])


def accepted(drafts: Sequence[int], draws: Sequence[int], bad: Sequence[int]) -> int:
    """How many drafts are what was drawn. draws, bad: of the row ahead of the first draft and of
    each draft, one more than drafts."""
    count = 0
    while (
        count < len(drafts) and drafts[count] == draws[count] and not (bad[count] or bad[count + 1])
    ):
        count += 1
    return count
