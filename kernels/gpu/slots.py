"""State of the batch on the GPU: one int32 array, changed by lists of (place, value).

The host knows which entries of block tables, rows and slots change in a step, and sends them in
one copy; ``scatter`` writes them. Everything else (last tokens, positions, draws) is advanced by
the kernels themselves, so that a step which changes nothing needs nothing from the host.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.early_launch import EARLY

_BLOCK = 512


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
    WIDTH: tl.constexpr, PADDED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        # In this order: behind the next kernel may be one that reads, before it waits, what the
        # kernel ahead of this one wrote (``decode_stretches_hopper``).
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
    tl.store(out + row * WIDTH + column, value, mask=inside)


def embed(table: Tensor, tokens: Tensor, rows: Tensor, last_token: Tensor, out: Tensor) -> None:
    """Embeddings of N rows: of ``tokens``, or of the last token of the row's slot where it is -1.

    table: [V, H]; tokens: [N] int32; rows: int32, read where a token is -1, slot -1 is padding;
    last_token: [slots] int32; out: [N, H] contiguous.
    """
    count, width = out.shape
    if count:
        _embed_kernel[(count,)](
            table, tokens, rows, last_token, out, width, triton.next_power_of_2(width),
            EARLY, num_warps=4, launch_pdl=EARLY,
        )  # fmt: skip
