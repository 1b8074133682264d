"""Sums of few rows over the ranks of one host in one kernel, with the norm behind them.

    out = x₀ + x₁ + … + xₙ₋₁, of the ranks                        ``all_reduce``
    residual += that sum, then out = rms_norm(residual, weight)   ``all_reduce_add_norm``

Reference: ``penstock.kernels.all_reduce``. Every rank writes its rows into the memory of all ranks,
its own too, and adds up what comes into its own in the order of the ranks: one way over the link,
where a ring or a tree takes several. The way of the data is that of Lamport's one-writer registers,
as in TensorRT-LLM's one-shot all-reduce: a place that nobody has written holds -0.0, what is sent
holds 0.0 instead, so each value says of itself that it has come. No flag, fence or order of stores
is needed, and nothing of the host.

One program a row. A row's memory has three slots, and its *turn* is the slot of its next sum; turns
lie on the device, since graphs repeat their launches. In turn t a program writes to slot t of all
ranks, empties its own slot t + 2, and waits for slot t. Three are enough: who writes to my slot t
in turn t has finished turn t - 1, so he has what I sent in it; then my kernel of turn t - 2, which
emptied slot t, had ended, since the kernels of a stream follow each other. Rows take their turns by
themselves, and all ranks launch the same kernels in the same order: so sizes may follow each other
as they like.

A program that has waited for ``limit`` looks sets ``words`` [1] and [0]; where [0] is set by
whomsoever, all end soon, with sums that mean nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.device_facts import multiprocessors
from penstock.kernels.gpu.device_functions import rms_normed
from penstock.kernels.gpu.early_launch import EARLY, begin_early
from penstock.kernels.gpu.norm import store_and_norm, sum_of_parts

SLOTS = 3
STOP, GAVE_UP = 0, 1
"""Places in ``PeerRows.words``."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_ROWS = 128
_SUM, _ADD, _ADD_NORMED = 0, 1, 2
_STOP = tl.constexpr(STOP)
_GAVE_UP = tl.constexpr(GAVE_UP)
_SLOTS = tl.constexpr(SLOTS)
_LOOKS = tl.constexpr(1024)
"""After so many looks, some hundred microseconds, a program asks the host's memory whether to
end."""


class PeerRows(NamedTuple):
    """Memory by which the ranks of one host give each other rows, as one of them sees it."""

    rank: int
    peers: tuple[int, ...]
    """Address of each rank's memory as this device sees it, of ``memory_bytes``, once filled with
    ``empty_word``."""
    turns: Tensor
    """[rows] int32 on the device, zeros before the first sum."""
    words: Tensor
    """[2] int32, zeros, of the host but also in the device's reach."""
    rows: int
    """As many as a sum may have."""
    width: int
    """Of a row."""
    dtype: torch.dtype
    limit: int
    """Looks after which a program gives up."""

    def holds(self, x: Tensor) -> bool:
        """Whether rows like these [N, D] can be summed."""
        fits = len(x) <= self.rows and x.shape[1] == self.width and x.dtype == self.dtype
        return fits and x.is_contiguous()


def memory_bytes(ranks: int, rows: int, width: int, dtype: torch.dtype) -> int:
    return SLOTS * ranks * rows * width * dtype.itemsize


def most_rows(num_bytes: int, width: int, dtype: torch.dtype) -> int:
    """Rows of a sum of up to ``num_bytes``. All programs of a launch must run at a time, since each
    waits for the others' programs of its row."""
    return min(num_bytes // (width * dtype.itemsize), MOST_ROWS, multiprocessors())


def empty_word(dtype: torch.dtype) -> int:
    """32 bits of memory of this type that nobody has written to."""
    return 0x8000_0000 if dtype.itemsize == 4 else 0x8000_8000


@triton.jit
def _memory(address, WORD: tl.constexpr):
    return tl.multiple_of(address.to(tl.pointer_type(WORD)), 16)


@triton.jit(do_not_specialize=["rank", "limit", "rows"])
def _all_reduce_kernel(
    x, x_weight, residual, weight, out, own, peers, turns, words, rank, limit, rows, eps,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr, RANKS: tl.constexpr,
    ROWS: tl.constexpr, WORD: tl.constexpr, EMPTY: tl.constexpr, KIND: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    if KIND > 0:
        factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if KIND == 2:
        x_factor = tl.load(x_weight + column, mask=inside, other=0.0).to(tl.float32)
    begin_early(EARLY)
    at = row.to(tl.int64) * WIDTH + column
    turn = tl.load(turns + row)
    to = (turn * RANKS + rank) * (ROWS * WIDTH) + at
    value = sum_of_parts(x, at, inside, rows * WIDTH, PARTS)
    given = value.to(out.dtype.element_ty).to(WORD, bitcast=True)
    given = tl.where(given == EMPTY, 0, given).to(WORD)
    for peer in tl.static_range(RANKS):
        tl.store(_memory(peers[peer], WORD) + to, given, mask=inside)
    if KIND > 0:
        before = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)

    mine = _memory(own, WORD) + at
    later = mine + (turn + 2) % _SLOTS * (RANKS * ROWS * WIDTH)
    empty = tl.full((PADDED,), EMPTY, WORD)
    for peer in tl.static_range(RANKS):
        tl.store(later + peer * (ROWS * WIDTH), empty, mask=inside)

    now = mine + turn * (RANKS * ROWS * WIDTH)
    total = tl.zeros((PADDED,), tl.float32)
    waiting = 1
    looks = 0
    while waiting != 0:
        missing = tl.zeros((PADDED,), tl.int32)
        total = tl.zeros((PADDED,), tl.float32)
        for peer in tl.static_range(RANKS):
            word = tl.load(now + peer * (ROWS * WIDTH), mask=inside, other=0, volatile=True)
            missing |= (word == EMPTY).to(tl.int32)
            total += word.to(out.dtype.element_ty, bitcast=True).to(tl.float32)
        waiting = tl.max(missing, 0)
        looks += 1
        if looks % _LOOKS == 0:
            late = looks >= limit
            tl.store(words + _GAVE_UP, 1, mask=late)
            tl.store(words + _STOP, 1, mask=late)
            stopped = tl.load(words + _STOP, volatile=True) != 0
            waiting = tl.where(late | stopped, 0, waiting)

    if KIND == 0:
        tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
    else:
        if KIND == 2:
            total = rms_normed(total, x_factor, eps, WIDTH)
            total = total.to(residual.dtype.element_ty).to(tl.float32)
        store_and_norm(before + total, factor, residual, out, at, inside, eps, WIDTH)
    tl.store(turns + row, (turn + 1) % _SLOTS)


def all_reduce(x: Tensor, out: Tensor, shared: PeerRows) -> None:
    """out = the sum of ``x`` over the ranks.

    x: [N, D], or [P, N, D], parts whose sum is this rank's x; out: [N, D], which may be x. Both are
    contiguous, ``out`` of the type and no larger than what ``shared`` holds. All ranks must call
    it alike.
    """
    _launch(x, None, None, None, 0.0, out, shared, _SUM)


def all_reduce_add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    shared: PeerRows,
    x_weight: Tensor | None = None,
) -> None:
    """``residual += sum of x over the ranks``, or its norm, rounded to the type of ``residual``,
    then out = rms_norm(residual).

    x: as for ``all_reduce``; residual, out: [N, D]; weight: [D]; x_weight: [D], of the norm of the
    sum, if it has one.
    """
    kind = _ADD if x_weight is None else _ADD_NORMED
    _launch(x, x_weight, residual, weight, eps, out, shared, kind)


def _launch(
    x: Tensor,
    x_weight: Tensor | None,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    out: Tensor,
    shared: PeerRows,
    kind: int,
) -> None:
    rows, width = out.shape
    if not shared.holds(out):
        raise ValueError(
            f"{list(out.shape)} {out.dtype}: the ranks share memory for up to {shared.rows} rows "
            f"of {shared.width} {shared.dtype}"
        )
    if not rows:
        return
    wide, padded = shared.dtype.itemsize == 4, triton.next_power_of_2(width)
    _all_reduce_kernel[(rows,)](
        x, x_weight, residual, weight, out, shared.peers[shared.rank], shared.peers, shared.turns,
        shared.words, shared.rank, shared.limit, rows, eps, width, padded,
        len(x) if x.ndim == 3 else 1, len(shared.peers), shared.rows,
        tl.int32 if wide else tl.int16, -(1 << 31) if wide else -(1 << 15), kind, EARLY,
        num_warps=min(16, max(4, padded // 256)), launch_pdl=EARLY,
    )  # fmt: skip
