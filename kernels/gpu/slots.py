"""State of the batch on the GPU: one int32 array, changed by lists of (place, value).

The host knows which entries of block tables, rows and slots change in a step, and sends them in
one copy; ``scatter`` writes them. Everything else (last tokens, positions, draws) is advanced by
the kernels themselves, so that a step which changes nothing needs nothing from the host. What
depends on these lists alone is here, too: embedding rows, and bringing sampled rows forward.
References: torch's indexing, as each function's docstring has it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.early_launch import EARLY, begin_early

_BLOCK = 512
_MOVED_ROWS = _MOVED_COLUMNS = 64
"""What a program of ``bring_forward`` moves at once."""


@triton.jit(do_not_specialize=["count"])
def _scatter_kernel(state, changes, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    place = tl.load(changes + index, mask=inside, other=0)
    value = tl.load(changes + count + index, mask=inside, other=0)
    tl.store(state + place, value, mask=inside)


def scatter(state: Tensor, changes: Tensor, count: int) -> None:
    """``state[changes[i]] = changes[count + i]`` for i below ``count``.

    state: [S] int32; changes: int32, at least 2 * count. No place may occur twice.
    """
    if count:
        _scatter_kernel[(triton.cdiv(count, _BLOCK),)](state, changes, count, _BLOCK, num_warps=4)


@triton.jit
def _embed_kernel(
    table, tokens, rows, last_token, out,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, MULTIPLIER: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        # In this order: behind the next kernel may be one that reads, before it waits, what the
        # kernel ahead of this one wrote (``decode_splits_hopper``).
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row)
    if token < 0:
        slot = tl.load(rows + row)
        token = tl.load(last_token + tl.maximum(slot, 0))
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    value = tl.load(table + token.to(tl.int64) * WIDTH + column, mask=inside)
    if MULTIPLIER != 1.0:
        value = (value.to(tl.float32) * MULTIPLIER).to(value.dtype)
    tl.store(out + row * WIDTH + column, value, mask=inside)


def embed(
    table: Tensor,
    tokens: Tensor,
    rows: Tensor,
    last_token: Tensor,
    out: Tensor,
    multiplier: float = 1.0,
) -> None:
    """Embeddings of N rows: of ``tokens``, or of the last token of the row's slot where it is -1.

    table: [V, H]; tokens: [N] int32; rows: int32, read where a token is -1, slot -1 is padding;
    last_token: [slots] int32; out: [N, H] contiguous, multiplied by ``multiplier``.
    """
    count, width = out.shape
    if count:
        _embed_kernel[(count,)](
            table, tokens, rows, last_token, out, width, triton.next_power_of_2(width),
            float(multiplier), EARLY, num_warps=4, launch_pdl=EARLY,
        )  # fmt: skip


@triton.jit
def _move_rows(
    x, index, count, part, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Columns of one part, all rows: ``ROWS`` of them are read before one is written, and those
    after them are never written before they are read."""
    column = part * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    for begin in range(0, count, ROWS):
        row = begin + tl.arange(0, ROWS)
        source = tl.load(index + row, mask=row < count, other=0)
        moved = (row < count) & (source != row)
        if tl.max(moved.to(tl.int32), 0) != 0:
            mask = moved[:, None] & (column < WIDTH)
            value = tl.load(x + source.to(tl.int64)[:, None] * WIDTH + column, mask=mask)
            tl.debug_barrier()
            tl.store(x + row.to(tl.int64)[:, None] * WIDTH + column, value, mask=mask)


@triton.jit(do_not_specialize=["count"])
def _bring_forward_kernel(
    first, second, index, count, FIRST: tl.constexpr, SECOND: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin_early(EARLY)
    part = tl.program_id(0)
    parts = tl.cdiv(FIRST, COLUMNS)
    if part < parts:
        _move_rows(first, index, count, part, FIRST, ROWS, COLUMNS)
    else:
        _move_rows(second, index, count, part - parts, SECOND, ROWS, COLUMNS)


def bring_forward(first: Tensor, second: Tensor, index: Tensor) -> None:
    """Row ``index[i]`` of both becomes row i, in place; the other rows stay what they are, but for
    those that are overwritten.

    first: [N, F], second: [N, S], both contiguous; index: [M] int32, ascending but for entries
    ``index[i] == i``, and never below i.
    """
    count = len(index)
    if count:
        widths = first.shape[1], second.shape[1]
        parts = sum(triton.cdiv(width, _MOVED_COLUMNS) for width in widths)
        _bring_forward_kernel[(parts,)](
            first, second, index, count, *widths, _MOVED_ROWS, _MOVED_COLUMNS, EARLY,
            num_warps=4, launch_pdl=EARLY,
        )  # fmt: skip
