"""The draw of rows whose vocabulary is divided among ranks: each rank finds the best of its own
tokens (``draw``), and of these bests, which are all that travels, every rank takes the best.

A best is two words: the logit with its noise, fp32, and the token, whose bits 29 and 30 say why
the rank has none (``Choice.bad``). Of equals the lowest token wins, as where one device has all
columns. Reference: ``penstock.kernels.sampling.shards``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.draw import advance, best_of
from penstock.kernels.gpu.early_launch import EARLY, begin_early
from penstock.kernels.sampling.choose import NOTHING_LEFT

_NOTHING_LEFT = tl.constexpr(NOTHING_LEFT)


@triton.jit(do_not_specialize=["splits", "first"])
def _own_best_kernel(
    best, token, rows, index, out, splits, first,
    INDEXED: tl.constexpr, PADDED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin_early(EARLY)
    row = tl.program_id(0)
    target = row
    if INDEXED:
        target = tl.load(index + row).to(tl.int32)
    slot = tl.load(rows + row)
    if slot < 0:
        tl.store(out + target * 2, -0x800000)  # the bits of -inf
        tl.store(out + target * 2 + 1, 0)
        return
    split = tl.arange(0, PADDED)
    inside = split < splits
    value = tl.load(best + row * splits + split, mask=inside, other=float("-inf"))
    found = tl.load(token + row * splits + split, mask=inside, other=0)
    top, chosen, bad = best_of(value, found, inside)
    tl.store(out + target * 2, top.to(tl.int32, bitcast=True))
    tl.store(out + target * 2 + 1, (chosen + first) | (bad << 29))


@triton.jit(do_not_specialize=["shares", "count"])
def _commit_kernel(
    parts, rows, last_token, position, num_output, result, shares, count, max_rows,
    PADDED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin_early(EARLY)
    row = tl.program_id(0)
    slot = tl.load(rows + row)
    if slot < 0:
        return
    share = tl.arange(0, PADDED)
    inside = share < shares
    at = parts + (share * count + row) * 2
    value = tl.load(at, mask=inside, other=-0x800000).to(tl.float32, bitcast=True)
    found = tl.load(at + 1, mask=inside, other=0)
    top, chosen, bad = best_of(value, found, inside)
    # Where every token of every rank is banned, nothing is the best.
    bad = tl.maximum(bad, tl.where(top == float("-inf"), _NOTHING_LEFT, 0))
    advance(row, slot, chosen, bad, last_token, position, num_output, result, max_rows)


def own_best(
    best: Tensor,
    token: Tensor,
    rows: Tensor,
    count: int,
    splits: int,
    out: Tensor,
    first: int = 0,
    index: Tensor | None = None,
) -> None:
    """Write the best of each row's splits to ``out`` [N, 2] int32, that of row i to row
    ``index[i]`` if there is an index, int64; of rows with slot -1 that nothing is found.

    best, token: [count * splits], from ``draw``; rows: int32, the slot of each; first: the token of
    the first column.
    """
    _own_best_kernel[(count,)](
        best, token, rows, index, out, splits, first, index is not None,
        triton.next_power_of_2(max(splits, 2)), EARLY, num_warps=1, launch_pdl=EARLY,
    )  # fmt: skip


def commit_shards(
    parts: Tensor,
    rows: Tensor,
    last_token: Tensor,
    position: Tensor,
    num_output: Tensor,
    result: Tensor,
) -> None:
    """Take the best of what the ranks have found, and advance the slots, as ``draw.commit`` does.

    parts: [shares, N, 2] int32, every rank's ``out`` of ``own_best``, in the order of their tokens;
    the others as ``draw.commit`` takes them.
    """
    shares, count, _ = parts.shape
    _commit_kernel[(count,)](
        parts, rows, last_token, position, num_output, result, shares, count, result.shape[1],
        triton.next_power_of_2(max(shares, 2)), EARLY, num_warps=1, launch_pdl=EARLY,
    )  # fmt: skip
